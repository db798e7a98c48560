"""From a model's raw answer for one image to boxes on the original upright image."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import numpy as np

from models.geometry import InputTransform, boxes_to_xyxy, nms, to_original
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.errors import ModelError
from pipeline.records import Detections


def to_detections(
    outputs: Mapping[str, np.ndarray], metadata: DetectorMetadata, transform: InputTransform, detect: DetectConfig
) -> Detections:
    """Thresholds, suppresses (where the model does not), and maps boxes back to the image.

    Args:
      outputs: `boxes (M, 4)`, `scores (M,)` or `(M, C)`, and where the model has them `classes (M,)` and `count ()`. Without
        classes, those are the places in the scores' second axis; without that as well, all are 0.
      metadata: What these numbers mean.
      transform: How the image was fitted to the model's input.
      detect: Thresholds, class filter and limit.

    Returns:
      Detections with confidences descending. Boxes are not clipped to the image: an object may reach beyond it.
    """
    boxes: np.ndarray
    count = int(outputs["count"]) if "count" in outputs else len(outputs["scores"])
    boxes, scores = outputs["boxes"][:count].astype(np.float64), outputs["scores"][:count].astype(np.float32)
    if "classes" in outputs:
        class_ids = outputs["classes"][:count].astype(np.int32) - metadata.class_id_offset
    elif scores.ndim == 2:
        class_ids, scores = scores.argmax(axis=-1).astype(np.int32), scores.max(axis=-1)
    else:  # a model of one class
        class_ids = np.zeros(len(scores), np.int32)
    kept = (scores >= detect.score_threshold) & np.isfinite(boxes).all(axis=-1)
    if detect.classes:
        kept &= np.isin(class_ids, [metadata.class_names.index(name) for name in detect.classes])
    boxes, scores, class_ids = boxes_to_xyxy(boxes[kept], metadata.box_format), scores[kept], class_ids[kept]
    if metadata.box_units == "norm":
        boxes = boxes * np.array(metadata.input_hw * 2, np.float64)[[1, 0, 3, 2]]
    if metadata.nms == "pipeline":
        order = nms(boxes, scores, class_ids, detect.iou_threshold, detect.max_detections)
    else:
        order = np.argsort(-scores, kind="stable")[: detect.max_detections]
    names = tuple(class_name(metadata, class_id) for class_id in class_ids[order].tolist())
    return Detections(to_original(boxes[order], transform).astype(np.float32), class_ids[order], scores[order], names)


def class_name(metadata: DetectorMetadata, class_id: int) -> str:
    """The name of a class; `class <id>` where the model has no name for it."""
    return metadata.class_names[class_id] if 0 <= class_id < len(metadata.class_names) else f"class {class_id}"


def check_classes(classes: tuple[str, ...], metadata: DetectorMetadata) -> None:
    """Refuses a class filter that names a class which the model does not have.

    Raises:
      ModelError: It does; the message has the nearest name.
    """
    for name in classes:
        if name not in metadata.class_names:
            near = difflib.get_close_matches(name, metadata.class_names, n=1)
            known = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(metadata.class_names[:10]) or 'no class names'}"
            raise ModelError(f"classes: model {metadata.name} has no class '{name}'; {known}")
