"""What Ultralytics itself makes of weights and of data sets; runs in the environment that `make ultralytics` makes.

    python tests/yolo_worker.py predict WEIGHTS FOLDER PHOTO …
    python tests/yolo_worker.py train DATA.YAML FOLDER

`predict` writes `model.onnx` and `found.json`: for each photo its objects. `train` trains for an epoch, and writes `read.json`:
for each photo the labels that Ultralytics reads.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

SCORE, IOU, MOST = 0.01, 0.7, 300  # what both sides are asked for
_QUIET = {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}  # it asks no network, and installs nothing


def predict(weights: str, folder: str, *photos: str) -> None:
    """Finds objects in photos, and writes the model as an ONNX file that takes any number of images."""
    from ultralytics import YOLO

    model = YOLO(weights, task="detect")
    size = 640
    if weights.endswith(".onnx"):
        shutil.copy(weights, f"{folder}/model.onnx")
        size = _size_of(weights)
    asked = {"conf": SCORE, "iou": IOU, "max_det": MOST, "imgsz": size, "rect": False, "device": "cpu", "verbose": False}
    found = {}
    for photo in photos:
        (result,) = model.predict(photo, **asked)
        boxes = result.boxes
        objects = zip(boxes.xyxy.tolist(), boxes.cls.int().tolist(), boxes.conf.tolist(), strict=True)
        found[photo] = [
            {"box_xyxy": box, "class_name": result.names[number], "confidence": score} for box, number, score in objects
        ]
    Path(folder, "found.json").write_text(json.dumps(found))
    if not weights.endswith(".onnx"):
        copy = shutil.copy(weights, f"{folder}/model.pt")  # the export goes beside it
        YOLO(copy).export(format="onnx", dynamic=True, simplify=False, imgsz=size, device="cpu")


def _size_of(weights: str) -> int:
    import onnx

    (given,) = onnx.load(weights).graph.input
    return given.type.tensor_type.shape.dim[-1].dim_value or 320


def train(data: str, folder: str) -> None:
    """Reads a data set as its trainer does, and trains a new model for an epoch."""
    from ultralytics import YOLO
    from ultralytics.data.dataset import YOLODataset
    from ultralytics.data.utils import check_det_dataset

    described = check_det_dataset(data, autodownload=False)
    labels = YOLODataset(img_path=described["train"], data=described, imgsz=64, augment=False).labels
    read = {}
    for each in labels:
        objects = zip(each["cls"].ravel().tolist(), each["bboxes"].tolist(), strict=True)
        read[Path(each["im_file"]).name] = [[described["names"][int(number)], *box] for number, box in objects]
    model = YOLO("yolov8n.yaml")
    model.train(data=data, epochs=1, imgsz=64, batch=2, workers=0, device="cpu", project=folder, plots=False, amp=False)
    Path(folder, "read.json").write_text(json.dumps(read))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as settings:  # Ultralytics' own, else in the user's home
        os.environ |= {**_QUIET, "YOLO_CONFIG_DIR": settings}
        {"predict": predict, "train": train}[sys.argv[1]](*sys.argv[2:])
