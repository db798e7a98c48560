"""The deduplication cache of steps in one process: which images are in progress, and the outcomes of recent ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cachetools import TTLCache  # type: ignore[import-untyped]

from pipeline.records import ImageRef, name_bytes
from pipeline.stream.outgoing import Outcome

_MAX_BYTES = 128_000_000
_ENTRY_BYTES = 500  # of one entry beside the text of its identity and row; measured with 200,000 of them


class DedupCache:
    """Tells new images from repeats, and gives each an outcome; thread-safe.

    An image is in progress from the first request to its outcome. Then its result is cached for a time, within a limit of bytes,
    least recently used out first. A failure is not cached: the next request tries again.

    Args:
      seconds: How long a result is cached.
      end: Takes each image that was asked for, repeats too, and its outcome.
      max_bytes: Limit for the results; `Subscriber` bounds the images in progress.
      clock: Seconds, monotonic.
    """

    def __init__(
        self,
        seconds: float,
        end: Callable[[ImageRef, Outcome], object],
        max_bytes: int = _MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._end = end
        self._in_progress: dict[bytes, list[ImageRef]] = {}
        self._named: dict[tuple[str, str], list[bytes]] = {}  # their identities, by message and URI of who asked first
        self._results: TTLCache[bytes, tuple[Outcome, int]] = TTLCache(max_bytes, seconds, clock, lambda entry: entry[1])
        self._lock = threading.Lock()

    def is_new(self, ref: ImageRef, identity: bytes) -> bool:
        """Whether the caller must bring an image to an outcome; a repeat of its identity has one already, or waits for it."""
        with self._lock:
            known = self._results.get(identity)
            if not known:
                is_new = identity not in self._in_progress
                self._in_progress.setdefault(identity, []).append(ref)
                if is_new:
                    self._named.setdefault((ref.message_id, ref.uri), []).append(identity)
                return is_new
        self._end(ref, known[0])
        return False

    def done(self, ref: ImageRef, outcome: Outcome) -> None:
        """Notes the outcome of an image that was new; its generation is the one that was read, perhaps not of its identity."""
        with self._lock:
            asked = self._take_asked(ref)
            if not outcome.failed:
                identity = name_bytes(ref.identity)
                self._results[identity] = outcome, len(outcome.row) + len(identity) + _ENTRY_BYTES
        for each in asked:
            self._end(each, outcome)

    def _take_asked(self, ref: ImageRef) -> list[ImageRef]:
        """Ends the progress of an image, and returns who asked for it; where its generation was unknown, message and URI tell."""
        own, name = name_bytes(ref.identity), (ref.message_id, ref.uri)
        identities = self._named.get(name)
        if not identities:
            return [ref]
        identity = own if own in identities else identities[0]
        identities.remove(identity)
        if not identities:
            del self._named[name]
        return self._in_progress.pop(identity)
