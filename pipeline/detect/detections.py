"""Turns a model's output for one image into boxes on the original, upright image."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import numpy as np

from models.geometry import InputTransform, boxes_to_xyxy, nms, to_original
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.errors import ModelError
from pipeline.failures import ImageError
from pipeline.records import Detections

_NO_CLASS = -(2**31)


def to_detections(
    outputs: Mapping[str, np.ndarray], metadata: DetectorMetadata, transform: InputTransform, detect: DetectConfig
) -> Detections:
    """Applies thresholds and suppression (unless the model does), and maps boxes back to the image.

    Args:
      outputs: `boxes (M, 4)`, `scores (M,)` or `(M, C)`, and where the model has them `classes (M,)` and `count ()`. Without
        `classes`, the best of the scores' second axis is the class, or several (`labels_per_box`); without that axis, class 0.
      metadata: What these numbers mean.
      transform: How the image was fitted to the model's input.
      detect: Thresholds, class filter and limit.

    Returns:
      Detections by descending confidence. Boxes are not clipped to the image: an object may reach beyond it. Objects with an
      edge, a score or a class that is not finite are left out; confidences above 1 become 1.

    Raises:
      ImageError: The output is not a detector's: wrong shapes, a count that is no number, texts.
    """
    boxes, scores, class_ids = _candidates(outputs, metadata, detect)
    with np.errstate(over="ignore", invalid="ignore"):  # overflows become infinite, and are left out below
        boxes = boxes_to_xyxy(boxes, metadata.box_format)
        if metadata.box_units == "norm":
            boxes = boxes * np.array(_input_wh(metadata, transform) * 2, np.float64)
        on_image = to_original(boxes, transform).astype(np.float32)
    kept = (
        (scores >= detect.score_threshold) & np.isfinite(scores) & np.isfinite(on_image).all(axis=-1) & (class_ids != _NO_CLASS)
    )
    if detect.classes:
        kept &= np.isin(class_ids, [metadata.class_names.index(name) for name in detect.classes])
    boxes, on_image, scores, class_ids = boxes[kept], on_image[kept], scores[kept], class_ids[kept]
    if metadata.nms == "pipeline":
        order = nms(boxes, scores, class_ids, detect.iou_threshold, detect.max_detections)
    else:
        order = np.argsort(-scores, kind="stable")[: detect.max_detections]
    names = tuple(class_name(metadata, class_id) for class_id in class_ids[order].tolist())
    return Detections(on_image[order], class_ids[order], np.minimum(scores[order], np.float32(1)), names)


def _input_wh(metadata: DetectorMetadata, transform: InputTransform) -> tuple[int, int]:
    return transform.resized_wh if metadata.resize == "none" else (metadata.input_hw[1], metadata.input_hw[0])


def _candidates(
    outputs: Mapping[str, np.ndarray], metadata: DetectorMetadata, detect: DetectConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (boxes `(M, 4) float64`, scores `(M,) float32`, class ids `(M,) int32`)."""
    boxes, scores = _numbers(outputs, "boxes"), _numbers(outputs, "scores")
    classes = _numbers(outputs, "classes") if "classes" in outputs else None
    _check_shapes(boxes, scores, classes)
    count = _count(outputs, len(boxes))
    boxes, scores = boxes[:count], scores[:count]
    if classes is not None:
        class_ids = _class_ids(classes[:count], metadata.class_id_offset)
    elif scores.ndim == 2 and detect.labels_per_box == "several":
        rows, class_ids = np.nonzero(scores >= detect.score_threshold)
        boxes, scores, class_ids = boxes[rows], scores[rows, class_ids], class_ids.astype(np.int32)
    elif scores.ndim == 2:
        class_ids, scores = scores.argmax(axis=-1).astype(np.int32), scores.max(axis=-1)
    else:  # a model of one class
        class_ids = np.zeros(len(scores), np.int32)
    with np.errstate(over="ignore"):
        return boxes, scores.astype(np.float32), class_ids


def _numbers(outputs: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    try:
        return np.asarray(outputs[name]).astype(np.float64)
    except (KeyError, TypeError, ValueError) as err:
        got = f"{np.asarray(outputs[name]).dtype}" if name in outputs else "none"
        raise ImageError("detect", "bad_output", f"expected numbers as the model's {name}, got {got}") from err


def _check_shapes(boxes: np.ndarray, scores: np.ndarray, classes: np.ndarray | None) -> None:
    most = len(boxes) if boxes.ndim else 0
    scores_fit = scores.shape == (most,) or (classes is None and scores.ndim == 2 and len(scores) == most and scores.shape[1] > 0)
    if boxes.shape != (most, 4) or not scores_fit or (classes is not None and classes.shape != (most,)):
        shapes = f"{boxes.shape} and {scores.shape}" + ("" if classes is None else f" and {classes.shape}")
        wanted = "(M, 4), scores (M,) or (M, C)" if classes is None else "(M, 4), scores (M,) and classes (M,)"
        raise ImageError("detect", "bad_output", f"expected boxes {wanted} from the model, got {shapes}")


def _count(outputs: Mapping[str, np.ndarray], most: int) -> int:
    if "count" not in outputs:
        return most
    count = _numbers(outputs, "count")
    if count.size != 1 or not np.isfinite(count).all() or count.min() < 0:
        raise ImageError(
            "detect", "bad_output", f"expected the number of boxes as the model's count, got {count.ravel()[:3].tolist()}"
        )
    return int(min(count.item(), most))


def _class_ids(classes: np.ndarray, offset: int) -> np.ndarray:
    """Class ids from 0; `_NO_CLASS` for NaN and for numbers beyond 32 bits."""
    numbers = classes - offset
    valid = np.abs(numbers) < -_NO_CLASS  # not so for NaN
    return np.where(valid, numbers, _NO_CLASS).astype(np.int32)


def class_name(metadata: DetectorMetadata, class_id: int) -> str:
    """The name of a class; `class <number>`, by the model's own number, if the model has no name for it."""
    if 0 <= class_id < len(metadata.class_names):
        return metadata.class_names[class_id]
    return f"class {class_id + metadata.class_id_offset}"


def check_classes(classes: tuple[str, ...], metadata: DetectorMetadata) -> None:
    """Checks the class filter.

    Raises:
      ModelError: The model lacks one of the classes; the message has the nearest name.
    """
    for name in classes:
        if name not in metadata.class_names:
            near = difflib.get_close_matches(name, metadata.class_names, n=1)
            known = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(metadata.class_names[:10]) or 'no class names'}"
            raise ModelError(f"classes: model {metadata.name} has no class '{name}'; {known}")
