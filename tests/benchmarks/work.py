"""What the contenders have in common: their command line, the rows they write, and the times they note.

What is measured is the work: from its start to the last row written, less the time in which the model was loaded and warmed
up. A framework that loads the model lazily, perhaps in several processes, notes when it did; the union of these times is
subtracted. That is lenient: whatever the framework does meanwhile counts for nothing. Each process also notes when it made
its first row.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BATCH = 16  # images in one call, where a contender forms batches itself
SIDE = 416
RESULT = "RESULT "
_NOTES = "BENCH_NOTES"  # environment variable: the folder in which loads and first rows are noted


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of every contender."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--images", type=Path, required=True, help="folder of images")
    flags.add_argument("--model", required=True, help="the SavedModel that tests.benchmarks.model makes")
    flags.add_argument("--output", type=Path, required=True, help="folder for *.jsonl")
    return flags


def files(folder: Path) -> list[Path]:
    """The images of a folder, in the order of their names."""
    return sorted(path for path in folder.iterdir() if path.is_file())


def row(uri: str, width: int, height: int, answer: Mapping[str, Any], index: int) -> str:
    """One image's row, as the pipeline writes it: boxes in original pixels.

    Args:
      uri: The image.
      width: Of the image, pixels.
      height: Of the image, pixels.
      answer: The model's outputs as arrays; boxes are yxyx in 0..1.
      index: The image's place in the batch.
    """
    _note_first_row()
    count = int(answer["num"][index])
    boxes = answer["boxes"][index][:count][:, [1, 0, 3, 2]] * [width, height, width, height]
    detections = [
        {
            "box_xyxy": [round(edge, 2) for edge in box],
            "class_id": int(class_id),
            "class_name": f"class {int(class_id)}",
            "confidence": round(score, 5),
        }
        for box, class_id, score in zip(
            boxes.tolist(), answer["classes"][index][:count].tolist(), answer["scores"][index][:count].tolist(), strict=True
        )
    ]
    return json.dumps({"image": {"uri": uri, "width": width, "height": height}, "detections": detections})


class Work:
    """The time of one run's work; prints it as a line for the driver when left without an error."""

    def __init__(self) -> None:
        self._notes = Path(tempfile.mkdtemp(prefix="bench-notes-"))
        os.environ.update(self.environment)

    @property
    def environment(self) -> dict[str, str]:
        """What a process elsewhere needs in its environment for its notes to count."""
        return {_NOTES: str(self._notes)}

    def __enter__(self) -> Work:
        self._started_at = time.time()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        finished_at = time.time()
        loads, rows = self._noted("load"), self._noted("row")
        shutil.rmtree(self._notes)
        if kind is None:
            inside = [(max(start, self._started_at), min(end, finished_at)) for start, end in loads]
            times = {
                "started_at": self._started_at,
                "finished_at": finished_at,
                "first_row_at": min((at for at, *_ in rows), default=finished_at),
                "loads": _union(inside),
            }
            print(RESULT + json.dumps(times), flush=True)

    def _noted(self, kind: str) -> list[list[float]]:
        return [[float(word) for word in note.read_text().split()] for note in self._notes.glob(f"{kind}-*")]


def note_load(started_at: float) -> None:
    """Notes that this process has been loading and warming the model since then (seconds since the epoch)."""
    _note("load", f"{started_at} {time.time()}")


@functools.cache
def _note_first_row() -> None:
    _note("row", f"{time.time()}")


def _note(kind: str, text: str) -> None:
    if _NOTES in os.environ:
        with tempfile.NamedTemporaryFile("w", dir=os.environ[_NOTES], prefix=f"{kind}-", delete=False) as file:
            file.write(text)


def _union(intervals: Iterable[tuple[float, float]]) -> list[list[float]]:
    """What they cover, as intervals that do not overlap."""
    merged: list[list[float]] = []
    for start, stop in sorted(each for each in intervals if each[0] < each[1]):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return merged
