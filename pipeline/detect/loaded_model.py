"""A loaded version of a detector, of any engine, and its reader-writer handover to the next version between groups of images.

`DetectObjects(model=...)` takes a function that returns a `LoadedModel`: a description, and an `Engine` behind a `Batcher`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.detect.batcher import Batcher
from pipeline.detect.golden import GoldenImage
from pipeline.errors import UserError
from pipeline.process import PROCESS

_LOADING_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """One version of a detector, loaded and warm.

    Attributes:
      metadata: What the model expects and returns.
      version: Its version; "" if it has none.
      batcher: Runs it, in batches.
      warmup_requests: Encoded images, or arrays `(n, H, W, 3) uint8`, on which it must not fail before it is used.
      golden: Images in which it must find the expected objects before it is used.
      memory_bytes: What it takes of the memory that all versions share; 0 if unknown.
      notes: What a person should know of how it runs, a line each.
      engine_name: What runs it.
    """

    metadata: DetectorMetadata
    version: str
    batcher: Batcher
    warmup_requests: tuple[bytes | np.ndarray, ...] = ()
    golden: tuple[GoldenImage, ...] = ()
    memory_bytes: int = 0
    notes: tuple[str, ...] = ()
    engine_name: str = ""


LoadModel = Callable[[DetectConfig], LoadedModel]
"""Loads a model with the settings of a job, or raises `ModelError`. Remote workers import it by its name."""


class ModelInUse:
    """Holds the version in use and counts its users; thread-safe.

    Args:
      model: The first version.
    """

    def __init__(self, model: LoadedModel):
        self._changed = threading.Condition()
        self._current: LoadedModel | None = model
        self._last = model
        self._failure: UserError | None = None
        self._users: Counter[int] = Counter()  # by the id of a version, which lives while it has users

    @property
    def current(self) -> LoadedModel:
        """The version in use; after `unload` the last one."""
        return self._last

    @property
    def is_lent(self) -> bool:
        """Whether images get a version; not so between `unload` and the next `swap`."""
        return self._current is not None

    @contextlib.contextmanager
    def taken(self) -> Iterator[LoadedModel]:
        """Lends the version in use to one group of images and keeps it open meanwhile. Blocks while there is none.

        Raises:
          UserError: That of `fail_pending`, if it was called.
        """
        with self._changed:
            while not self._changed.wait_for(lambda: self._current or self._failure, _LOADING_SECONDS):
                PROCESS.parts["detector"].progressed()  # a version that loads may take long
            if self._failure:
                raise type(self._failure)(*self._failure.args)  # one of its own for each thread
            model = self._last
            self._users[id(model)] += 1
        try:
            yield model
        finally:
            with self._changed:
                self._users[id(model)] -= 1
                self._changed.notify_all()

    def swap(self, model: LoadedModel | None) -> None:
        """Lends this version from now on. Returns once the old one has no users and is closed."""
        with self._changed:
            old, self._current = self._current, model
            self._last, self._failure = model or self._last, None
            self._changed.notify_all()
            if not old:
                return
            self._changed.wait_for(lambda: not self._users[id(old)])
            del self._users[id(old)]
        old.batcher.close()

    def unload(self) -> None:
        """Closes the version in use once it has no users; images then wait for the next `swap`."""
        self.swap(None)

    def fail_pending(self, failure: UserError) -> None:
        """Fails all images that wait for a version, now or later."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def close(self) -> None:
        """Closes the version in use; no image may be under way."""
        with self._changed:
            current, self._current = self._current, None
        if current:
            current.batcher.close()
