"""What a sink is: a transform that takes everything a job found out, and checks its own place before the job starts.

Adding one (a table, a queue, another format) is one module with a `Sink` in it, its section in the config, and its line in
`graph.sinks`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import apache_beam as beam

from pipeline.records import DeadLetter, DetectedImage
from pipeline.stats.summary import JobStats


class Results(NamedTuple):
    """Everything that a job finds out: `read = detected + dead + skipped`.

    Attributes:
      detected: The images with a result.
      dead: The images without one, by the steps that gave them up; parts, since to flatten them would break fused steps up.
      counted: What was counted beside the records themselves: images read and skipped.
      expected: One number, known before there are records: about how many there will be; empty where nobody knows.
    """

    detected: beam.PCollection[DetectedImage]
    dead: tuple[beam.PCollection[DeadLetter], ...]
    counted: beam.PCollection[JobStats]
    expected: tuple[beam.PCollection[int], ...] = ()


class Sink(beam.PTransform):
    """A place where results go. Element in: `Results`; whatever comes out is left alone."""

    def check(self, *, write: bool = True) -> None:
        """Makes sure, before the job starts, that results can go there.

        Args:
          write: False: only as far as that can be told without leaving a trace.

        Raises:
          UserError: They cannot; the message says what to change.
        """
        raise NotImplementedError

    def expand(self, results: Results) -> Any:
        """Wires the writing."""
        raise NotImplementedError
