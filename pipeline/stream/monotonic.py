"""Time that goes on evenly, whatever becomes of this machine's clock."""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def steady_time() -> float:
    """Seconds since the epoch as the clock had them when this process began, and as many more as have passed since.

    A clock that jumps and comes back would put a stream's watermark hours ahead of what comes next, which is then late.
    """
    return _BEGAN + time.monotonic()
