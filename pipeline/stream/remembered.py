"""What a run remembers of the images that it has seen of late."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

_MOST = 200_000  # identities remembered; about 60 MB


class RecentIdentities:
    """Remembers identities for a time, at most so many; thread-safe.

    Args:
      seconds: How long.
      most: How many; the oldest are forgotten first.
      clock: Seconds, monotonic.
    """

    def __init__(self, seconds: float, most: int = _MOST, clock: Callable[[], float] = time.monotonic):
        self._seconds = seconds
        self._most = most
        self._clock = clock
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._seen)

    def is_new(self, identity: str) -> bool:
        """Whether an identity is seen for the first time within the time; remembers it."""
        now = self._clock()
        with self._lock:
            while self._seen and (len(self._seen) > self._most or next(iter(self._seen.values())) <= now - self._seconds):
                self._seen.popitem(last=False)
            if identity in self._seen:
                return False
            self._seen[identity] = now
            return True
