"""`make demo-backfill`: runs that add up in one folder, on sample images and with the bundled detector.

A batch job is killed midway and started again; a stream does images that came later; one image is overwritten and two come
while nothing runs; a backfill does just these three; and a reconciliation looks whether every image has its row.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.emulators import EmulatorMissing, PubSubEmulator, running_pubsub_emulator
from tests.processes import end_group, running

SAMPLES = sorted(Path("models/digits/samples").glob("*.jpg"))
PLACE = Path("out/demo_backfill")
DONE, FAILED, WRONG = 0, 1, 2

Start = Callable[..., AbstractContextManager[Any]]


class DemoFailedError(Exception):
    """A step of the demo did not do what it is there to show."""


def main() -> int:
    """Runs the demo; returns 0 when each step did what it is there to show."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--images", type=int, default=400, help="images of the first run")
    given = flags.parse_args()
    shutil.rmtree(PLACE, ignore_errors=True)
    photos, out = (PLACE / "photos").resolve(), PLACE / "results"  # a message names a file by its whole path
    photos.mkdir(parents=True)
    _add(photos, range(given.images))
    try:
        with running_pubsub_emulator() as emulator:
            _say(f"1  {given.images} images; the job is killed when a third of them is done")
            _killed([*_job(photos, out), "--shard-seconds", "0.1"], out, given.images // 3)
            _go_on(emulator, photos, out, given.images)
    except (EmulatorMissing, DemoFailedError) as err:
        print(f"error: {err}", file=sys.stderr)
        return WRONG if isinstance(err, EmulatorMissing) else FAILED
    print(f"\nOpen {out}/report.html in a browser; the rows of all runs are in {out}/detections/.")
    return DONE


def _started(arguments: Sequence[str], **environment: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    print("$", *(f"{name}={value}" for name, value in environment.items()), "python -m", shlex.join(arguments), flush=True)
    return running([sys.executable, "-m", *arguments], env={**os.environ, **environment})


def _job(photos: Path, out: Path) -> list[str]:
    return ["pipeline.run", "--config", "configs/backfill_local_direct.yaml", "--input", f"{photos}/*.jpg", "--output", str(out)]


def _go_on(emulator: PubSubEmulator, photos: Path, out: Path, images: int, start: Start = _started) -> None:
    """All but the first step, of whose job some rows are there."""
    job = _job(photos, out)
    _say("2  the same command again: what was done counts")
    _run(start, job)
    _expect(out, read=images)
    _say("3  a stream, with the same folder as its archive; five images come")
    _stream(start, emulator, out, _add(photos, range(images, images + 5)))
    _say("4  nothing runs; an image is overwritten, and two come")
    shutil.copy(SAMPLES[-1], photos / "0000.jpg")
    _add(photos, range(images + 5, images + 7))
    _say("5  a backfill does these three")
    _run(start, job)
    _expect(out, read=images + 7, skipped=images + 4)
    _say("6  has every image its row?")
    _run(start, ["pipeline.reconcile", "--input", f"{photos}/*.jpg", "--output", str(out)])


def _add(photos: Path, numbers: Sequence[int]) -> list[Path]:
    return [Path(shutil.copy(SAMPLES[number % len(SAMPLES)], photos / f"{number:04d}.jpg")) for number in numbers]


def _killed(arguments: Sequence[str], out: Path, images: int) -> None:
    """Kills a job, with its whole group, as soon as so many images have rows."""
    with _started(arguments) as job:
        while job.poll() is None:
            if _rows(out) >= images:
                end_group(job)
                print(f"(killed; {_rows(out)} images are done)")
                return
            time.sleep(0.01)
    raise DemoFailedError("the job was done before it could be killed; give it more --images")


def _rows(out: Path) -> int:
    """How many rows there are, by what the shards say of themselves: while they are counted, the job goes on."""
    return sum(pq.read_metadata(path).num_rows for path in out.glob("detections/*.parquet"))


def _run(start: Start, arguments: Sequence[str]) -> None:
    with start(arguments) as job:
        if job.wait():
            raise DemoFailedError(f"{arguments[0]} ended with {job.returncode}")


def _stream(start: Start, emulator: PubSubEmulator, out: Path, images: Sequence[Path]) -> None:
    topic, subscription = emulator.create()
    detections, results = emulator.create()
    arguments = ["pipeline.run", "--config", "configs/streaming_pubsub_direct.yaml", "--input", subscription]
    arguments += ["--output", detections, "--archive", str(out), "--allow-uri-prefix", str(images[0].parent)]
    for image in images:
        emulator.publisher().publish(topic, str(image).encode()).result()
    with start(arguments, PUBSUB_EMULATOR_HOST=emulator.host) as job:
        answers, end = [], time.monotonic() + 240
        while len(answers) < len(images) and job.poll() is None and time.monotonic() < end:
            answers += emulator.take(results, len(images) - len(answers), timeout_s=2)
        job.send_signal(signal.SIGTERM)
        if job.wait(timeout=240) or len(answers) < len(images):
            raise DemoFailedError(f"the stream published {len(answers)} of {len(images)} results")


def _expect(out: Path, **counts: int) -> None:
    """Makes sure of some counts of the latest run."""
    images = json.loads((out / "summary.json").read_text())["images"]
    wrong = {name: images[name] for name, count in counts.items() if images[name] != count}
    if wrong:
        raise DemoFailedError(f"expected {counts}, got {wrong}")


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
