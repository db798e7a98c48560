"""TensorFlow's batch scheduler (TF Serving's) over one graph, in a session that can be closed.

Many threads pass one or a few images each, and block until their outputs come. The scheduler makes a batch when enough images
wait or the oldest has waited long enough, pads it to an allowed batch size, and runs up to `concurrent_batches` at once. In the
eager context a scheduler lives as long as the process: each load keeps 145 MB and 3 threads for a model of 24 MB. A session frees
them when it closes, and is as fast.
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

InputHw = tuple[int | None, int | None]
"""Height and width of a model's input; None if it takes images of any size, one at a time."""

_MOST = 1 << 16  # images of one caller, and batches that wait; never reached, since each caller is a thread that blocks


class TensorFlowScheduler:
    """A model in a session of its own; merges the images of all calling threads into batches. See `BatchedModel`."""

    def __init__(
        self, predict: Predict, input_hw: InputHw, batch_sizes: Sequence[int], concurrent_batches: int, timeout_ms: float
    ):
        import tensorflow as tf

        batch_size_lists = [tuple(batch_sizes[:length]) for length in range(1, len(batch_sizes) + 1)]
        self._tickets = itertools.count()
        self._one_alone = threading.Lock()
        traced = _TracedModel(predict, input_hw)
        graph = tf.Graph()
        with graph.as_default(), tf.device("CPU:0"):  # the scheduler reads its inputs there; whole batches go to the device
            inputs = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in traced.inputs]
            # a queue for each list of batch sizes left after errors: they share the model. One that was never called
            # costs nothing; the threads of the others wake up each millisecond
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
        self._session.run(begun)  # now the session has its own copy of the graph
        forget_functions(graph)

    def run(self, images: Sequence[np.ndarray], largest: int) -> list[Output]:
        """Blocks until the outputs of a few images come.

        Args:
          images: Each `(H, W, 3) uint8`; more than a batch of them are divided.
          largest: Largest batch size.

        Raises:
          OutOfMemory: A batch with one of these images does not fit into memory.
          ModelFailed: The model fails on a batch with one of these images.
        """
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
        """As `run`, for one image in a batch of its own."""
        with self._one_alone:
            return self.run([pixels], 0)[0]

    def close(self) -> None:
        """Frees memory and threads; no call may be under way."""
        self._run.clear()
        self._session.close()
        del self._session  # with its graph
        return_free_memory(circles=True)


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


class _TracedModel:
    """The model as a TensorFlow function.

    Traced outside of the session's graph and of any `tf.device`, so that TensorFlow places the operations on a GPU if it has one.
    """

    def __init__(self, predict: Predict, input_hw: InputHw):
        import tensorflow as tf

        self._predict = predict
        self.names: list[str] = []
        self.inputs = [tf.TensorSpec((None, *input_hw, 3), tf.uint8), tf.TensorSpec((None,), tf.int64)]
        self._function = trace(self._run, self.inputs)

    def queue(self, inputs: list[Any], batch_sizes: tuple[int, ...], concurrent_batches: int, timeout_ms: float) -> list[Any]:
        """Adds a queue of the scheduler to the default graph; returns its results."""
        import tensorflow as tf

        add_function(tf.compat.v1.get_default_graph(), self._function)
        results: list[Any] = tf.raw_ops.BatchFunction(
            in_tensors=inputs,
            captured_tensors=[],
            f=self._function.name,
            num_batch_threads=concurrent_batches,
            max_batch_size=_MOST,  # of one caller, whose images are divided; a batch has at most the largest allowed size
            allowed_batch_sizes=list(batch_sizes),
            batch_timeout_micros=int(timeout_ms * 1000),
            max_enqueued_batches=_MOST,
            enable_large_batch_splitting=True,
            Tout=[output.dtype for output in self._function.graph.outputs],
        )
        return results

    def _run(self, images: Any, tickets: Any) -> list[Any]:
        """The model, plus three rows about the batch: its size, whether this image is its first, and the model's seconds.

        The scheduler pads with copies of the last image and its ticket, so only the first image has the first ticket.
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
        # One axis more: if the images of one caller are divided and the first part fails, the scheduler appends the second part
        # to an empty vector of floats, and crashes the process if the types differ.
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
    """The last line of TensorFlow's message that is more than a node's name in brackets."""
    lines = [line.strip() for line in (err.message or "").splitlines()]
    return ([line for line in lines if line and not line.startswith("[[")] or [type(err).__name__])[-1][:300]
