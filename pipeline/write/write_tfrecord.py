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
from typing import Any

import numpy as np

from pipeline import beam_internals
from pipeline.storage.files import create

_CORNERS = ("xmin", "ymin", "xmax", "ymax")


def write_tfrecord(rows: Iterable[dict[str, Any]], path: str) -> None:
    """Writes JSON rows of detections as a TFRecord file, row by row; the same rows give the same bytes."""
    import tensorflow as tf

    with create(path) as file:
        for row in rows:
            example = tf.train.Example()
            for name, values in _features(row).items():
                _fill(example.features.feature[name], values)
            # a map has no order of its own, which is also why tfx-bsl's encoder gives other bytes each time
            beam_internals.write_tfrecord(file, example.SerializeToString(deterministic=True))


def _features(row: Any) -> dict[str, list[Any]]:
    image, found, uri = row["image"], row["detections"], _name(row["image"]["uri"])
    corners = dict(zip(_CORNERS, _shares(row).T.tolist(), strict=True))
    labels = [each["class_id"] + 1 for each in found]
    return {
        "image/source_id": [uri],
        "image/filename": [uri],
        "image/width": [image["width"]],
        "image/height": [image["height"]],
        **{f"image/object/bbox/{name}": corners[name] for name in _CORNERS},
        "image/object/class/text": [_name(each["class_name"]) for each in found],
        "image/object/class/label": labels,
        **{f"image/detection/bbox/{name}": corners[name] for name in _CORNERS},
        "image/detection/label": labels,
        "image/detection/score": [float(each["confidence"]) for each in found],
    }


def _fill(feature: Any, values: list[Any]) -> None:
    """Fills a feature with values of one type; without any it is there, and empty."""
    for kind, to in ((bytes, feature.bytes_list), (int, feature.int64_list), (float, feature.float_list)):
        if values and isinstance(values[0], kind):
            to.value.extend(values)


def _shares(row: Any) -> np.ndarray:
    """The boxes of a row as shares of its image, `(N, 4)` in 0..1."""
    boxes = np.array([found["box_xyxy"] for found in row["detections"]], np.float64).reshape(-1, 4)
    width, height = row["image"]["width"], row["image"]["height"]
    shares: np.ndarray = (boxes / (width, height, width, height)).clip(0.0, 1.0)
    return shares


def _name(text: str) -> bytes:
    """A name as the bytes that it had as a file's; what no file's name can be is escaped."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")
