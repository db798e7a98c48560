"""Hybrid batch prediction for images: the same detector in batch, streaming and backfill jobs on Beam.

The transforms for a pipeline of one's own, and the records that they take and give, are offered here by name; they are imported
when they are first asked for, so that `--help` comes without TensorFlow and Beam.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# TensorFlow's libraries read this when they are imported; what goes wrong there reaches the user as an error of this project.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

if TYPE_CHECKING:
    from pipeline.detect.detect_objects import DetectObjects as DetectObjects
    from pipeline.read.read_images import ReadImages as ReadImages
    from pipeline.records import DeadLetter as DeadLetter
    from pipeline.records import DetectedImage as DetectedImage
    from pipeline.records import Detections as Detections
    from pipeline.records import EncodedImage as EncodedImage
    from pipeline.records import ImageRef as ImageRef

_OFFERED = {
    "ReadImages": "pipeline.read.read_images",
    "DetectObjects": "pipeline.detect.detect_objects",
    "ImageRef": "pipeline.records",
    "EncodedImage": "pipeline.records",
    "DetectedImage": "pipeline.records",
    "Detections": "pipeline.records",
    "DeadLetter": "pipeline.records",
}
__all__ = list(_OFFERED)


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OFFERED[name]), name)
