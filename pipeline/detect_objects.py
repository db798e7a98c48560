"""`from pipeline.detect_objects import DetectObjects` goes on working; new code takes it from `pipeline`."""

from pipeline.detect.detect_objects import DetectObjects

__all__ = ["DetectObjects"]
