"""Delayed acknowledgements, for a runner that finalizes bundles early: one checkpoint later.

Flink finalizes all bundles that have ended when a checkpoint completes, also those that ended after it began and that only the
next one holds (the bundle finalization of Beam's `ExecutableStageDoFnOperator`). If their messages were acknowledged then, a
crash before the next checkpoint would lose them. So bundles that are finalized together are one checkpoint group, and are
acknowledged when the next group begins. A poller that finds no messages has a bundle too, so there is always a next group. This
needs one checkpoint at a time.

If the job falls back to a checkpoint and this process survives, the poller repeats a poll. The checkpoint holds the messages of
earlier polls; those of this poll and later ones are lost, and must be delivered again.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence

from pipeline.stream.subscriber import Subscriber

# finalizations within this time may be of one checkpoint group; checkpoints that are closer count as one
_SETTLE_SECONDS = 1.0


@dataclasses.dataclass
class Poll:
    """One poll of a poller: its number, its messages, when its bundle ended, and when that was finalized."""

    number: int
    ids: Sequence[str]
    ended: float = math.inf
    finalized: float = math.inf


class DelayedAcks:
    """The unacknowledged polls of one poller in this process; thread-safe.

    Args:
      subscriber: Acknowledges messages that a checkpoint holds, and releases those that were lost after one.
      clock: Seconds, monotonic.
    """

    def __init__(self, subscriber: Subscriber, clock: Callable[[], float] = time.monotonic):
        self._subscriber, self._clock = subscriber, clock
        self._lock = threading.Lock()
        self._polls: dict[int, Poll] = {}
        self._group_began = -math.inf

    def begin(self, number: int, ids: Sequence[str]) -> Poll:
        """Begins a poll with these messages. If its number was begun before, the job fell back, which decides earlier polls."""
        poll = Poll(number, ids)
        former: list[Poll] = []
        with self._lock:
            if self._polls and number <= max(self._polls):
                former, self._polls = [*self._polls.values()], {}
            self._polls[number] = poll
        self._subscriber.end_hold([each for earlier in former if earlier.number < number for each in earlier.ids])
        self._subscriber.release([each for later in former if later.number >= number for each in later.ids])
        return poll

    def end(self, poll: Poll) -> None:
        """Notes that a poll's bundle has ended."""
        with self._lock:
            poll.ended = self._clock()

    def finalize(self, poll: Poll) -> None:
        """Notes a finalization; the first one of a new group acknowledges the messages of the group before."""
        with self._lock:
            now = self._clock()
            poll.finalized = now
            if poll.ended <= self._group_began or self._polls.get(poll.number) is not poll:
                return
            self._group_began = now
            done = [number for number, each in self._polls.items() if each.finalized <= now - _SETTLE_SECONDS]
            ids = [each for number in done for each in self._polls.pop(number).ids]
        self._subscriber.end_hold(ids)
