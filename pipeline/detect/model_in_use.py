"""The version of a model that images meet now. Another one takes its place between two groups of images, never within one."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from pipeline.detect.loaded_model import LoadedModel
from pipeline.errors import ModelError


class ModelInUse:
    """Holds the version in use, and knows who uses which; thread-safe.

    Args:
      model: The first version.
    """

    def __init__(self, model: LoadedModel):
        self._changed = threading.Condition()
        self._current: LoadedModel | None = model
        self._last = model
        self._failure = ""
        self._users: Counter[int] = Counter()  # by the id of a version, which lives while it has users

    @property
    def current(self) -> LoadedModel:
        """The version in use; while there is none, the last one."""
        return self._last

    @contextlib.contextmanager
    def taken(self) -> Iterator[LoadedModel]:
        """The version in use, for one group of images: it is not closed before the block ends. Waits while there is none.

        Raises:
          ModelError: There will be none any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._current or self._failure)
            if self._current is None:
                raise ModelError(self._failure)
            model = self._current
            self._users[id(model)] += 1
        try:
            yield model
        finally:
            with self._changed:
                self._users[id(model)] -= 1
                self._changed.notify_all()

    def swap(self, model: LoadedModel) -> None:
        """From now on images meet this version. Returns when nobody uses the one before any more, which is then closed."""
        old = self._replace(model)
        if old:
            self._close(old)

    def unload(self) -> None:
        """From now on images wait. Returns when nobody uses the version that was in use any more, which is then closed."""
        old = self._replace(None)
        if old:
            self._close(old)

    def fail_pending(self, failure: str) -> None:
        """Whoever waits for a version, or will, gets a `ModelError`."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def close(self) -> None:
        """Closes the version in use; no image may be under way."""
        if self._current:
            self._current.engine.close()

    def _replace(self, model: LoadedModel | None) -> LoadedModel | None:
        with self._changed:
            old, self._current = self._current, model
            self._last = model or self._last
            self._changed.notify_all()
        return old

    def _close(self, old: LoadedModel) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._users[id(old)])
            del self._users[id(old)]
        old.engine.close()
