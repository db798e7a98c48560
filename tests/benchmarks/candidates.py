"""CPU-ms an image from boxes to detections, where few pass the threshold, and where more pass than a device picks.

    python -m tests.benchmarks.candidates

The network is a YOLO of 8,400 boxes and 80 classes, whose outputs are drawn at random. At threshold 0.001, as an evaluation has
it, 1,200 boxes of an image pass, so all boxes are read; at 0.25 those that pass are the ones that a device picks.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from models.geometry import resize_plan
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.detect.detections import to_detections
from pipeline.detect.model_arrays import candidates_of
from tests.benchmarks import results

_HW, _BOXES, _CLASSES, _IMAGES, _PASS, _ROUNDS = (640, 640), 8400, 80, 8, 1200, 9


def main() -> None:
    """Measures, and prints the table."""
    draw = np.random.default_rng(0)
    names = tuple(f"class {number}" for number in range(_CLASSES))
    described = {"classes_output": "", "count_output": "", "nms": "pipeline", "box_format": "cxcywh", "box_units": "pixels"}
    metadata = DetectorMetadata("yolo", _HW, "letterbox", names, **described)
    centres, sizes = draw.uniform(0, 640, (_IMAGES, _BOXES, 2)), draw.uniform(10, 120, (_IMAGES, _BOXES, 2))
    outputs = {"boxes": np.concatenate([centres, sizes], -1).astype(np.float32)}
    outputs["scores"] = draw.uniform(0, 0.0008, (_IMAGES, _BOXES, _CLASSES)).astype(np.float32)
    for image in outputs["scores"]:
        sure = np.exp(draw.uniform(np.log(0.0011), np.log(0.9), _PASS))
        image[draw.choice(_BOXES, _PASS, replace=False), draw.integers(0, _CLASSES, _PASS)] = sure
    outputs["best"] = outputs["scores"].max(-1)  # of the device
    rows = []
    for threshold in (0.25, 0.001):
        detect, spent = DetectConfig(score_threshold=threshold, iou_threshold=0.7, max_detections=300), []
        for _ in range(_ROUNDS):
            began = time.process_time()
            found = candidates_of(outputs, metadata, detect)
            detections = to_detections(found, metadata, [resize_plan((640, 480), _HW, "letterbox")] * _IMAGES, detect)
            spent.append(1e3 * (time.process_time() - began) / _IMAGES)
        counts = (statistics.mean(found["count"]), statistics.mean(map(len, detections)))
        rows.append([str(threshold), *(f"{count:.0f}" for count in counts), f"{statistics.median(spent):.2f}"])
    print(f"\n{results.machine()}\n\n{results.table(['threshold', 'candidates', 'detections', 'CPU-ms an image'], rows)}")


if __name__ == "__main__":
    main()
