"""`make demo-flink`: a batch job and a stream on a Flink cluster of this machine, with the bundled detector, in five minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.demo_streaming import SAMPLES, run_demo
from tests.emulators import EmulatorMissing, running_pubsub_emulator
from tests.flink.cluster import FlinkCluster, RunnerMissing, job_flags, running_flink

_OUT = Path("out/demo_flink").absolute()


def main() -> int:
    """Runs the demo; returns the exit code."""
    try:
        with running_flink(_OUT / "cluster") as flink:
            print(f"Flink's dashboard, for as long as this runs: {flink.rest}", flush=True)
            return _batch(flink) or _stream(flink)
    except (RunnerMissing, EmulatorMissing) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2


def _batch(flink: FlinkCluster) -> int:
    command = [sys.executable, "-m", "pipeline.run", "--config", "configs/batch_gcs_flink.yaml", "--model", "digits"]
    command += ["--input", str(SAMPLES.resolve()), "--output", str(_OUT / "batch"), *job_flags(flink)]
    print("$", " ".join(["python", *command[1:]]), flush=True)
    return subprocess.run(command, check=False).returncode


def _stream(flink: FlinkCluster) -> int:
    with running_pubsub_emulator() as emulator:
        flags = job_flags(flink, PUBSUB_EMULATOR_HOST=emulator.host)
        return run_demo(emulator, 30, 8, *flags, config="configs/streaming_pubsub_flink.yaml", archive=_OUT / "stream")


if __name__ == "__main__":
    sys.exit(main())
