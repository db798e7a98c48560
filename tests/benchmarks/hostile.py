"""What becomes of good images whose neighbours are damaged, and of those neighbours: the losses of one run.

A good image is lost where it has no row. A hostile one is lost where it has neither a row nor a record of its failure (a dead
letter, or what a contender's own means against bad input gives). A row says nothing about whether its pixels are right.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from tests.benchmarks import work


@dataclasses.dataclass(frozen=True)
class Losses:
    """Of one run over good and hostile images.

    Attributes:
      good: Good images.
      good_lost: Those without a row.
      hostile: Hostile images.
      hostile_rows: Those with a row.
      hostile_recorded: Those without a row that are recorded as failed.
      ended: How the job ended: "ends", "dies" or "hangs".
    """

    good: int
    good_lost: int
    hostile: int
    hostile_rows: int
    hostile_recorded: int
    ended: str

    @property
    def hostile_lost(self) -> int:
        """Hostile images with neither."""
        return self.hostile - self.hostile_rows - self.hostile_recorded

    def __str__(self) -> str:
        return (
            f"{self.ended}; lost {self.good_lost} of {self.good} good, {self.hostile_lost} of {self.hostile} hostile "
            f"({self.hostile_rows} rows, {self.hostile_recorded} recorded)"
        )


def count_losses(
    good: Collection[str], hostile: Collection[str], rows: Collection[str], recorded: Collection[str], ended: str = "ends"
) -> Losses:
    """Counts by the names of files; one that has a row and is recorded too counts as a row."""
    with_row, failed = set(rows), set(recorded) - set(rows)
    return Losses(
        good=len(good),
        good_lost=len(set(good) - with_row),
        hostile=len(hostile),
        hostile_rows=len(set(hostile) & with_row),
        hostile_recorded=len(set(hostile) & failed),
        ended=ended,
    )


def mix(good: Sequence[Path], hostile: Sequence[Path], folder: Path) -> tuple[list[str], list[str]]:
    """Links or copies both into a fresh folder, the good ones spread evenly among the others; returns the names there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    every = max(1, len(hostile) // max(1, len(good)))
    order: list[Path] = []
    waiting = list(good)
    for number, path in enumerate(hostile):
        order += [waiting.pop(0)] if waiting and number % every == 0 else []
        order.append(path)
    names = {path: f"{number:03d}-{path.name}" for number, path in enumerate(order + waiting)}
    for path, name in names.items():
        shutil.copyfile(path, folder / name)
    return [names[path] for path in good], [names[path] for path in hostile]


def names_in(output: Path) -> tuple[set[str], set[str]]:
    """The images with rows, and those recorded as failed, of a contender's output folder."""
    rows = {_name(json.loads(line)["image"]["uri"]) for line in _lines(output, "detections/*.jsonl")}
    recorded = {_name(json.loads(line)["image"]["uri"]) for line in _lines(output, "dead_letters/*.jsonl")}
    return rows, recorded | {_name(line) for line in _lines(output, f"detections/{work.FAILED}*")}


def _lines(output: Path, pattern: str) -> list[str]:
    return [line for file in output.glob(pattern) for line in file.read_text().splitlines() if line]


def _name(uri: str) -> str:
    return os.path.basename(uri)
