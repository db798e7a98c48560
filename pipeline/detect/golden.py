"""Checks of a version before it is used: it must not fail on its warm-up requests, and must find what its golden images show.

TensorFlow Serving's warm-up file has the requests (https://www.tensorflow.org/tfx/serving/saved_model_warmup). Reading it takes
TensorFlow, so a converted network keeps them in a file of its own.

`assets.extra/golden/` inside a model has a few images and `detections.jsonl`: the detections of a trusted version, a row for each
image, as a job writes it, with its thresholds. `detect-objects golden` writes the folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from models.evaluate.agreement import compare
from models.evaluate.detection_rows import read_rows
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.detect.batcher import Batcher
from pipeline.detect.versions import first_line
from pipeline.errors import ModelError
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, Image, ImageRef, detection_row

GOLDEN = "assets.extra/golden"
ROWS = "detections.jsonl"
_WARMUP = "assets.extra/tf_serving_warmup_requests"
_KEPT = "warmup_requests.npz"

Request = bytes | np.ndarray  # an encoded image, or images `(n, H, W, 3) uint8`

DetectIn = Callable[[Sequence[Image]], Sequence[DetectedImage | DeadLetter]]
"""Detects with a version, from encoded images."""


@dataclasses.dataclass(frozen=True, slots=True)
class GoldenImage:
    """An image and its expected detections.

    Attributes:
      name: Its file.
      content: Its bytes.
      row: The expected detections, as a job writes them, with the thresholds of that; objects below these are unknown.
    """

    name: str
    content: bytes
    row: Mapping[str, Any]


def read_golden(local: str, folder: str) -> tuple[GoldenImage, ...]:
    """Reads the golden images of a model.

    Args:
      local: Its files on this machine.
      folder: Its name in messages.

    Raises:
      ModelError: They are malformed, or an image or the file of rows is missing.
    """
    golden = os.path.join(local, GOLDEN)
    rows = os.path.join(golden, ROWS)
    if not os.path.isdir(golden):
        return ()
    try:
        read_rows(rows)  # its errors name the line
        with open(rows, encoding="utf-8") as file:
            return tuple(_golden_image(golden, json.loads(line)) for line in file if line.strip())
    except (OSError, ValueError) as err:
        raise ModelError(f"model {folder}: {GOLDEN} cannot be read: {first_line(err)}; repair or remove it") from err


def _golden_image(folder: str, row: Mapping[str, Any]) -> GoldenImage:
    name = str(row["image"]["uri"])
    if os.path.basename(name) != name:
        raise ValueError(f"expected names of files beside {ROWS}, got {name!r}")
    if not all(isinstance(row.get(threshold), (int, float)) for threshold in ("score_threshold", "iou_threshold")):
        raise ValueError(f"expected score_threshold and iou_threshold in each row of {ROWS}, not so that of {name}")
    with open(os.path.join(folder, name), "rb") as file:
        return GoldenImage(name, file.read(), row)


def read_requests(local: str, folder: str, metadata: DetectorMetadata) -> tuple[Request, ...]:
    """The requests of a version that fit its input; empty without such a file.

    Args:
      local: The version's files on this machine.
      folder: Where they are from, for messages.
      metadata: The model's input.

    Raises:
      ModelError: The file cannot be read.
    """
    path = os.path.join(local, _WARMUP)
    if not os.path.isfile(path):
        return ()
    try:
        return tuple(_requests(path, metadata))
    except Exception as err:
        raise ModelError(f"model {folder}: {_WARMUP} cannot be read: {first_line(err)}; repair or remove it") from err


def keep_requests(network: str, requests: Iterable[Request]) -> None:
    """Keeps requests in the folder of a network."""
    arrays = [np.frombuffer(each, np.uint8) if isinstance(each, bytes) else each for each in requests]
    np.savez(os.path.join(network, _KEPT), *arrays)


def kept_requests(network: str) -> tuple[Request, ...]:
    """The requests that the folder of a network keeps; empty without such a file."""
    path = os.path.join(network, _KEPT)
    if not os.path.isfile(path):
        return ()
    with np.load(path) as arrays:
        return tuple(array.tobytes() if array.ndim == 1 else array for array in arrays.values())


def _requests(path: str, metadata: DetectorMetadata) -> Iterator[Request]:
    import tensorflow as tf
    from tensorflow_serving.apis import prediction_log_pb2

    for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
        for tensor in prediction_log_pb2.PredictionLog.FromString(record).predict_log.request.inputs.values():
            value = tf.make_ndarray(tensor)
            if tensor.dtype == tf.string.as_datatype_enum:
                yield from (bytes(encoded) for encoded in value.ravel())
            elif tf.TensorShape(value.shape[1:]).is_compatible_with((*metadata.graph_hw, 3)) and value.dtype.name == "uint8":
                yield value


def failing_request(requests: Sequence[Request], engine: Batcher, detect_in: DetectIn) -> str | None:
    """Why a version fails a request of its warm-up file; None if it passes, or has none.

    An encoded image goes through the whole detector, an array through the model alone.
    """
    for request in requests:
        if isinstance(request, bytes):
            found = detect_in([EncodedImage(ImageRef("warm-up request"), request)])
            failures = [result.message for result in found if isinstance(result, DeadLetter)]
        else:
            failures = [str(part.error) for part in engine.run(request) if part.error]
        if failures:
            return f"fails on a request of its warm-up file: {failures[0]}"
    return None


def disagreement(golden: Sequence[GoldenImage], detect_in: DetectIn, detect: DetectConfig) -> str | None:
    """Why a version fails its golden images, in one line; None if it passes, or has none.

    Compares only objects above the thresholds both of the row and of the job.

    Args:
      golden: The images.
      detect_in: Detects with the version.
      detect: How it runs, and the least agreement.
    """
    if not golden or not detect.min_agreement:
        return None
    expected, found = [], []
    results = detect_in([EncodedImage(ImageRef(image.name), image.content) for image in golden])
    for image, result in zip(golden, results, strict=True):
        if isinstance(result, DeadLetter):
            return f"fails on its golden image {image.name}: {result.message}"
        least = max(detect.score_threshold, image.row["score_threshold"])
        expected.append(_let_through(image.row, least, detect))
        found.append(_let_through(detection_row(result), least, detect))
    agreement = compare(found, expected)["agreement"]
    if agreement is None:
        return (
            "none of its golden images has an object of this job's classes and score_threshold, so they show nothing; "
            "write some with objects, or set min_agreement to 0"
        )
    if agreement >= detect.min_agreement:
        return None
    with_objects = [n for n in range(len(golden)) if expected[n]["detections"] or found[n]["detections"]]
    worst = min(with_objects, key=lambda n: compare([found[n]], [expected[n]])["agreement"])
    thresholds = f"made at iou_threshold {golden[worst].row['iou_threshold']}, here {detect.iou_threshold}"
    return (
        f"its agreement with its golden images is {agreement:.3f}, expected {detect.min_agreement} or more (min_agreement); "
        f"it differs most in {golden[worst].name}, {thresholds}"
    )


def _let_through(row: Mapping[str, Any], score_threshold: float, detect: DetectConfig) -> dict[str, Any]:
    wanted = [
        one
        for one in row["detections"]
        if one["confidence"] >= score_threshold and (not detect.classes or one["class_name"] in detect.classes)
    ]
    if detect.labels_per_box == "several":  # golden images have the best class of each box
        best = {tuple(one["box_xyxy"]): one for one in reversed(wanted)}
        wanted = sorted(best.values(), key=lambda one: -one["confidence"])
    return {"image": row["image"], "detections": wanted[: detect.max_detections]}
