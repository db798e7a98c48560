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
from typing import NamedTuple

# finalizations within this time may be of one wave; checkpoints that are closer count as one
_SETTLE_SECONDS = 1.0


class AckDecision(NamedTuple):
    """Ids of messages: those that a checkpoint holds, and those that were lost after it."""

    held: Sequence[str] = ()
    lost: Sequence[str] = ()


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
      clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._turns: dict[int, Turn] = {}
        self._wave_began = -math.inf

    def begin(self, number: int, ids: Sequence[str]) -> tuple[Turn, AckDecision]:
        """Begins a turn with these messages. If its number was begun before, the job fell back, which decides earlier turns."""
        turn = Turn(number, ids)
        with self._lock:
            before, decision = self._turns, AckDecision()
            if before and number <= max(before):
                held = [each for former in before.values() if former.number < number for each in former.ids]
                lost = [each for former in before.values() if former.number >= number for each in former.ids]
                self._turns, decision = {}, AckDecision(held, lost)
            self._turns[number] = turn
            return turn, decision

    def end(self, turn: Turn) -> None:
        """Notes that a turn's bundle has ended."""
        with self._lock:
            turn.ended = self._clock()

    def finalize(self, turn: Turn) -> Sequence[str]:
        """Notes a finalization; the first one of a new wave returns the messages of the wave before, to be acknowledged."""
        with self._lock:
            now = self._clock()
            turn.finalized = now
            if turn.ended <= self._wave_began or self._turns.get(turn.number) is not turn:
                return ()
            self._wave_began = now
            done = [number for number, each in self._turns.items() if each.finalized <= now - _SETTLE_SECONDS]
            return [each for number in done for each in self._turns.pop(number).ids]
