"""Delayed acknowledgements, for a runner that finalizes bundles early: one checkpoint later.

Flink finalizes all bundles that have ended when a checkpoint completes, also those that ended after it began and that only the
next one holds (the bundle finalization of Beam's `ExecutableStageDoFnOperator`). If their messages were acknowledged then, a
crash before the next checkpoint would lose them. So bundles that are finalized together are a wave, and are acknowledged when
the next wave begins. A puller that finds no messages has a bundle too, so there is always a next wave. This needs one checkpoint
at a time.

If the job falls back to a checkpoint and this process survives, the puller repeats a turn. The checkpoint holds the messages of
earlier turns; those of this turn and later ones are lost, and must be delivered again.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence

# finalizations within this time may be of one wave; checkpoints that are closer count as one
_SETTLE_SECONDS = 1.0


@dataclasses.dataclass
class Turn:
    """One turn of a puller: its number, its messages, when its bundle ended, and when that was finalized."""

    number: int
    ids: Sequence[str]
    ended: float = math.inf
    finalized: float = math.inf


class DelayedAcks:
    """The unacknowledged turns of one puller in this process; thread-safe.

    Args:
      acknowledge: Takes the ids of messages that a checkpoint holds.
      release: Takes the ids of messages that were lost after a checkpoint.
      clock: Seconds, monotonic.
    """

    def __init__(
        self,
        acknowledge: Callable[[Sequence[str]], object],
        release: Callable[[Sequence[str]], object],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._acknowledge, self._release, self._clock = acknowledge, release, clock
        self._lock = threading.Lock()
        self._turns: dict[int, Turn] = {}
        self._wave_began = -math.inf

    def begin(self, number: int, ids: Sequence[str]) -> Turn:
        """Begins a turn with these messages. If its number was begun before, the job fell back, which decides earlier turns."""
        turn = Turn(number, ids)
        former: list[Turn] = []
        with self._lock:
            if self._turns and number <= max(self._turns):
                former, self._turns = [*self._turns.values()], {}
            self._turns[number] = turn
        self._acknowledge([each for earlier in former if earlier.number < number for each in earlier.ids])
        self._release([each for later in former if later.number >= number for each in later.ids])
        return turn

    def end(self, turn: Turn) -> None:
        """Notes that a turn's bundle has ended."""
        with self._lock:
            turn.ended = self._clock()

    def finalize(self, turn: Turn) -> None:
        """Notes a finalization; the first one of a new wave acknowledges the messages of the wave before."""
        with self._lock:
            now = self._clock()
            turn.finalized = now
            if turn.ended <= self._wave_began or self._turns.get(turn.number) is not turn:
                return
            self._wave_began = now
            done = [number for number, each in self._turns.items() if each.finalized <= now - _SETTLE_SECONDS]
            ids = [each for number in done for each in self._turns.pop(number).ids]
        self._acknowledge(ids)
