"""Adapter: a model on a server looks like the signature of a SavedModel.

TensorFlow describes the model, scales images and splits joined outputs, as for a SavedModel; the server runs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import packed_output, tensorflow_setup
from pipeline.detect.describe_model import check_several_labels, describe
from pipeline.detect.engine import ModelFailed, OpenedModel
from pipeline.detect.remote_server import RemoteServer
from pipeline.detect.saved_model import as_eager_function
from pipeline.detect.versions import first_line
from pipeline.errors import ModelError

_BATCH_SIZES = (1, 2, 4, 8)


class RemoteSignature:
    """What `describe` and `as_function` read of a signature; a call goes to the server.

    Args:
      server: Has the model. An input `(N, 3, H, W)` becomes one of `(N, H, W, 3)`.
    """

    def __init__(self, server: RemoteServer):
        import tensorflow as tf

        self._server = server
        self._channels_first = {
            name
            for name, one in server.inputs.items()
            if one.shape and len(one.shape) == 4 and one.shape[1] == 3 and one.shape[3] != 3
        }
        inputs, self.structured_outputs = (
            {name: tf.TensorSpec(self._sizes(name, one.shape), one.dtype) for name, one in tensors.items()}
            for tensors in (server.inputs, server.outputs)
        )
        self.structured_input_signature = (), inputs
        optional = {name: SimpleNamespace(optional=one.has_default) for name, one in server.inputs.items()}
        self.function_type = SimpleNamespace(parameters=optional)
        self.graph = tf.Graph()  # the server's operations are unknown

    def keep(self, outputs: Sequence[str]) -> None:
        """Asks the server for these outputs only."""
        self.structured_outputs = {name: spec for name, spec in self.structured_outputs.items() if name in outputs}

    def _sizes(self, name: str, shape: tuple[int, ...] | None) -> list[int | None] | None:
        if shape is None:
            return None
        sizes = [None if size < 0 else size for size in shape]
        return [sizes[0], *sizes[2:], sizes[1]] if name in self._channels_first else sizes

    def __call__(self, **feed: Any) -> dict[str, Any]:
        import tensorflow as tf

        wanted, names = dict(self.structured_outputs), list(feed)

        def infer(*arrays: np.ndarray) -> list[np.ndarray]:
            given = {
                name: np.ascontiguousarray(array.transpose(0, 3, 1, 2)) if name in self._channels_first else array
                for name, array in zip(names, arrays, strict=True)
            }
            return self._server.infer(given, list(wanted))

        found = tf.numpy_function(infer, list(feed.values()), [spec.dtype for spec in wanted.values()])
        for tensor, spec in zip(found, wanted.values(), strict=True):
            tensor.set_shape(spec.shape)
        return dict(zip(wanted, found, strict=True))


class RemoteEngine:
    """A model on a server; an `Engine`.

    Args:
      server: Has the model; the engine closes it.
      function: Runs it: `uint8 (n, H, W, 3)` -> outputs by role.
      batch_sizes: That the server takes.
      concurrent_batches: Requests at once.
    """

    def __init__(self, server: RemoteServer, function: Any, batch_sizes: tuple[int, ...], concurrent_batches: int):
        self.batch_sizes, self.concurrent_batches = batch_sizes, concurrent_batches
        self._server, self._function = server, function

    def run(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """Runs a batch; see `Engine`.

        Raises:
          ModelError: The server is away for too long, or the job was stopped meanwhile.
        """
        import tensorflow as tf

        try:
            return {role: array.numpy() for role, array in self._function(tf.constant(pixels)).items()}
        except ValueError as err:
            raise ModelFailed(first_line(err)) from err

    def close(self) -> None:
        """Closes the connections; no run may be under way."""
        self._server.close()


def open_model(_local: str, folder: str, model: ModelConfig, detect: DetectConfig) -> OpenedModel:
    """Describes a server's model, and finds the batch sizes that the server takes; see `ENGINES`.

    Raises:
      ModelError: The server is away for too long, has no such model, the model is no detector, or fails on a blank image.
    """
    if detect.precision != "float32" or detect.xla:
        raise ModelError(f"engine {detect.engine}: expected no --precision and no --xla, which are the server's own settings")
    tensorflow_setup.configure_tensorflow(dataclasses.replace(detect, device="cpu"))
    server = RemoteServer(model, detect.engine)
    try:
        return _opened(server, folder, model, detect)
    except ValueError as err:
        server.close()
        raise ModelError(f"model {folder}: fails on a blank image: {' '.join(str(err).split())[:300]}") from err
    except BaseException:
        server.close()
        raise


def _opened(server: RemoteServer, folder: str, model: ModelConfig, detect: DetectConfig) -> OpenedModel:
    signature = RemoteSignature(server)
    metadata = describe(signature, None, model, folder)
    if metadata.resize == "none":
        raise ModelError(f"model {folder}: takes images of any size; set model.input_hw and model.resize")
    if detect.labels_per_box == "several":
        check_several_labels(metadata, folder)
    signature.keep([metadata.boxes_output, metadata.scores_output, metadata.classes_output, metadata.count_output])
    function = as_eager_function(signature, metadata, detect)  # traced, it would block TensorFlow's threads
    parted = packed_output.parted(metadata) if packed_output.is_parted(metadata) else metadata
    fixed = signature.structured_input_signature[1][metadata.input_name].shape[0]
    sizes = _taken(function, metadata.input_hw, (fixed,) if fixed else detect.batch_sizes or _BATCH_SIZES)
    engine = RemoteEngine(server, function, sizes, tensorflow_setup.concurrent_batches_of(detect, gpu=False))
    server.loaded()
    return OpenedModel(engine, parted, fixed, version=server.version)


def _taken(function: Any, input_hw: tuple[int, int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Those of some batch sizes that the server takes; raises ValueError if it takes none."""
    import tensorflow as tf

    for number, size in reversed([*enumerate(sizes, 1)]):
        try:
            function(tf.zeros((size, *input_hw, 3), tf.uint8))
        except ValueError:
            if number == 1:
                raise
        else:
            return tuple(sizes[:number])
    raise AssertionError
