"""One model, shared by all who call it at the same time: TensorFlow's batch scheduler merges their images into device batches.

Callers hand in one or a few images each, from many threads, and block until the answers are there. The scheduler (the one of TF
Serving) forms a batch when enough images wait or the oldest has waited long enough, pads it to a rung of the ladder, and keeps
`streams` batches in flight.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tensorflow.errors import OpError

_queues = itertools.count()


class Answer(NamedTuple):
    """What the model said of one image, and of the batch in which it travelled.

    Attributes:
      outputs: The model's outputs for this image, as NumPy arrays without the batch axis.
      led_batch: Rung of the batch if this image was its first, else 0; summed over images this counts every batch once.
      model_seconds: How long the batch ran if this image was its first, else 0.
    """

    outputs: dict[str, np.ndarray]
    led_batch: int
    model_seconds: float


class BatchedModel:
    """A model function behind TensorFlow's batch scheduler; thread-safe.

    Out of memory: the largest rung is dropped for good, and the images of the failed batch are tried again in smaller ones.
    Any other failure of a batch is tried again image by image, so that an image that breaks the model breaks no other.

    Args:
      predict: `uint8 (n, H, W, 3)` -> mapping of outputs, each with the batch axis first.
      input_hw: Height and width of the input.
      batch_sizes: The ladder, ascending.
      streams: Batches in flight.
      timeout_ms: Longest wait of an image for others.
    """

    def __init__(
        self,
        predict: Callable[[Any], Mapping[str, Any]],
        input_hw: tuple[int, int],
        batch_sizes: Sequence[int],
        streams: int,
        timeout_ms: float,
    ):
        self._predict = predict
        self._input_hw = input_hw
        self._streams = streams
        self._timeout_ms = timeout_ms
        self._lock = threading.Lock()
        self._outputs: list[str] = []
        self._tickets = itertools.count()
        self._set_ladder(tuple(batch_sizes))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The ladder as it is now; shorter than at first after an out-of-memory."""
        return self._batch_sizes

    @property
    def images_in_flight(self) -> int:
        """How many images keep every stream busy with the next batch already waiting."""
        return 2 * self._streams * self._batch_sizes[-1]

    def __call__(self, images: Sequence[np.ndarray]) -> list[Answer | OpError]:
        """Runs images, each `uint8 (H, W, 3)`, in whatever batches they end up.

        Returns:
          For each image what the model says of it, or the error with which it fails on this image alone.

        Raises:
          tf.errors.ResourceExhaustedError: Memory does not suffice for a single one.
        """
        import tensorflow as tf

        answers: list[Answer | OpError] = []
        while len(answers) < len(images):
            batch_sizes, batched = self._batch_sizes, self._batched
            together = images[len(answers) : len(answers) + batch_sizes[-1]]
            try:
                answers += batched(together)
            except tf.errors.ResourceExhaustedError:
                if not self._drop_rung(batch_sizes):
                    raise
            except tf.errors.OpError as err:
                fixed_batch = len(batch_sizes) == 1 and batch_sizes[0] != 1  # the model takes no other batch than this
                answers += [err] * len(together) if fixed_batch else [self._alone(pixels) for pixels in together]
        return answers

    def _alone(self, pixels: np.ndarray) -> Answer | OpError:
        import tensorflow as tf

        try:
            outputs = self._predict(tf.constant(pixels[None]))
            return Answer({name: value.numpy()[0] for name, value in outputs.items()}, 1, 0.0)
        except tf.errors.ResourceExhaustedError:
            raise
        except tf.errors.OpError as err:
            return err

    def warm_up(self) -> None:
        """Runs every rung once on each stream, so that no image pays for a first call."""
        import tensorflow as tf

        for size in self._batch_sizes:
            blank = np.zeros((size, *self._input_hw, 3), np.uint8)
            try:
                with ThreadPoolExecutor(self._streams) as streams:
                    list(streams.map(self._predict, [tf.constant(blank)] * self._streams))
            except tf.errors.ResourceExhaustedError:
                if not self._drop_rung(self._batch_sizes, keep_below=size):
                    raise
                break
        self([np.zeros((*self._input_hw, 3), np.uint8)])

    def _drop_rung(self, batch_sizes: tuple[int, ...], keep_below: int | None = None) -> bool:
        """Shortens the ladder unless another caller has done so since `batch_sizes` was read; False when one rung is left."""
        with self._lock:
            if self._batch_sizes != batch_sizes:
                return True
            shorter = tuple(size for size in batch_sizes if size < (keep_below or batch_sizes[-1]))
            if not shorter:
                return False
            self._set_ladder(shorter)
            return True

    def _set_ladder(self, batch_sizes: tuple[int, ...]) -> None:
        import tensorflow as tf

        inputs = [tf.TensorSpec((None, *self._input_hw, 3), tf.uint8), tf.TensorSpec((None,), tf.int64)]
        batch = tf.function(self._traced_predict, input_signature=inputs, autograph=False).get_concrete_function()
        # TensorFlow keeps one scheduler for each name in a process: under the same one, another model's images would share these
        # batches, and a shorter ladder would have no effect
        queue = f"queue{next(_queues)}"
        answer_types = [output.dtype for output in batch.outputs]

        def batched(images: Sequence[np.ndarray]) -> list[Answer]:
            with tf.device("CPU:0"):  # where the scheduler wants them; whole batches go to the device
                pixels = tf.convert_to_tensor(np.stack(images))
                tickets = tf.constant([next(self._tickets) for _ in images], tf.int64)
            # the operation itself, called eagerly: a `tf.function` around it would cost CPU for each call
            results = tf.raw_ops.BatchFunction(
                in_tensors=[pixels, tickets],
                captured_tensors=batch.captured_inputs,
                f=batch,
                num_batch_threads=self._streams,
                max_batch_size=batch_sizes[-1],
                allowed_batch_sizes=list(batch_sizes),
                batch_timeout_micros=int(self._timeout_ms * 1000),
                max_enqueued_batches=1 << 16,
                enable_large_batch_splitting=True,
                shared_name=queue,
                Tout=answer_types,
            )
            *outputs, rungs, leads, seconds = (result.numpy() for result in results)
            return [
                Answer(
                    {name: output[n] for name, output in zip(self._outputs, outputs, strict=True)},
                    int(rungs[n]) if leads[n] else 0,
                    float(seconds[n]) if leads[n] else 0.0,
                )
                for n in range(len(images))
            ]

        self._batched = batched
        self._batch_sizes = batch_sizes

    def _traced_predict(self, images: Any, tickets: Any) -> list[Any]:
        """The model, plus three rows about the batch: its rung, whether this image is its first, and how long it ran.

        The scheduler pads with copies of the last image, ticket included, so tickets tell the first image apart from all others.
        """
        import tensorflow as tf

        started = tf.timestamp()
        with tf.control_dependencies([started]):
            outputs = self._predict(tf.identity(images))
        self._outputs = list(outputs)
        with tf.control_dependencies(list(outputs.values())):
            seconds = tf.timestamp() - started
        rung = tf.size(tickets)
        rows = [tf.fill([rung], rung), tf.equal(tickets, tickets[0]), tf.fill([rung], seconds)]
        return [*outputs.values(), *rows]
