"""Hybrid batch prediction for images: the same detector in batch, streaming and backfill jobs on Beam.

The transforms for a pipeline of one's own are `pipeline.read_images.ReadImages` and `pipeline.detect_objects.DetectObjects`.
"""

import os

# TensorFlow's libraries read this when they are imported; what goes wrong there reaches the user as an error of this project.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# OpenCV reads this when it is first imported; it guards images whose header nothing else can read.
os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(1 << 27))
