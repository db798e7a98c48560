"""What a source is: a transform that gives encoded images, counts them, and checks its own place before the job starts.

Adding one (a table, an archive, another queue) is one module with a `Source` in it, its section in the config, and its line in
`graph.source_of`.
"""

from __future__ import annotations

from typing import NamedTuple

import apache_beam as beam

from pipeline.records import DeadLetter, EncodedImage
from pipeline.stats.summary import JobStats


class ReadOutputs(NamedTuple):
    """The outputs of a source: each image that it names is in one of the first two, or was named more than once.

    Attributes:
      images: Those that could be read.
      dead: Those that could not.
      counted: How many were read and skipped; `read` counts all three kinds.
      expected: One number, known before an image is read: about how many of them there are; empty where nobody knows.
    """

    images: beam.PCollection[EncodedImage]
    dead: beam.PCollection[DeadLetter]
    counted: beam.PCollection[JobStats]
    expected: tuple[beam.PCollection[int], ...] = ()


class Source(beam.PTransform):
    """A place that images come from. Element out: as `ReadOutputs` has them; bounded."""

    def check(self) -> None:
        """Makes sure, before the job starts, that there is something to read, looking no further than that.

        Raises:
          UserError: There is not; the message says what to change.
        """
        raise NotImplementedError

    def expand(self, begin: beam.pvalue.PBegin) -> ReadOutputs:
        """Wires the reading. What it gives should pass no shuffle with its bytes."""
        raise NotImplementedError
