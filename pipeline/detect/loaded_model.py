"""Interface between the detector and an engine that runs a model: TensorFlow, another library, or a remote server.

Neither types nor errors name an engine. An engine is a class with the members of `Engine`. `DetectObjects(model=...)` takes a
function that returns a `LoadedModel` with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.detect.golden import GoldenImage


class OutOfMemory(Exception):  # noqa: N818  named like `StopIteration`
    """A batch does not fit into the memory of its device; a smaller one may."""


class ModelFailed(Exception):  # noqa: N818
    """The model fails on these images, and would fail again; the text is the reason, in one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """The model's output for one image.

    Attributes:
      arrays: `boxes (M, 4)`, `scores (M,)` or `(M, C)`, and where the model has them `classes (M,)` and `count ()`.
      led_batch: Size of the batch, with padding, for its first image, else 0; so a sum over images counts every batch once.
      model_seconds: Time of the batch for its first image, else 0.
    """

    arrays: Mapping[str, np.ndarray]
    led_batch: int = 0
    model_seconds: float = 0.0


class Engine(Protocol):
    """Runs a model; thread-safe and warmed up."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Allowed batch sizes, ascending."""

    @property
    def images_in_flight(self) -> int:
        """How many images keep the model busy, including those that wait for the next batch."""

    def __call__(self, images: Sequence[np.ndarray]) -> Sequence[Output | ModelFailed]:
        """Runs the model on a few images, perhaps batched with those of other threads.

        Args:
          images: Each `(H, W, 3) uint8`, of the input size in the metadata.

        Returns:
          For each image its output, or why the model fails on this image alone.

        Raises:
          OutOfMemory: Even a single image does not fit into memory.
        """

    def close(self) -> None:
        """Frees memory and threads. No call may be under way, and none may follow."""


class Memory(NamedTuple):
    """A version's use of the memory that all versions share.

    Attributes:
      weights_bytes: For its weights.
      working_bytes: For all else.
      limit_bytes: The memory of the device; None if unknown.
    """

    weights_bytes: int = 0
    working_bytes: int = 0
    limit_bytes: int | None = None

    @property
    def used_bytes(self) -> int:
        """Weights and working memory."""
        return self.weights_bytes + self.working_bytes


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """One version of a detector, loaded and warm.

    Attributes:
      metadata: What the model expects and returns.
      version: Its version; "" if it has none.
      engine: Runs it.
      warmup_requests: Encoded images, or arrays `(n, H, W, 3) uint8`, on which it must not fail before it is used.
      golden: Images in which it must find the expected objects before it is used.
      memory: Its memory.
      notes: What a person should know of how it runs, a line each.
    """

    metadata: DetectorMetadata
    version: str
    engine: Engine
    warmup_requests: tuple[bytes | np.ndarray, ...] = ()
    golden: tuple[GoldenImage, ...] = ()
    memory: Memory = Memory()  # noqa: RUF009  immutable
    notes: tuple[str, ...] = ()


LoadModel = Callable[[DetectConfig], LoadedModel]
"""Loads a model with the settings of a job, or raises `ModelError`. Remote workers import it by its name."""
