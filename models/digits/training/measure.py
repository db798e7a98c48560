"""Measures the exported digit detector on written scenes: COCO AP, and the time that the model takes.

python -m models.digits.training.write_scenes --output build/digits-test --seed 8 --count 300
python -m models.digits.export --output build/digits/1
python -m models.digits.training.measure --model build/digits/1 --scenes build/digits-test
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from models.digits.training.write_scenes import GROUND_TRUTH_NAME
from models.geometry import InputTransform, fit_image, resize_plan, to_original
from models.metadata import DetectorMetadata, read_metadata

if TYPE_CHECKING:
    from numpy.typing import NDArray

# low, as COCO's AP wants the whole precision-recall curve
_SCORE_THRESHOLD = 0.01
_IOU_THRESHOLD = 0.45
_MAX_DETECTIONS = 100
_BATCH_SIZE = 16


def detect_scenes(model_dir: str, scenes_dir: str, images: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], float]:
    """Runs the SavedModel's `detect` over the images of a ground truth.

    Args:
        model_dir: an exported detector.
        scenes_dir: where the images are.
        images: the `images` of a COCO ground truth: `file_name`, `width`, `height`.

    Returns:
        A row for each image as the pipeline's JSON Lines have it, boxes in pixels of the upright image; and the median seconds of
        model time per image, in batches of 16, without decoding and the first batch.

    Raises:
        ValueError: the SavedModel does not describe itself.
    """
    import tensorflow as tf

    metadata = read_metadata(model_dir)
    if metadata is None:
        raise ValueError(f"{model_dir}: expected an exported detector, found no description of itself in it")
    model = tf.saved_model.load(model_dir)
    thresholds = tf.constant(_SCORE_THRESHOLD), tf.constant(_IOU_THRESHOLD), tf.constant(_MAX_DETECTIONS)
    rows: list[dict[str, Any]] = []
    seconds: list[float] = []
    for first in range(0, len(images), _BATCH_SIZE):
        entries = images[first : first + _BATCH_SIZE]
        plans = [resize_plan((entry["width"], entry["height"]), metadata.input_hw, metadata.resize) for entry in entries]
        # IMREAD_COLOR_RGB turns the image upright as its EXIF orientation says
        pixels = [cv2.imread(os.path.join(scenes_dir, entry["file_name"]), cv2.IMREAD_COLOR_RGB) for entry in entries]
        fitted = [fit_image(np.asarray(p, np.uint8), plan, metadata.input_hw) for p, plan in zip(pixels, plans, strict=True)]
        started = time.perf_counter()
        found = {name: tensor.numpy() for name, tensor in model.detect(tf.constant(np.stack(fitted)), *thresholds).items()}
        seconds.append((time.perf_counter() - started) / len(entries))
        for number, (entry, plan) in enumerate(zip(entries, plans, strict=True)):
            answer = {name: values[number] for name, values in found.items()}
            rows.append({"image": {"uri": entry["file_name"]}, "detections": _detections(answer, plan, metadata)})
    return rows, float(np.median(seconds[1:] or seconds))


def _detections(answer: dict[str, NDArray[Any]], plan: InputTransform, metadata: DetectorMetadata) -> list[dict[str, Any]]:
    """One image's part of the answer of `detect`."""
    count = int(answer["num_detections"])
    boxes = to_original(answer["boxes"][:count] * np.array(metadata.input_hw[::-1] * 2), plan)
    return [
        {"box_xyxy": box, "class_id": class_id, "class_name": metadata.class_names[class_id], "confidence": score}
        for box, class_id, score in zip(
            boxes.tolist(), answer["classes"][:count].tolist(), answer["scores"][:count].tolist(), strict=True
        )
    ]


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m models.digits.training.measure", description="Measure the exported digit detector."
    )
    parser.add_argument("--model", required=True, help="exported SavedModel, <model>/<version>")
    parser.add_argument("--scenes", required=True, help="directory that models.digits.training.write_scenes wrote")
    parser.add_argument("--rows", help="also write the detections here, as JSON Lines")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from models.evaluate import evaluate

    with open(os.path.join(options.scenes, GROUND_TRUTH_NAME), encoding="utf-8") as file:
        ground_truth = json.load(file)
    rows, seconds = detect_scenes(options.model, options.scenes, ground_truth["images"])
    if options.rows:
        with open(options.rows, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    result = evaluate(rows, ground_truth)
    figures = "  ".join(f"{name} {result[name]:.3f}" for name in ("AP", "AP50", "AP75"))
    print(f"{len(rows)} scenes, {len(ground_truth['annotations'])} digits: {figures}  {1000 * seconds:.1f} ms/image")
    print("AP by class: " + "  ".join(f"{name} {value:.3f}" for name, value in result["per_class"].items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
