"""A model without TensorFlow: its input of uint8 images, and its outputs by role, in NumPy.

For ONNX files, and for models on servers. TensorFlow does the same in its graph (`saved_model.as_function`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.detect.packed_output import grid

IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_FILTERED_DETECTIONS = 300


def most_boxes(detect: DetectConfig) -> int:
    """Most boxes that a model which suppresses is asked for: more with a class filter, so that no other class crowds it out."""
    return max(detect.max_detections, _FILTERED_DETECTIONS) if detect.classes else detect.max_detections


def feed_of(pixels: np.ndarray, metadata: DetectorMetadata, detect: DetectConfig) -> dict[str, np.ndarray]:
    """The inputs of a model for images `(N, H, W, 3) uint8`: its range of values, its order of channels, and the thresholds."""
    images = pixels[..., ::-1] if metadata.channel_order == "bgr" else pixels
    if metadata.input_dtype == "float32":
        low, high = metadata.value_range
        images = images.astype(np.float32)
        if (low, high) != (0.0, 255.0):
            images *= np.float32((high - low) / 255.0)
            images += np.float32(low)
        if metadata.normalisation:
            images = (images - np.array(IMAGENET_MEAN, np.float32)) / np.array(IMAGENET_DEVIATION, np.float32)
    feed = {metadata.input_name: np.ascontiguousarray(images)}
    if metadata.threshold_inputs:
        feed["score_threshold"] = np.array(detect.score_threshold, np.float32)
        feed["iou_threshold"] = np.array(detect.iou_threshold, np.float32)
        feed["max_detections"] = np.array(most_boxes(detect), np.int32)
    return feed


def by_role(found: Mapping[str, np.ndarray], metadata: DetectorMetadata, score_threshold: float) -> dict[str, np.ndarray]:
    """A model's outputs by role, as `role_metadata` describes them.

    Args:
      found: Outputs by name.
      metadata: What they mean.
      score_threshold: Of a single image, candidates below it are left out; in a batch, all images have the same candidates.
    """
    names = {
        "boxes": metadata.boxes_output,
        "scores": metadata.scores_output,
        "classes": metadata.classes_output,
        "count": metadata.count_output,
    }
    outputs = {role: found[name] for role, name in names.items() if name}
    if metadata.packed_layout:
        outputs = _split(outputs["boxes"], metadata)
    if metadata.score_activation:
        outputs["scores"] = _activated(outputs["scores"], metadata.score_activation)
    if metadata.box_format == "grid":
        corner, stride = (part.astype(np.float32) for part in grid(metadata.input_hw, outputs["boxes"].shape[1]))
        boxes = outputs["boxes"]
        outputs["boxes"] = np.concatenate([boxes[..., :2] * stride + corner, np.exp(boxes[..., 2:]) * stride], -1)
    if "count" in outputs or len(outputs["boxes"]) != 1 or outputs["scores"].ndim < 2:
        return outputs
    best = outputs["scores"] if outputs["scores"].ndim == 2 else outputs["scores"].max(-1)
    kept = best[0] >= score_threshold
    return {role: array[:, kept] for role, array in outputs.items()}


def role_metadata(metadata: DetectorMetadata) -> DetectorMetadata:
    """The metadata of outputs that `by_role` has split."""
    return dataclasses.replace(
        metadata,
        packed_layout="",
        score_activation="",
        box_format="cxcywh" if metadata.box_format == "grid" else metadata.box_format,
        classes_output="classes" if metadata.packed_layout == "M,6" else metadata.classes_output,
    )


def _split(joined: np.ndarray, metadata: DetectorMetadata) -> dict[str, np.ndarray]:
    rows = np.swapaxes(joined, 1, 2) if metadata.packed_layout == "4+C,M" else joined
    boxes, scores = rows[..., :4], rows[..., 4:]
    if metadata.packed_layout == "M,6":
        return {"boxes": boxes, "scores": rows[..., 4], "classes": rows[..., 5]}
    return {"boxes": boxes, "scores": scores[..., :1] * scores[..., 1:] if metadata.packed_layout == "M,5+C" else scores}


def _activated(scores: np.ndarray, activation: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        powers: np.ndarray = np.exp(-scores if activation == "sigmoid" else scores - scores.max(-1, keepdims=True))
    shares: np.ndarray = 1 / (1 + powers) if activation == "sigmoid" else (powers / powers.sum(-1, keepdims=True))[..., :-1]
    return shares
