"""Requests of a warm-up file: images on which a version must not fail before it is used.

https://www.tensorflow.org/tfx/serving/saved_model_warmup. Reading the file takes TensorFlow, so a converted network keeps them in
a file of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.detect.versions import first_line
from pipeline.errors import ModelError

Request = bytes | np.ndarray  # an encoded image, or images `(n, H, W, 3) uint8`

_PATH = "assets.extra/tf_serving_warmup_requests"
_KEPT = "warmup_requests.npz"


def read_requests(local: str, folder: str, metadata: DetectorMetadata) -> tuple[Request, ...]:
    """The requests of a version that fit its input; empty without such a file.

    Args:
      local: The version's files on this machine.
      folder: Where they are from, for messages.
      metadata: The model's input.

    Raises:
      ModelError: The file cannot be read.
    """
    path = os.path.join(local, _PATH)
    if not os.path.isfile(path):
        return ()
    try:
        return tuple(_requests(path, metadata))
    except Exception as err:
        raise ModelError(f"model {folder}: {_PATH} cannot be read: {first_line(err)}; repair or remove it") from err


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
