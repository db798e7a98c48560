"""Writes scenes as JPEG files with their ground truth in COCO format.

    python -m models.digits.training.write_scenes --output models/digits/samples --count 24 --jpeg-quality 65  # the samples

Composing scenes needs scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.digits.training.ink import SPLITS, Split
from models.digits.training.scenes import CLASS_NAMES, Scene, compose_scene

GROUND_TRUTH_NAME = "ground_truth.json"
# Of every twelve scenes two are stored turned, as a camera stores a portrait, and one has no digit.
_PERIOD = 12
_EXIF_ORIENTATIONS = {5: 6, 11: 8}
_WITHOUT_DIGITS = 3
# The turn from the upright image to the stored one, by EXIF orientation (Exif 2.32, 4.6.4).
_ORIENTATION_TAG = 0x0112
_STORING_TURN = {6: cv2.ROTATE_90_COUNTERCLOCKWISE, 8: cv2.ROTATE_90_CLOCKWISE}


def write_scenes(output_dir: str, split: Split, seed: int, count: int, jpeg_quality: int) -> None:
    """Writes `scene_000.jpg` and so on, and `ground_truth.json` beside them.

    Args:
        output_dir: created if missing; files of the same names are replaced.
        split: which digits are used.
        seed: see `compose_scene`.
        count: number of scenes.
        jpeg_quality: 0..100.
    """
    os.makedirs(output_dir, exist_ok=True)
    scenes: list[tuple[str, Scene]] = []
    for index in range(count):
        scene = compose_sample(split, seed, index)
        name = f"scene_{index:03d}.jpg"
        content = encode_jpeg(scene.image, jpeg_quality, _EXIF_ORIENTATIONS.get(index % _PERIOD, 1))
        with open(os.path.join(output_dir, name), "wb") as file:
            file.write(content)
        scenes.append((name, scene))
    with open(os.path.join(output_dir, GROUND_TRUTH_NAME), "w", encoding="utf-8") as file:
        json.dump(coco_ground_truth(scenes), file, indent=1)
        file.write("\n")


def compose_sample(split: Split, seed: int, index: int) -> Scene:
    """Composes the scene number `index` of a written set; every twelfth has no digit."""
    return compose_scene(split, seed, index, with_digits=index % _PERIOD != _WITHOUT_DIGITS)


def encode_jpeg(image: NDArray[np.uint8], quality: int, orientation: int) -> bytes:
    """Encodes an upright image (H, W, 3) uint8 RGB as JPEG; stored turned for the EXIF orientations 6 and 8."""
    stored = image if orientation == 1 else np.asarray(cv2.rotate(image, _STORING_TURN[orientation]))
    _, encoded = cv2.imencode(".jpg", stored[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    jpeg = encoded.tobytes()
    if orientation == 1:
        return jpeg
    exif = Image.Exif()
    exif[_ORIENTATION_TAG] = orientation
    payload = exif.tobytes()
    # the APP1 segment stands right behind the SOI marker
    return jpeg[:2] + b"\xff\xe1" + (len(payload) + 2).to_bytes(2, "big") + payload + jpeg[2:]


def coco_ground_truth(scenes: list[tuple[str, Scene]]) -> dict[str, Any]:
    """The ground truth in COCO format: sizes and boxes of the upright images; category ids are class ids.

    Annotation ids start at 1, since pycocotools takes 0 for "not matched".
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image_id, (name, scene) in enumerate(scenes, start=1):
        height, width = scene.image.shape[:2]
        images.append({"id": image_id, "file_name": name, "width": width, "height": height})
        for (left, top, right, bottom), label in zip(scene.boxes_xyxy.tolist(), scene.labels.tolist(), strict=True):
            width, height = right - left, bottom - top
            box = {"bbox": [left, top, width, height], "area": width * height, "iscrowd": 0}
            annotations.append({"id": len(annotations) + 1, "image_id": image_id, "category_id": label, **box})
    categories = [{"id": class_id, "name": name} for class_id, name in enumerate(CLASS_NAMES)]
    return {"images": images, "categories": categories, "annotations": annotations}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m models.digits.training.write_scenes", description="Write scenes and their ground truth."
    )
    parser.add_argument("--output", required=True, help="directory for the JPEG files and ground_truth.json")
    parser.add_argument("--split", choices=list(SPLITS), default="test", help="which digits are used (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="another seed gives other scenes (default: %(default)s)")
    parser.add_argument("--count", type=int, default=24, help="number of scenes (default: %(default)s)")
    parser.add_argument("--jpeg-quality", type=int, default=85, help="0 to 100 (default: %(default)s)")
    options = parser.parse_args(arguments)
    write_scenes(options.output, options.split, options.seed, options.count, options.jpeg_quality)
    return 0


if __name__ == "__main__":
    sys.exit(main())
