"""Runs contenders alternately, A B C A B C: what changes on the machine over minutes then meets all of them alike."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from tests.benchmarks import work
from tests.benchmarks.contenders import Contender
from tests.benchmarks.images import BENCH
from tests.benchmarks.process_tree import Watched, watch

_TIMEOUT_SECONDS = 1800.0


class Run(NamedTuple):
    """One run of one contender. Start-up, which loads the model, is not in its work."""

    contender: str
    round: int  # from 0
    images: int  # with a row
    images_per_second: float  # over the work
    started_at: float  # when the work started, seconds since the epoch
    work_seconds: float  # until the last row
    startup_seconds: float  # from the start of the process to the work
    peak_rss_mb: float  # highest resident memory of the process tree
    cpu_seconds_per_image: float  # user and system time of the process tree during the work
    first_row_seconds: float  # from the start of the process until a file of rows has some


def run_rounds(
    contenders: Mapping[str, Contender], images: Path, count: int, rounds: int, output: Path, failed: dict[str, str] | None = None
) -> list[Run]:
    """Runs all contenders in turn, `rounds` times, over a folder of `count` images; `output` gets a folder of each.

    One that fails ends all, or is noted in `failed` with the reason, and then runs no more.
    """
    runs = []
    for number in range(rounds):
        for name, contender in contenders.items():
            if failed and name in failed:
                continue
            try:
                run = run_once(name, contender, number, images, output / file_name(name))
                if run.images != count:
                    raise SystemExit(f"{name}: expected {count} rows, got {run.images}")
            except SystemExit as err:
                if failed is None:
                    raise
                failed[name] = str(err).strip().splitlines()[-1]
                continue
            print(
                f"round {number + 1}  {name:<34} {run.images_per_second:7.1f} images/s  "
                f"{1000 * run.cpu_seconds_per_image:6.1f} CPU-ms/image  {run.peak_rss_mb:6.0f} MB",
                file=sys.stderr,
                flush=True,
            )
            runs.append(run)
    return runs


def run_once(name: str, contender: Contender, number: int, images: Path, output: Path) -> Run:
    """Runs one contender once, over a fresh folder for its output; without rows, or after half an hour, all ends."""
    watched = start_once(name, contender, images, output, _TIMEOUT_SECONDS)
    if watched.exit_code:
        raise SystemExit(f"{name}: ended with {watched.exit_code}; see {log_of(name)}:\n{watched.output[-1500:]}")
    start, end = _times(contender, watched, output)
    rows = count_rows(output)
    if not rows:
        raise SystemExit(f"{name}: wrote no rows; see {log_of(name)}")
    loads = [(max(begin, start), min(until, end)) for begin, until in work.loads(output / "notes") if until > start]
    load_seconds = sum(until - begin for begin, until in loads)
    cpu_seconds = watched.cpu_seconds(start, end) - sum(watched.cpu_seconds(*load) for load in loads)
    return Run(
        contender=name,
        round=number,
        images=rows,
        images_per_second=rows / (end - start - load_seconds),
        started_at=start,
        work_seconds=end - start - load_seconds,
        startup_seconds=start + load_seconds - watched.started_at,
        peak_rss_mb=watched.peak_rss_mb,
        cpu_seconds_per_image=cpu_seconds / rows,
        first_row_seconds=watched.first_row_at - watched.started_at,
    )


def start_once(name: str, contender: Contender, images: Path, output: Path, timeout_s: float) -> Watched:
    """Runs a contender's command over a fresh folder for its output, until it ends, or is ended after `timeout_s`."""
    shutil.rmtree(output, ignore_errors=True)
    for folder in (output / "detections", output / "notes", log_of(name).parent):
        folder.mkdir(parents=True, exist_ok=True)
    environment = {work.NOTES: str((output / "notes").resolve())}
    return watch(contender.command(images, output), log_of(name), timeout_s, environment, lambda: count_rows(output) > 0)


def count_rows(output: Path) -> int:
    """The rows that a contender has written."""
    rows = sum(1 for file in (output / "detections").glob("*.jsonl") for _ in file.open("rb"))
    return rows + sum(pq.read_metadata(file).num_rows for file in (output / "detections").glob("*.parquet"))


def log_of(name: str) -> Path:
    """What a contender printed in its last run."""
    return BENCH / "logs" / f"{file_name(name)}.log"


def _times(contender: Contender, watched: Watched, output: Path) -> tuple[float, float]:
    """Start and end of a run's work, in seconds since the epoch."""
    if contender.is_ours:
        summary = json.loads((output / "summary.json").read_text())
        start = watched.started_at + summary["startup_seconds"] + summary.get("submission_seconds", 0.0)
        return start, start + summary["wall_seconds"]
    lines = [line for line in watched.output.splitlines() if line.startswith(work.RESULT)]
    if not lines:
        raise SystemExit("a contender ended without its line of times")
    times: dict[str, float] = json.loads(lines[-1][len(work.RESULT) :])
    return times["started_at"], times["finished_at"]


def file_name(name: str) -> str:
    """A contender's name as that of a file."""
    return "".join(character if character.isalnum() else "_" for character in name)
