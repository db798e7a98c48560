"""An engine over TensorFlow: one graph in a session of its own, which frees threads and memory when it closes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.detect.engine import ModelFailed, OutOfMemory
from pipeline.detect.tensorflow_internals import add_function, forget_functions
from pipeline.detect.tensorflow_setup import graph_config

if TYPE_CHECKING:
    from tensorflow.errors import OpError

Predict = Callable[[Any], Mapping[str, Any]]
"""Adds the model to the default graph: `uint8 (n, H, W, 3)` -> outputs by name, each with the batch axis first."""

InputHw = tuple[int | None, int | None]
"""Height and width of a model's input; None if it takes images of any size, one at a time."""


class TensorFlowEngine:
    """A model in a session; an `Engine`.

    Args:
      predict: The model.
      input_hw: Height and width of its input.
      batch_sizes: Allowed batch sizes, ascending.
      concurrent_batches: Concurrent batches.

    Attributes:
      gpu_bytes: GPU memory that TensorFlow may use; None on a CPU.
    """

    def __init__(self, predict: Predict, input_hw: InputHw, batch_sizes: Sequence[int], concurrent_batches: int):
        import tensorflow as tf

        self.batch_sizes, self.concurrent_batches = tuple(batch_sizes), concurrent_batches
        graph = tf.Graph()
        with graph.as_default():
            images = tf.compat.v1.placeholder(tf.uint8, (None, *input_hw, 3))
            outputs = predict(images)
            begun = tf.no_op()
        self._names = list(outputs)
        self._session = tf.compat.v1.Session(graph=graph, config=graph_config())
        gpus = [device.memory_limit_bytes for device in self._session.list_devices() if device.device_type == "GPU"]
        self.gpu_bytes: int | None = gpus[0] if gpus else None
        self._run = self._session.make_callable([*outputs.values()], [images])
        self._session.run(begun)  # now the session has its own copy of the graph
        forget_functions(graph)

    def run(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """Runs a batch; see `Engine`."""
        import tensorflow as tf

        try:
            return dict(zip(self._names, self._run(pixels), strict=True))
        except tf.errors.ResourceExhaustedError as err:
            raise OutOfMemory(reason(err)) from err
        except tf.errors.OpError as err:
            raise ModelFailed(reason(err)) from err

    def close(self) -> None:
        """Frees memory and threads; no run may be under way."""
        del self._run
        self._session.close()
        del self._session  # with its graph


def call(function: Any, tensors: Sequence[Any], *, optimised: bool) -> list[Any]:
    """Calls a traced function in the default graph; if not `optimised`, TensorFlow optimises it at its first call."""
    import tensorflow as tf

    add_function(tf.compat.v1.get_default_graph(), function)
    operation = tf.raw_ops.StatefulPartitionedCall if function.call_options.is_stateful else tf.raw_ops.PartitionedCall
    results: list[Any] = operation(
        args=tensors,
        Tout=[output.dtype for output in function.graph.outputs],
        f=function.name,
        config_proto=graph_config(optimised=optimised).SerializeToString(),
    )
    for result, output in zip(results, function.graph.outputs, strict=True):
        result.set_shape(output.shape)
    return results


def reason(err: OpError) -> str:
    """The last line of TensorFlow's message that is more than a node's name in brackets."""
    lines = [line.strip() for line in (err.message or "").splitlines()]
    return ([line for line in lines if line and not line.startswith("[[")] or [type(err).__name__])[-1][:300]
