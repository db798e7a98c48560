"""The seam between the detector and whatever runs a model: TensorFlow in this process, another library, a server elsewhere.

Nothing here names an engine, neither in types nor in failures. An engine is one class with the methods of `Engine`; a function
that makes a `LoadedModel` of it is all that `DetectObjects(model=...)` needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.detect.golden import GoldenImage


class OutOfMemory(Exception):  # noqa: N818  says what happened, like `StopIteration`
    """A model call does not fit into the memory of its device; one of fewer images may."""


class ModelFailed(Exception):  # noqa: N818
    """The model fails on the images of a call, and would again; its text is the reason, in one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """What the model returns for one image, and what is known of the model call in which the image travelled.

    Attributes:
      arrays: `boxes (M, 4)`, `scores (M,)` or `(M, C)`, and where the model has them `classes (M,)` and `count ()`.
      led_batch: Images of the model call, with padding, if this image was its first, else 0; summed over images this counts
        every call once.
      model_seconds: How long the call ran if this image was its first, else 0.
    """

    arrays: Mapping[str, np.ndarray]
    led_batch: int = 0
    model_seconds: float = 0.0


class Engine(Protocol):
    """Runs a model; thread-safe, and warm: no image pays for a first call."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The allowed batch sizes in use, ascending."""

    @property
    def images_in_flight(self) -> int:
        """How many images keep the model busy, with its next ones already waiting."""

    def __call__(self, images: Sequence[np.ndarray]) -> Sequence[Output | ModelFailed]:
        """Runs the model on a few images, perhaps together with those that other threads bring.

        Args:
          images: Each `(H, W, 3) uint8`, of the input size that the metadata states.

        Returns:
          For each image its output, or why the model fails on this image alone.

        Raises:
          OutOfMemory: Memory does not suffice for a single image.
        """

    def close(self) -> None:
        """Gives back memory and threads. No call may be under way, and none may follow."""


class Memory(NamedTuple):
    """What a version takes of the memory that all versions share.

    Attributes:
      weights_bytes: For what it has learnt.
      working_bytes: Beside that, while it runs.
      limit_bytes: What there is of it; None: nobody knows.
    """

    weights_bytes: int = 0
    working_bytes: int = 0
    limit_bytes: int | None = None

    @property
    def used_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.working_bytes


_NOT_KNOWN = Memory()


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """One version of a detector, loaded and warm. Whoever works on an image takes it once, so that no image meets two.

    Attributes:
      metadata: What the model expects and returns.
      version: Its version, as a string; "" where it has none.
      engine: Runs it.
      warmup_requests: What it must be able to do before it is used: encoded images, or arrays `(n, H, W, 3) uint8`.
      golden: What it must find before it is used.
      memory: What it takes.
    """

    metadata: DetectorMetadata
    version: str
    engine: Engine
    warmup_requests: tuple[bytes | np.ndarray, ...] = ()
    golden: tuple[GoldenImage, ...] = ()
    memory: Memory = _NOT_KNOWN


LoadModel = Callable[[DetectConfig], LoadedModel]
"""Loads a model with the settings of a job; raises `ModelError` where it can't. Remote workers import it by its name."""
