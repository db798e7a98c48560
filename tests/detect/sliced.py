"""The outside tools that detect in slices of an image, run with the model of a test; SAHI is not among the tests' packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import supervision

from pipeline.config import DetectConfig

Find = Callable[[np.ndarray], np.ndarray]
"""Of RGB pixels `(H, W, 3) uint8` the boxes that are left after suppression: `(N, 6)`, xyxy, confidence, class."""


def by_supervision(find: Find, pixels: np.ndarray, detect: DetectConfig) -> np.ndarray:
    """What supervision's slicer makes of the slices: `(N, 6)`."""

    def of_slice(part: np.ndarray) -> supervision.Detections:
        found = find(part)
        return supervision.Detections(found[:, :4], confidence=found[:, 4], class_id=found[:, 5].astype(int))

    overlap = int(detect.tile_overlap * detect.tiles)
    merged = supervision.InferenceSlicer(of_slice, detect.tiles, overlap, iou_threshold=detect.iou_threshold)(pixels)
    return np.column_stack([merged.xyxy, merged.confidence, merged.class_id])


def by_sahi(find: Find, pixels: np.ndarray, detect: DetectConfig) -> np.ndarray:
    """What SAHI makes of the slices, and of the whole image where the settings ask for it: `(N, 6)`."""
    pytest.importorskip("sahi", reason="pip install sahi to compare with it")
    from sahi.models.base import DetectionModel
    from sahi.predict import get_sliced_prediction
    from sahi.prediction import ObjectPrediction

    class Model(DetectionModel):
        def perform_batch_inference(self, images: list[np.ndarray]) -> None:
            self._original_predictions = [find(image) for image in images]

        def perform_inference(self, image: np.ndarray) -> None:
            self.perform_batch_inference([image])

        def _create_object_prediction_list_from_original_predictions(self, shift_amount_list: Any, full_shape_list: Any) -> None:
            shifts, (shape, *_) = (np.reshape(each, (-1, 2)).tolist() for each in (shift_amount_list, full_shape_list))
            self._object_prediction_list_per_image = [
                [
                    ObjectPrediction(
                        one[:4].tolist(), int(one[5]), str(one[5]), score=float(one[4]), shift_amount=shift, full_shape=shape
                    )
                    for one in found
                ]
                for found, shift in zip(self._original_predictions, shifts, strict=True)
            ]

        check_dependencies = set_device = set_model = lambda *_, **__: None

    sizes = [detect.tiles] * 2 + [detect.tile_overlap] * 2
    kind, metric = ("NMS", "IOU") if detect.tile_merge == "nms" else ("GREEDYNMM", "IOS")
    merged = get_sliced_prediction(
        pixels,
        Model(model=object(), device="cpu"),
        *sizes,
        perform_standard_pred=detect.tile_whole,
        postprocess_type=kind,
        postprocess_match_metric=metric,
        postprocess_match_threshold=detect.iou_threshold,
        verbose=0,
    )
    found = [[*one.bbox.to_xyxy(), one.score.value, one.category.id] for one in merged.object_prediction_list]
    return np.array(found).reshape(-1, 6)
