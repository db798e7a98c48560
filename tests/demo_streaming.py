"""`make demo-streaming`: the whole way of a stream on this machine, on Google's Pub/Sub emulator and with the bundled detector.

Publishes the sample scenes at a steady rate for half a minute, as bytes and as requests, while the job prints its lines. Then it
ends the job as a service manager would, and prints where the results are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.emulators import EmulatorMissing, PubSubEmulator, running_pubsub_emulator
from tests.processes import running, wait_until

SAMPLES = Path("models/digits/samples")
ARCHIVE = Path("out/demo_streaming")


def main() -> int:
    """Runs the demo; returns the job's exit code."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--seconds", type=float, default=30)
    flags.add_argument("--rate", type=float, default=8, help="images a second")
    given = flags.parse_args()
    try:
        with running_pubsub_emulator() as emulator:
            return run_demo(emulator, given.seconds, given.rate)
    except EmulatorMissing as err:
        print(f"error: {err}", file=sys.stderr)
        return 2


def run_demo(
    emulator: PubSubEmulator,
    seconds: float,
    rate: float,
    *flags: str,
    config: str = "configs/streaming_pubsub_direct.yaml",
    archive: Path = ARCHIVE,
) -> int:
    """Publishes while a job runs, with more flags where they are given; returns its exit code."""
    images, subscription = emulator.create()
    detections, results = emulator.create()
    command = [sys.executable, "-m", "pipeline.run", "--config", config]
    command += ["--input", subscription, "--output", detections, "--archive", str(archive)]
    command += ["--allow-uri-prefix", str(SAMPLES.resolve()), "--model", "digits", *flags]
    print("$ PUBSUB_EMULATOR_HOST=" + emulator.host, " ".join(["python", *command[1:]]), flush=True)
    with running(command, env={**os.environ, "PUBSUB_EMULATOR_HOST": emulator.host}) as job:
        emulator.publisher().publish(images, next(_messages())[0], name="first").result()
        wait_until(lambda: emulator.take(results, 1, timeout_s=2) or job.poll() is not None)  # the model is loaded
        published = _publish(emulator, images, seconds, rate, job)
        if job.poll() is None:
            answers = emulator.take(results, published)
            last = answers[-1].data.decode()[:160]
            print(f"{published} images published, {len(answers)} answers received; the last: {last} …")
            job.send_signal(signal.SIGTERM)
        code = job.wait(timeout=60)
    if code == 0:
        report = f"Open {archive}/report.html in a browser." if (archive / "report.html").exists() else ""
        print(f"\n{report}\nThe rows are in {archive}/detections/, one file for every ten seconds.")
    return code


def _publish(emulator: PubSubEmulator, topic: str, seconds: float, rate: float, job: subprocess.Popen[bytes]) -> int:
    """Publishes at a steady rate; returns the number of images."""
    publisher, number, started = emulator.publisher(), 0, time.monotonic()
    for data, attributes, count in _messages():
        if time.monotonic() - started > seconds or job.poll() is not None:
            break
        publisher.publish(topic, data, **attributes).result()
        number += count
        time.sleep(max(0.0, started + number / rate - time.monotonic()))
    return number


def _messages() -> Iterator[tuple[bytes, dict[str, str], int]]:
    """Messages without end: raw bytes, and a request of three URIs while there are more; (content, attributes, images)."""
    scenes = sorted(SAMPLES.resolve().glob("*.jpg"))
    uris = map(str, scenes)
    for number, scene in enumerate(itertools.cycle(scenes)):
        yield scene.read_bytes(), {"content-type": "image/jpeg", "name": f"camera-{number}"}, 1
        if asked := [*itertools.islice(uris, 3)]:
            yield json.dumps({"request_id": f"request-{number}", "images": asked}).encode(), {}, len(asked)


if __name__ == "__main__":
    sys.exit(main())
