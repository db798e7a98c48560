"""A loaded version of a detector, of any engine.

`DetectObjects(model=...)` takes a function that returns a `LoadedModel`: a description, and an `Engine` behind a `Batcher`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.detect.batcher import Batcher
from pipeline.detect.golden import GoldenImage


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
      engine: Runs it, in batches.
      warmup_requests: Encoded images, or arrays `(n, H, W, 3) uint8`, on which it must not fail before it is used.
      golden: Images in which it must find the expected objects before it is used.
      memory: Its memory.
      notes: What a person should know of how it runs, a line each.
    """

    metadata: DetectorMetadata
    version: str
    engine: Batcher
    warmup_requests: tuple[bytes | np.ndarray, ...] = ()
    golden: tuple[GoldenImage, ...] = ()
    memory: Memory = Memory()  # noqa: RUF009  immutable
    notes: tuple[str, ...] = ()


LoadModel = Callable[[DetectConfig], LoadedModel]
"""Loads a model with the settings of a job, or raises `ModelError`. Remote workers import it by its name."""
