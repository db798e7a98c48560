"""TensorFlow's own batch scheduler (the one of TF Serving) over one graph, in a session that can be closed.

Callers hand in one or a few images each, from many threads, and block until the outputs are there. The scheduler forms a model
call when enough images wait or the oldest has waited long enough, pads it to a batch size of the batch sizes, and keeps `concurrent_batches` calls in
flight. In the eager context it would live as long as the process: 145 MB and 3 threads for a model of 24 MB, at each load. A
session's goes when the session is closed, at the same speed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.detect.loaded_model import ModelFailed, OutOfMemory, Output
from pipeline.detect.process_memory import return_free_memory
from pipeline.detect.tensorflow_internals import add_function, forget_functions, trace
from pipeline.detect.tensorflow_setup import graph_config

if TYPE_CHECKING:
    from tensorflow.errors import OpError

Predict = Callable[[Any], Mapping[str, Any]]
"""Traced: `uint8 (n, H, W, 3)` -> outputs by name, each with the batch axis first."""

_MOST = 1 << 16  # images of one caller, and model calls that wait; never reached, since callers are threads that wait


class TensorFlowScheduler:
    """A model in a session of its own; a `Scheduler`.

    Args:
      predict: The model.
      input_hw: Height and width of its input.
      batch_sizes: The batch sizes, ascending.
      concurrent_batches: Model calls in flight.
      timeout_ms: Longest wait of an image for others.

    Attributes:
      gpu_bytes: What TensorFlow may take of the GPU that the model runs on; None: it runs on none.
    """

    def __init__(
        self, predict: Predict, input_hw: tuple[int, int], batch_sizes: Sequence[int], concurrent_batches: int, timeout_ms: float
    ):
        import tensorflow as tf

        batch_size_lists = [tuple(batch_sizes[:length]) for length in range(1, len(batch_sizes) + 1)]
        self._tickets = itertools.count()
        self._one_alone = threading.Lock()
        traced = _TracedModel(predict, input_hw)
        graph = tf.Graph()
        with graph.as_default(), tf.device("CPU:0"):  # where the scheduler wants its inputs; whole batches go to the device
            inputs = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in traced.inputs]
            # a queue for each length that the batch sizes may have: they share the model, and a queue that nobody calls costs nothing
            queues = {
                batch_sizes[-1]: traced.queue(inputs, batch_sizes, concurrent_batches, timeout_ms)
                for batch_sizes in batch_size_lists
            }
            alone = traced.queue(inputs, batch_size_lists[0], 1, 0.0)
            begun = tf.no_op()
        self._names = traced.names
        self._session = tf.compat.v1.Session(graph=graph, config=graph_config())
        gpus = [device.memory_limit_bytes for device in self._session.list_devices() if device.device_type == "GPU"]
        self.gpu_bytes: int | None = gpus[0] if gpus else None
        self._run = {largest: self._session.make_callable(results, inputs) for largest, results in {**queues, 0: alone}.items()}
        self._session.run(begun)  # now the session has a graph of its own
        forget_functions(graph)

    def run(self, images: Sequence[np.ndarray], largest: int) -> list[Output]:
        """Blocks until the outputs of a few images are there; see `Scheduler`."""
        tickets = np.array([next(self._tickets) for _ in images], np.int64)
        with _in_our_words():
            results = self._run[largest](np.stack(images), tickets)
        *arrays, batch_sizes_used, leads, seconds = [result[:, 0] for result in results]
        return [
            Output(
                {name: array[n] for name, array in zip(self._names, arrays, strict=True)},
                int(batch_sizes_used[n]) if leads[n] else 0,
                float(seconds[n]) if leads[n] else 0.0,
            )
            for n in range(len(images))
        ]

    def run_alone(self, pixels: np.ndarray) -> Output:
        """As `run`, in a queue that holds no other image."""
        with self._one_alone:
            return self.run([pixels], 0)[0]

    def close(self) -> None:
        """Gives back memory and threads; nothing may be under way."""
        self._run.clear()
        self._session.close()
        del self._session  # with its graph
        return_free_memory(circles=True)


def call(function: Any, tensors: Sequence[Any], *, optimised: bool) -> list[Any]:
    """Calls a function in the graph that is being built; `optimised`: whether TensorFlow has nothing left to do about it."""
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


class _TracedModel:
    """The model as a TensorFlow function.

    Traced outside of the session's graph, where Python's operators keep their usual meaning, and outside of any `tf.device`: so
    TensorFlow places the model's operations, on a GPU where there is one.
    """

    def __init__(self, predict: Predict, input_hw: tuple[int, int]):
        import tensorflow as tf

        self._predict = predict
        self.names: list[str] = []
        self.inputs = [tf.TensorSpec((None, *input_hw, 3), tf.uint8), tf.TensorSpec((None,), tf.int64)]
        self._function = trace(self._run, self.inputs)

    def queue(self, inputs: list[Any], batch_sizes: tuple[int, ...], concurrent_batches: int, timeout_ms: float) -> list[Any]:
        """A queue of the scheduler, in the graph that is being built; returns its results."""
        import tensorflow as tf

        add_function(tf.compat.v1.get_default_graph(), self._function)
        results: list[Any] = tf.raw_ops.BatchFunction(
            in_tensors=inputs,
            captured_tensors=[],
            f=self._function.name,
            num_batch_threads=concurrent_batches,
            max_batch_size=_MOST,  # of one caller, since larger ones are divided; a model call has at most the largest batch size
            allowed_batch_sizes=list(batch_sizes),
            batch_timeout_micros=int(timeout_ms * 1000),
            max_enqueued_batches=_MOST,
            enable_large_batch_splitting=True,
            Tout=[output.dtype for output in self._function.graph.outputs],
        )
        return results

    def _run(self, images: Any, tickets: Any) -> list[Any]:
        """The model, plus three rows about the call: its batch size, whether this image is its first, and how long it ran.

        The scheduler pads with copies of the last image, ticket included, so tickets tell the first image apart from all others.
        """
        import tensorflow as tf

        started = tf.timestamp()
        with tf.control_dependencies([started]):
            images = tf.identity(images)
        outputs = self._predict(images)
        self.names = list(outputs)
        with tf.control_dependencies(list(outputs.values())):
            seconds = tf.timestamp() - started
        batch_size = tf.size(tickets)
        rows = [tf.fill([batch_size], batch_size), tf.equal(tickets, tickets[0]), tf.fill([batch_size], seconds)]
        # One axis more: where the images of one caller are divided and the first part fails, the scheduler puts the second part
        # behind an empty vector of floats, and ends the process if that is a vector of another type.
        return [tf.expand_dims(result, 1) for result in (*outputs.values(), *rows)]


@contextmanager
def _in_our_words() -> Iterator[None]:
    import tensorflow as tf

    try:
        yield
    except tf.errors.ResourceExhaustedError as err:
        raise OutOfMemory(_reason(err)) from err
    except tf.errors.OpError as err:
        raise ModelFailed(_reason(err)) from err


def _reason(err: OpError) -> str:
    """The telling line of TensorFlow's many: the last one that is more than a node's name in brackets."""
    lines = [line.strip() for line in (err.message or "").splitlines()]
    return ([line for line in lines if line and not line.startswith("[[")] or [type(err).__name__])[-1][:300]
