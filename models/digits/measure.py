"""Measures the exported digit detector on written scenes: COCO AP with pycocotools, and the time that the model takes.

python -m models.digits.write_scenes --output build/digits-test --seed 8 --count 300
python -m models.digits.measure --model build/models/digits/1 --scenes build/digits-test
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import time
from typing import Any

import cv2
import numpy as np

from models.digits.write_scenes import GROUND_TRUTH_NAME
from models.geometry import fit_image, resize_plan, to_original
from models.metadata import read_metadata

# low, as COCO's AP wants the whole precision-recall curve
_SCORE_THRESHOLD = 0.01
_IOU_THRESHOLD = 0.45
_MAX_DETECTIONS = 100
_BATCH_SIZE = 16


def detect_scenes(model_dir: str, scenes_dir: str, ground_truth: dict[str, Any]) -> tuple[list[dict[str, Any]], float]:
    """Runs the SavedModel's `detect` over the images of a ground truth.

    Args:
        model_dir: an exported detector.
        scenes_dir: where the images are.
        ground_truth: COCO ground truth, see `coco_ground_truth`.

    Returns:
        COCO results, in pixels of the upright images; and the seconds of model time per image, at batches of 16, without
        decoding and the first batch.
    """
    import tensorflow as tf

    metadata = read_metadata(model_dir)
    if metadata is None:
        raise ValueError(f"{model_dir}: expected an exported detector, found no description of itself in it")
    model = tf.saved_model.load(model_dir)
    thresholds = tf.constant(_SCORE_THRESHOLD), tf.constant(_IOU_THRESHOLD), tf.constant(_MAX_DETECTIONS)
    results: list[dict[str, Any]] = []
    seconds: list[float] = []
    for first in range(0, len(ground_truth["images"]), _BATCH_SIZE):
        entries = ground_truth["images"][first : first + _BATCH_SIZE]
        plans = [resize_plan((entry["width"], entry["height"]), metadata.input_hw, metadata.resize) for entry in entries]
        # IMREAD_COLOR_RGB turns the image upright as its EXIF orientation says
        pixels = [cv2.imread(os.path.join(scenes_dir, entry["file_name"]), cv2.IMREAD_COLOR_RGB) for entry in entries]
        fitted = [fit_image(np.asarray(p, np.uint8), plan, metadata.input_hw) for p, plan in zip(pixels, plans, strict=True)]
        started = time.perf_counter()
        found = {name: tensor.numpy() for name, tensor in model.detect(tf.constant(np.stack(fitted)), *thresholds).items()}
        seconds.append((time.perf_counter() - started) / len(entries))
        for row, (entry, plan) in enumerate(zip(entries, plans, strict=True)):
            count = int(found["num_detections"][row])
            boxes = to_original(found["boxes"][row, :count] * np.array(metadata.input_hw[::-1] * 2), plan)
            for (left, top, right, bottom), score, class_id in zip(
                boxes.tolist(), found["scores"][row].tolist(), found["classes"][row].tolist(), strict=False
            ):
                bbox = [left, top, right - left, bottom - top]
                results.append({"image_id": entry["id"], "category_id": class_id, "bbox": bbox, "score": score})
    return results, float(np.median(seconds[1:] or seconds))


def average_precision(ground_truth: dict[str, Any], results: list[dict[str, Any]]) -> tuple[float, float, float]:
    """COCO's AP@[.5:.95], AP50 and AP75."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress and cannot be asked not to
        truth = COCO()
        truth.dataset = ground_truth
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0]), float(evaluation.stats[1]), float(evaluation.stats[2])


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m models.digits.measure", description="Measure the exported digit detector.")
    parser.add_argument("--model", required=True, help="exported SavedModel, <model>/<version>")
    parser.add_argument("--scenes", required=True, help="directory that models.digits.write_scenes wrote")
    parser.add_argument("--results", help="also write the detections here, as COCO results")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with open(os.path.join(options.scenes, GROUND_TRUTH_NAME), encoding="utf-8") as file:
        ground_truth = json.load(file)
    results, seconds = detect_scenes(options.model, options.scenes, ground_truth)
    if options.results:
        with open(options.results, "w", encoding="utf-8") as file:
            json.dump(results, file)
    ap, ap50, ap75 = average_precision(ground_truth, results)
    print(
        f"{len(ground_truth['images'])} scenes, {len(ground_truth['annotations'])} digits: "
        f"AP {ap:.3f}  AP50 {ap50:.3f}  AP75 {ap75:.3f}  {1000 * seconds:.1f} ms/image"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
