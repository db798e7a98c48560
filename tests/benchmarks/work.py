"""What the contenders have in common: their command line, the rows they write, and the times they note.

What is measured is the work, from its start to the last row written; the model is loaded and warmed up before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BATCH = 16  # images in one call, where a contender forms batches itself
SIDE = 416
RESULT = "RESULT "


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of every contender."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--images", type=Path, required=True, help="folder of images")
    flags.add_argument("--model", required=True, help="the SavedModel that tests.benchmarks.model makes")
    flags.add_argument("--output", type=Path, required=True, help="folder for *.jsonl")
    return flags


def row(uri: str, width: int, height: int, answer: Mapping[str, Any], index: int) -> str:
    """The row of an image in a batch, as the pipeline writes it: boxes yxyx in 0..1 become xyxy in pixels of the image."""
    boxes, scores, classes = (answer[name][index][: int(answer["num"][index])] for name in ("boxes", "scores", "classes"))
    corners = boxes[:, [1, 0, 3, 2]] * [width, height, width, height]
    detections = [
        {"box_xyxy": box, "class_id": number, "class_name": f"class {number}", "confidence": round(score, 5)}
        for box, score, number in zip(corners.round(2).tolist(), scores.tolist(), classes.astype(int).tolist(), strict=True)
    ]
    return json.dumps({"image": {"uri": uri, "width": width, "height": height}, "detections": detections})


@contextlib.contextmanager
def measured() -> Iterator[None]:
    """Its block is one run's work, whose times it prints as a line for the driver unless an error comes."""
    started_at = time.time()
    yield
    print(RESULT + json.dumps({"started_at": started_at, "finished_at": time.time()}), flush=True)
