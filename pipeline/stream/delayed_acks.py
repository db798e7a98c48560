"""When what a puller took may be acknowledged, on a runner that finalizes early: one checkpoint later.

Flink finalizes all bundles that have ended when a checkpoint completes, also those that ended after it began and that only the
next one holds (the bundle finalization of Beam's `ExecutableStageDoFnOperator`). A crash before the next would lose them, if
their messages were acknowledged by then. So what comes to be finalized together is a wave, and it is acknowledged when the next
wave begins; even a puller that finds nothing has a bundle, so there always is a next one. This needs one checkpoint at a time.

Where the job falls back to a checkpoint, and this process outlives that, the puller comes back with a turn that it had before:
what it took in earlier turns the checkpoint holds, what it took since nobody has any more.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

# of two finalizations within this time either may be of the same wave; checkpoints that come closer are taken for one
_SETTLE_SECONDS = 1.0


class AckDecision(NamedTuple):
    """Ids of messages: those that a checkpoint holds for good, and those that were lost with what followed it."""

    held: Sequence[str] = ()
    lost: Sequence[str] = ()


@dataclasses.dataclass
class Turn:
    """One turn of a puller: its number, what it took, when its bundle ended, and when that was finalized."""

    number: int
    ids: Sequence[str]
    ended: float = math.inf
    finalized: float = math.inf


class DelayedAcks:
    """The turns of one puller in this process that are not acknowledged yet; thread-safe.

    Args:
      clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._turns: dict[int, Turn] = {}
        self._wave_began = -math.inf

    def begin(self, number: int, ids: Sequence[str]) -> tuple[Turn, AckDecision]:
        """Begins a turn that took these; where it was begun before, the job has fallen back, which settles the earlier ones."""
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
        """Takes part in a wave; gives what may be acknowledged: all of the wave before, where this is the first of a new one."""
        with self._lock:
            now = self._clock()
            turn.finalized = now
            if turn.ended <= self._wave_began or self._turns.get(turn.number) is not turn:
                return ()
            self._wave_began = now
            done = [number for number, each in self._turns.items() if each.finalized <= now - _SETTLE_SECONDS]
            return [each for number in done for each in self._turns.pop(number).ids]
