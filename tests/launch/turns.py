"""Measures, in a process of its own, how many bytes a turn of a stream leaves behind in Beam's in-memory runner.

Its argument: the number of turns.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from typing import Any

import apache_beam as beam
from apache_beam.runners.worker.statesampler import StateSampler

from pipeline.launch.in_memory import InMemoryRunner
from pipeline.stream.pubsub import _Endless

KEPT: list[int] = []


class Turns(beam.DoFn):
    """Comes again as often as its element says, each time in a bundle of its own; notes halfway and at the end what is in use."""

    @beam.DoFn.unbounded_per_element()
    def process(self, turns: int, tracker: Any = beam.DoFn.RestrictionParam(_Endless())):  # noqa: B008
        turn = tracker.current_restriction()
        tracker.try_claim(turn)
        yield turn
        if turn in (turns // 2, turns):
            gc.collect()
            KEPT.append(tracemalloc.get_traced_memory()[0])
        if turn < turns:
            tracker.defer_remainder()


def main(argv: Sequence[str]) -> int:
    """Prints the number of bytes."""
    turns = int(argv[0])
    StateSampler.__init__.__defaults__ = (1,)  # Beam waits for that thread at the end of each bundle
    tracemalloc.start()
    with beam.Pipeline(runner=InMemoryRunner()) as pipeline:
        begin = pipeline | "Begin" >> beam.Create([turns], reshuffle=False)
        _ = begin | "Turns" >> beam.ParDo(Turns()).with_output_types(int)
    halfway, end = KEPT
    print((end - halfway) / (turns - turns // 2))
    return 0
