"""The interface of a sink: a transform that takes all results of a job, and checks its destination before the job starts.

Adding a sink (a table, a queue, another format) is one module with a `Sink` in it, its section in the config, and its line in
`graph.sinks`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import apache_beam as beam

from pipeline.records import DeadLetter, DetectedImage
from pipeline.stats.summary import JobStats


class Results(NamedTuple):
    """All results of a job: `read = detected + dead + skipped`.

    Attributes:
      detected: The images with a result.
      dead: The images without one, by the step that failed; separate, since flattening them would break fused steps up.
      counted: Statistics beside the records: images read and skipped.
    """

    detected: beam.PCollection[DetectedImage]
    dead: tuple[beam.PCollection[DeadLetter], ...]
    counted: beam.PCollection[JobStats]


class Sink(beam.PTransform):
    """A destination of results. Element in: `Results`; the job ignores what comes out."""

    def check(self, *, write: bool = True) -> None:
        """Makes sure, before the job starts, that results can be written.

        Args:
          write: False: checks only as far as possible without writing.

        Raises:
          UserError: They cannot; the message says what to change.
        """
        raise NotImplementedError

    def expand(self, results: Results) -> Any:
        """Wires the writing."""
        raise NotImplementedError
