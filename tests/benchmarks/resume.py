"""A job that is killed again and again, and started each time by the same command: how much of its work is done twice.

    python -m tests.benchmarks.resume [--images 5000] [--kills 10] [--seed 1] [--resume-point-s 0.5] [--request-images 16]

The images are the bundled detector's samples under many names. Each start is killed with SIGKILL at a random moment of its work;
the last one ends by itself, and its files must be those of a job that nobody disturbed. Work is what the model was given, counted
in memory that outlives the process, whatever became of it. The CPU time is that of whole processes; of each, Python's and
TensorFlow's start and the model's loading take ten seconds.

`--resume-point-s` and `--request-images` are chosen for a job of a minute, which is killed every few seconds: what the model was
given counts as done once its request is complete and its rows are in a checkpoint. Of a job of hours the defaults cost less.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import random
import resource
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.images import BENCH, link_images
from tests.processes import end_group, running

SAMPLES = Path("models/digits/samples")
OUT = BENCH / "out" / "resume"
_COUNT_BYTES = 8
_LOOK_SECONDS = 0.002


class Start(NamedTuple):
    """What a start of the job did.

    Attributes:
      ran: Images that the model was given.
      cpu_seconds: CPU time of the process, all of it.
      killed: Whether it was killed.
    """

    ran: int
    cpu_seconds: float
    killed: bool


def main() -> None:
    """Runs the job undisturbed and killed, and says what that cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume-point-s", type=float, default=0.5)
    parser.add_argument("--request-images", type=int, default=16)
    parser.add_argument("--job", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        sys.exit(_job(args.job[0], args.job[1:]))
    shutil.rmtree(OUT, ignore_errors=True)
    images = link_images(SAMPLES, OUT / "images", args.images)
    command = ["--input", str(images), "--resume-point-s", str(args.resume_point_s), "--request-images", str(args.request_images)]
    print(f"python -m pipeline.run {shlex.join(command)} --output …", flush=True)

    whole = _start([*command, "--output", str(OUT / "undisturbed")], None)
    assert whole.ran >= args.images and not whole.killed, whole
    seconds = _summary("undisturbed")["wall_seconds"]
    print(f"undisturbed: {whole.ran} images, {seconds:.0f} s after its start, {whole.cpu_seconds:.0f} CPU s", flush=True)

    starts = list(_until_done([*command, "--output", str(OUT / "killed")], _moments(args)))
    killed, ran = sum(start.killed for start in starts), sum(start.ran for start in starts)
    same = _files(OUT / "undisturbed") == _files(OUT / "killed")
    print(f"{len(starts)} starts, {killed} killed; the last one found {_summary('killed')['resumed']} done")
    print(f"work: {ran} images, {ran / whole.ran:.3f} of the undisturbed run's; files equal: {same}")
    print(f"CPU: {sum(start.cpu_seconds for start in starts):.0f} s, with {len(starts)} starts of a process")
    assert same and killed == args.kills
    shutil.rmtree(OUT, ignore_errors=True)


def _moments(args: argparse.Namespace) -> list[int]:
    """After how many images of its own each start is killed: random, and so that the job is not done before the last one."""
    random_moments = random.Random(args.seed)
    cuts = sorted(random_moments.sample(range(1, args.images * 9 // 10), args.kills))
    return [later - earlier for earlier, later in zip([0, *cuts], cuts, strict=False)]


def _until_done(command: Sequence[str], moments: Sequence[int]) -> Iterator[Start]:
    for number, moment in enumerate([*moments, None], 1):
        start = _start(command, moment)
        what = f"killed after {start.ran} images" if start.killed else f"ended after {start.ran} images"
        print(f"start {number:2}: {what}, {start.cpu_seconds:.0f} CPU s", flush=True)
        yield start


def _start(command: Sequence[str], killed_after: int | None) -> Start:
    """Starts the job, kills it with its whole group after so many images, and waits for its end."""
    counter = OUT / "counter"
    counter.write_bytes(bytes(_COUNT_BYTES))
    before = _cpu_seconds()
    job_command = [sys.executable, "-m", "tests.benchmarks.resume", "--job", str(counter), *command]
    with open(OUT / "log", "a") as log, running(job_command, stdout=log, stderr=log) as job:
        killed = False
        while job.poll() is None:
            if not killed and killed_after is not None and _count(counter) >= killed_after:
                end_group(job)
                killed = True
            time.sleep(_LOOK_SECONDS)
    if job.returncode != (-signal.SIGKILL if killed else 0):
        raise SystemExit(f"the job ended with {job.returncode}: {(OUT / 'log').read_text()[-2000:]}")
    return Start(_count(counter), _cpu_seconds() - before, killed)


def _job(counter: str, argv: Sequence[str]) -> int:
    """The job, with a count of what its model is given."""
    from pipeline import run
    from pipeline.detect.batching import BatchedModel

    with open(counter, "r+b") as file:
        shared, lock, call = mmap.mmap(file.fileno(), _COUNT_BYTES), threading.Lock(), BatchedModel.__call__
    warm_up = BatchedModel.warm_up
    warm: set[int] = set()

    def warmed_up(self: BatchedModel, *, at_once: bool = True) -> None:
        warm_up(self, at_once=at_once)
        warm.add(id(self))

    def counted(self: BatchedModel, images: Sequence[object]) -> object:
        if id(self) in warm:
            with lock:
                shared[:] = (int.from_bytes(shared[:], "little") + len(images)).to_bytes(_COUNT_BYTES, "little")
        return call(self, images)

    BatchedModel.warm_up, BatchedModel.__call__ = warmed_up, counted  # type: ignore[method-assign]
    return run.main(argv)


def _count(counter: Path) -> int:
    return int.from_bytes(counter.read_bytes(), "little")


def _cpu_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _summary(name: str) -> dict[str, float]:
    summary: dict[str, float] = json.loads((OUT / name / "summary.json").read_text())
    return summary


def _files(folder: Path) -> dict[str, str]:
    """All files but those that hold times, with a hash of their content."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name not in ("summary.json", "report.html"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


if __name__ == "__main__":
    main()
