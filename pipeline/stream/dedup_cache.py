"""Deduplication caches: which images are in progress, and the outcomes of recent ones.

`DedupCache` is for steps in one process. `Attempts` is for runners with state, and knows what state cannot hold.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid
from collections.abc import Callable

from cachetools import TTLCache  # type: ignore[import-untyped]

from pipeline.records import ImageRef, name_bytes
from pipeline.stream.outgoing import Outcome

_MAX_BYTES = 128_000_000
_MAX_FAILED = 100_000
_MAX_REPEATS, _BETWEEN = 16, "\n"  # messages of repeats in the state of one image; no message id has an end of line
_ENTRY_BYTES = 500  # of one entry beside the text of its identity and row; measured with 200,000 of them


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    """An image that was asked for before.

    Attributes:
      ref: Which, and who asks now.
      outcome: What became of it; None while it is under way: `DedupCache.done` names the repeat then.
    """

    ref: ImageRef
    outcome: Outcome | None


class DedupCache:
    """Tells new images from repeats; thread-safe.

    An image is in progress from the first request to its outcome. Then its result is cached for a time, within a limit of bytes,
    least recently used out first. A failure is not cached: the next request tries again. So each repeat gets an outcome, either
    from the cache or from the attempt in progress.

    Args:
      seconds: How long a result is cached.
      max_bytes: Limit for the results; `Subscriber` bounds the images in progress.
      clock: Seconds, monotonic.
    """

    def __init__(self, seconds: float, max_bytes: int = _MAX_BYTES, clock: Callable[[], float] = time.monotonic):
        self._under_way: dict[str, list[ImageRef]] = {}
        self._results: TTLCache[str, tuple[Outcome, int]] = TTLCache(max_bytes, seconds, clock, lambda entry: entry[1])
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many results are remembered."""
        with self._lock:
            return len(self._results)

    def ask(self, ref: ImageRef) -> Repeat | None:
        """Returns None for a new image, which the caller must bring to an outcome; else the repeat."""
        with self._lock:
            known = self._results.get(ref.identity)
            if known:
                return Repeat(ref, known[0])
            if ref.identity in self._under_way:
                self._under_way[ref.identity].append(ref)
                return Repeat(ref, None)
            self._under_way[ref.identity] = []
            return None

    def done(self, ref: ImageRef, outcome: Outcome) -> list[ImageRef]:
        """Notes the outcome of a new image; returns the repeats that came meanwhile."""
        with self._lock:
            asking = self._under_way.pop(ref.identity, None)
            if asking is not None and not outcome.failed:
                size = len(outcome.row) + len(name_bytes(ref.identity)) + _ENTRY_BYTES
                self._results[ref.identity] = outcome, size
            return asking or []


class Attempts:
    """Tells repeats by the last attempt at an image, which runner state holds, and by how it ended here; thread-safe.

    State is written before an image is read, and a runner commits both together, so an attempt in state has an outcome. A later
    step cannot write to that state, so this process remembers which attempts failed. It does not know how attempts of another
    process ended. Then the next request tries again, and a second result has the same `detection_id`. But a message that was
    answered or dropped before a restart, and is delivered again after it, is a repeat: state holds these messages.

    Args:
      max_failed: How many failures are remembered; beyond it, all are forgotten and the process counts as another one.
    """

    def __init__(self, max_failed: int = _MAX_FAILED):
        self._max_failed = max_failed
        self._lock = threading.Lock()
        self._forget_all()

    def begin(self, ref: ImageRef, last: tuple[str, str] | None) -> tuple[str, str] | None:
        """Begins an attempt at an image: what state is to hold of it; None where the image is a repeat.

        Args:
          ref: Which image, and who asks for it.
          last: What state holds of the last attempt; None where there was none.
        """
        with self._lock:
            return None if last and self._is_repeat(ref, *last) else (self._process, ref.message_id)

    @staticmethod
    def with_repeat(ref: ImageRef, last: tuple[str, str]) -> tuple[str, str]:
        """What state is to hold of the last attempt after a repeat: also the repeat's message."""
        process, messages = last
        attempt, *repeats = messages.split(_BETWEEN)
        if ref.message_id not in (attempt, *repeats):
            repeats = [*repeats, ref.message_id][-_MAX_REPEATS:]
        return process, _BETWEEN.join([attempt, *repeats])

    def end(self, ref: ImageRef, failed: bool) -> None:
        """Notes how the attempt of a message at an image ended."""
        with self._lock:
            self._failed.discard((ref.message_id, ref.uri))
            if failed:
                if len(self._failed) >= self._max_failed:
                    self._forget_all()
                self._failed.add((ref.message_id, ref.uri))

    def _is_repeat(self, ref: ImageRef, process: str, messages: str) -> bool:
        attempt, *repeats = messages.split(_BETWEEN)
        if process == self._process:
            return (attempt, ref.uri) not in self._failed
        return bool(ref.message_id) and ref.message_id in (attempt, *repeats)  # delivered again after a restart

    def _forget_all(self) -> None:
        self._process = uuid.uuid4().hex
        self._failed: set[tuple[str, str]] = set()
