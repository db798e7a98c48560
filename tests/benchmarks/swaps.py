"""Puts new versions of the model into use under a stream at half of its rate: `python -m tests.benchmarks.swaps [--swaps 50]`.

    latency     p99 from publishing to receiving with swaps, beside that of the same job before the first
    lost        images without an answer
    resident    MB of the job's process after the last swap, beside those after the fifth
    threads     the same

`--full-size CFG` takes the network of a Darknet cfg with random weights for the model, e.g. that of YOLOv4 (64 million values).
Publisher, emulator (Java), job, receiver and the process that loads the next version share this machine's cores. Figures go to
`.bench/swaps.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.images import BENCH, SMALL, make_images
from tests.benchmarks.model import make_model
from tests.benchmarks.streaming import CONFIG, Receiver, percentiles, steady_rate
from tests.emulators import running_pubsub_emulator
from tests.streaming_job import StreamingJob

_SWAPPED = re.compile(r"version (\d+) -> (\d+), loaded in ([\d.]+) s")
_EARLY = 5  # swaps after which memory is looked at first
_FLAGS = ("--model-poll-s", "0.5", "--deduplicate-s", "60")  # what a stream remembers has its full size by then


def release(model: Path, versions: Path, number: int) -> None:
    """Adds a version to a folder of versions at once, by links, and removes the one before the last."""
    shutil.copytree(model, versions / "unfinished", copy_function=os.link)
    (versions / "unfinished").rename(versions / str(number))
    shutil.rmtree(versions / str(number - 2), ignore_errors=True)


def make_full_size(cfg: Path) -> Path:
    """Imports a Darknet network with random weights; the SavedModel's folder."""
    from models import import_darknet
    from tests.models.darknet_cases import random_values, write_weights

    folder = BENCH / f"model-{cfg.stem}"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as scratch:
            weights, names = Path(scratch, "random.weights"), Path(scratch, "names")
            write_weights(weights, random_values(cfg.read_text(), spread=0.7))
            names.write_text("\n".join(f"class {number}" for number in range(80)))
            made = ["--cfg", str(cfg), "--weights", str(weights), "--names", str(names), "--output", str(folder)]
            if import_darknet.main(made):
                raise SystemExit(f"{cfg} cannot be imported")
    return folder


class Publisher:
    """Publishes images at a steady rate, in a thread, until left; use as a context manager.

    Attributes:
      sent: How many.
    """

    def __init__(self, job: StreamingJob, rate: float):
        self._job, self._rate, self._left = job, rate, threading.Event()
        self._images = [path.read_bytes() for path in sorted(make_images(SMALL).glob("*.jpg"))]
        self._thread = threading.Thread(target=self._publish, daemon=True)
        self.sent = 0

    def __enter__(self) -> Publisher:
        self._started = time.time()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._left.set()
        self._thread.join()

    def _publish(self) -> None:
        while not self._left.wait(max(0.0, self._started + self.sent / self._rate - time.time())):
            self._job.publish((self._images[self.sent % len(self._images)], {"name": f"{self._started}-{self.sent}"}))
            self.sent += 1


def measure(job: StreamingJob, receiver: Receiver, model: Path, versions: Path, swaps: int, without_s: float) -> dict[str, Any]:
    """The figures of one job that is started, at half of the rate that it is measured to have."""
    process = psutil.Process(job.pid)
    rate = _rate(job, receiver) / 2
    before = len(receiver.received)
    with Publisher(job, rate) as calm:
        time.sleep(without_s)
    without = receiver.wait(lambda received: len(received) >= before + calm.sent)[before:]
    before, resident, threads, swapped_s = len(receiver.received), [], [], []
    with Publisher(job, rate) as busy:
        for number in range(2, swaps + 2):
            release(model, versions, number)
            swapped_s.append(_wait_for_swap(job, number))
            time.sleep(1.0)  # images by this version alone
            resident.append(round(process.memory_info().rss / 1e6, 1))
            threads.append(process.num_threads())
    with_swaps = receiver.wait(lambda received: len(received) >= before + busy.sent)[before:]
    early = min(_EARLY, swaps) - 1
    calm_ms, busy_ms = (percentiles([r.latency_ms for r in received]) for received in (without, with_swaps))
    return {
        "images_per_second": round(rate, 2),
        "images": calm.sent + busy.sent,
        "lost": calm.sent + busy.sent - len(without) - len(with_swaps),
        "without_ms": calm_ms,
        "with_swaps_ms": busy_ms,
        "p99_ratio": round(busy_ms["p99"] / calm_ms["p99"], 2),
        "loaded_in_s": {"first": swapped_s[0], "median": sorted(swapped_s)[swaps // 2], "longest": max(swapped_s)},
        "resident_mb": resident,
        "resident_ratio": round(resident[-1] / resident[early], 3),
        "threads": sorted(set(threads)),
        "versions": sorted({r.attributes["model_version"] for r in with_swaps}, key=int),
    }


def _rate(job: StreamingJob, receiver: Receiver) -> float:
    """Images/s of a backlog."""
    images = [path.read_bytes() for path in sorted(make_images(SMALL).glob("*.jpg"))]
    for count in (32, 256):  # the first to warm up
        before = len(receiver.received)
        job.publish(*((images[n], {"name": f"{count}-{n}"}) for n in range(count)))
        received = receiver.wait(lambda received, wanted=before + count: len(received) >= wanted)[before:]
    return steady_rate(received, count)


def _wait_for_swap(job: StreamingJob, number: int) -> float:
    """Waits until a version is in use; seconds that it took to load."""
    while True:
        said = job.output()
        for _, new, seconds in _SWAPPED.findall(said):
            if int(new) == number:
                return float(seconds)
        if "is refused" in said or "error" in said:
            raise SystemExit(said[-2000:])
        time.sleep(0.1)


def main() -> None:
    """Measures, and prints the figures."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--swaps", type=int, default=50)
    flags.add_argument("--without-s", type=float, default=60.0, help="seconds before the first swap (default: %(default)s)")
    flags.add_argument("--full-size", type=Path, metavar="CFG", help="the network of a Darknet cfg, with random weights")
    given = flags.parse_args()
    model = make_full_size(given.full_size) if given.full_size else make_model()
    folder = (BENCH / "out" / "swaps").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    versions = folder / "versions"
    versions.mkdir(parents=True)
    release(model, versions, 1)
    config = "configs/streaming_pubsub_direct.yaml" if given.full_size else CONFIG
    with running_pubsub_emulator() as emulator:
        job = StreamingJob(emulator, folder, str(versions), *_FLAGS, config=config)
        receiver = Receiver(emulator, job.detections)
        try:
            job.start()
            figures = measure(job, receiver, model, versions, given.swaps, given.without_s)
            figures["exit_code"] = job.signal(signal.SIGTERM)
            summary = json.loads((job.archive / "summary.json").read_text())
            figures |= {"counted": summary["images"], "by_version": summary["model"].get("images_by_version")}
        finally:
            job.__exit__()
            receiver.leave()
    print(json.dumps(figures, indent=2))
    (BENCH / "swaps.json").write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
