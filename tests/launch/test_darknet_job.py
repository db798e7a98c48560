"""From Darknet files through the command line to rows, against OpenCV's detections in photos, for one model."""

import json
from pathlib import Path

import numpy as np

from models.geometry import iou_matrix
from pipeline import run
from pipeline.commands import import_model
from tests.fixtures import fixtures_dir
from tests.launch.jobs import rows_of


def test_an_imported_darknet_model_detects_what_opencv_detects(tmp_path):
    """All match one to one at IoU 0.98 and score within 0.01; nothing above 0.35 is extra."""
    fixtures = fixtures_dir()
    stem, size = "yolo-fastest-1.1", 320
    darknet = fixtures / "darknet"
    files = ["--cfg", darknet / f"{stem}.cfg", "--weights", darknet / f"{stem}.weights", "--names", darknet / "coco.names"]
    assert import_model.main([*map(str, files), "--input-size", str(size), "--output", str(tmp_path / "model" / "1")]) == 0
    photos = [str(path) for path in sorted((fixtures / "photos").iterdir())]
    job = ["--input", *photos, "--output", str(tmp_path / "out"), "--model", str(tmp_path / "model")]
    assert run.main([*job, "--score-threshold", "0.25", "--iou-threshold", "0.45"]) == 0

    reference = json.loads((fixtures / "photos_reference_opencv.json").read_text())["models"][f"{stem}@{size}"]["images"]
    rows = rows_of(tmp_path / "out")
    assert len(rows) == len(reference) == len(photos)
    expected, matched, unmatched = 0, 0, []
    for row in rows:
        wanted = reference[f"photos/{Path(row['image']['uri']).name}"]["detections"]
        pairs, left = match(wanted, row["detections"])
        expected, matched = expected + len(wanted), matched + pairs
        unmatched += left
    assert matched == expected, unmatched
    assert [confidence for confidence in unmatched if confidence > 0.35] == []


def match(wanted: list[dict], found: list[dict]) -> tuple[int, list[float]]:
    """How many match one to one in class and its name, box and score, and the confidences of what is left on either side."""
    boxes = [np.array([box[key] for box in boxes]).reshape(-1, 4) for boxes, key in ((wanted, "box"), (found, "box_xyxy"))]
    scores = np.subtract.outer([box["score"] for box in wanted], [box["confidence"] for box in found])
    fits = (iou_matrix(*boxes) >= 0.98) & (np.abs(scores) <= 0.01)
    free, missing = [*range(len(found))], []
    for number, box in enumerate(wanted):
        wanted_class = box["class_id"], box["name"]
        of_class = [other for other in free if (found[other]["class_id"], found[other]["class_name"]) == wanted_class]
        partner = next((other for other in of_class if fits[number, other]), None)
        if partner is None:
            missing.append(box["score"])
        else:
            free.remove(partner)
    return len(wanted) - len(missing), missing + [found[other]["confidence"] for other in free]
