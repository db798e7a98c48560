"""`from pipeline.read_images import ReadImages` goes on working; new code takes it from `pipeline`."""

from pipeline.read.read_images import ReadImages

__all__ = ["ReadImages"]
