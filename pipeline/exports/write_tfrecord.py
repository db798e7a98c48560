"""Rows as TFRecord files of `tf.Example`s with the keys of the TF Object Detection API, one record an image.

    image/source_id  image/filename               the image's URI
    image/width  image/height                     of the upright image, in pixels
    image/object/bbox/{xmin,ymin,xmax,ymax}       boxes as shares of the image, 0 to 1
    image/object/class/{text,label}               class names; class ids + 1, since the API keeps 0 for the background
    image/detection/bbox/…  image/detection/label the same, as the API's own inference names them
    image/detection/score                         confidences

So a reader of annotations finds what a detector suggests, and a reader of detections what it needs for measuring. A box that
reaches beyond the image ends at its edge, since the API takes no coordinate outside 0 to 1. There are no pixels in it.

Source of the keys: `TfExampleFields` in
https://github.com/tensorflow/models/blob/master/research/object_detection/core/standard_fields.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np

from models.base.quiet import quiet_stderr
from pipeline.listing.tfrecords import framed
from pipeline.records import path_bytes

_CORNERS = ("xmin", "ymin", "xmax", "ymax")


def write_tfrecord(rows: Iterable[dict[str, Any]], file: BinaryIO) -> None:
    """Writes JSON rows of detections as records of a TFRecord file; the same rows give the same bytes."""
    with quiet_stderr():
        import tensorflow as tf

    for row in rows:
        example = tf.train.Example()
        for name, values in _features(row).items():
            feature = example.features.feature[name]  # without values it is there, and empty
            kinds = {bytes: feature.bytes_list, int: feature.int64_list, float: feature.float_list}
            if values:
                kinds[type(values[0])].value.extend(values)
        # a map has no order of its own, which is also why tfx-bsl's encoder gives other bytes each time
        file.write(framed(example.SerializeToString(deterministic=True)))


def _features(row: dict[str, Any]) -> dict[str, list[Any]]:
    image, found = row["image"], row["detections"]
    uri, size = path_bytes(image["uri"]), (image["width"], image["height"])
    boxes = np.array([each["box_xyxy"] for each in found], np.float64).reshape(-1, 4)
    corners = dict(zip(_CORNERS, (boxes / (size * 2)).clip(0.0, 1.0).T.tolist(), strict=True))
    labels = [each["class_id"] + 1 for each in found]
    return {
        "image/source_id": [uri],
        "image/filename": [uri],
        "image/width": [size[0]],
        "image/height": [size[1]],
        **{f"image/{kind}/bbox/{name}": corners[name] for kind in ("object", "detection") for name in _CORNERS},
        "image/object/class/text": [path_bytes(each["class_name"]) for each in found],
        "image/object/class/label": labels,
        "image/detection/label": labels,
        "image/detection/score": [float(each["confidence"]) for each in found],
    }
