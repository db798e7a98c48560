"""What the contenders have in common: their command line, the model, the rows they write, and the times they note.

What is measured is the work, from its start to the last row written, less the time in which a framework that loads the model
lazily did so, perhaps in several processes. Only the standard library and NumPy, since other frameworks' environments import it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 16  # images in one call, where a contender forms batches itself
SIDE = 416
CORES = len(os.sched_getaffinity(0))
RESULT = "RESULT "
FREE = "free"  # names a model that costs nothing
NOTES = "BENCH_NOTES"  # environment variable: the folder in which processes note when they loaded the model

Detect = Callable[[np.ndarray], Mapping[str, Any]]
"""`(n, 416, 416, 3) uint8` -> boxes `(n, 100, 4)` yxyx in 0..1, scores, classes, num."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of every contender."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--images", type=Path, required=True, help="folder of images")
    flags.add_argument("--model", required=True, help=f"the SavedModel that tests.benchmarks.model makes, or {FREE!r}")
    flags.add_argument("--output", type=Path, required=True, help="folder for *.jsonl")
    flags.add_argument("--skip-bad", action="store_true", help="what it has against images that cannot be decoded, if anything")
    return flags


def load(model: str, threads: int = 0) -> Detect:
    """The model in TensorFlow, warm; `threads` of each operation, or TensorFlow's default."""
    if model == FREE:
        return free_answer
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    loaded = tf.saved_model.load(model)
    signature = loaded.signatures["serving_default"]

    def detect(pixels: np.ndarray, _owns_variables: Any = loaded) -> dict[str, Any]:
        answer = signature(images=tf.constant(pixels.astype(np.float32) / 255.0))
        return {name: value.numpy() for name, value in answer.items()}

    for _ in range(2):
        detect(np.zeros((BATCH, SIDE, SIDE, 3), np.uint8))
    return detect


def free_answer(pixels: np.ndarray) -> dict[str, Any]:
    """Ten objects in each image, at once."""
    n, corners = len(pixels), np.random.default_rng(0).uniform(0, 0.5, (10, 2)).astype(np.float32)
    boxes, scores = np.concatenate([corners, corners + 0.1], axis=1), np.linspace(0.9, 0.5, 10, dtype=np.float32)
    return {
        "boxes": np.stack([boxes] * n),
        "scores": np.stack([scores] * n),
        "classes": np.stack([np.arange(10)] * n),
        "num": [10] * n,
    }


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


@contextlib.contextmanager
def loading(since: float = 0.0) -> Iterator[None]:
    """Its block, or this process from `since` to the block's end, loads and warms the model within the work."""
    began = since or time.time()
    yield
    Path(os.environ[NOTES], f"{os.getpid()}").write_text(f"{began} {time.time()}")


def loads(notes: Path) -> list[tuple[float, float]]:
    """When some process was loading the model: intervals, ascending, that do not overlap."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(tuple(map(float, note.read_text().split())) for note in notes.iterdir()):
        last = found.pop() if found and begin <= found[-1][1] else (begin, end)
        found.append((last[0], max(last[1], end)))
    return found
