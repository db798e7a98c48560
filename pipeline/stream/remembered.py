"""Which images are under way, and what became of those of late: one store for what makes a repeat and for what answers it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from cachetools import TTLCache  # type: ignore[import-untyped]

from pipeline.records import ImageRef, name_bytes
from pipeline.stream.outgoing import Outcome

_MAX_BYTES = 128_000_000
_ENTRY_BYTES = 500  # of one entry beside the text of its identity and row; measured with 200,000 of them


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    """An image that was asked for before.

    Attributes:
      ref: Which, and who asks now.
      outcome: What became of it; None while it is under way: `RecentImages.done` names the repeat then.
    """

    ref: ImageRef
    outcome: Outcome | None


class RecentImages:
    """Tells new images from repeats; thread-safe.

    An image is under way from the first asking to its outcome, then a result is remembered for a time, within so many bytes,
    the least recently used forgotten first. A failure is not: who asks after it asks anew. So there is no moment at which an
    image counts as a repeat and yet nobody has its outcome or will have it.

    Args:
      seconds: How long a result is remembered.
      max_bytes: How many bytes the results may take; images under way are bounded by what is in hand.
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
        """Asks for an image: None where it is new, and the caller's to bring to an outcome; else the repeat that it is."""
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
        """Notes what became of an image that was new; gives those who have asked for it meanwhile."""
        with self._lock:
            asking = self._under_way.pop(ref.identity, None)
            if asking is not None and not outcome.failed:
                size = len(outcome.row) + len(name_bytes(ref.identity)) + _ENTRY_BYTES
                self._results[ref.identity] = outcome, size
            return asking or []
