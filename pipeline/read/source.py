"""The interface of a source: a transform that outputs encoded images, counts them, and checks its input before the job starts.

Adding one (a table, an archive, another queue) is one module with a `Source` in it, its section in the config, and its line in
`graph.source_of`.
"""

from __future__ import annotations

from typing import NamedTuple

import apache_beam as beam

from pipeline.records import DeadLetter, EncodedImage
from pipeline.stats.summary import JobStats


class ReadOutputs(NamedTuple):
    """The outputs of a source. Each distinct image is in `images` or `dead`.

    Attributes:
      images: Images that were read.
      dead: Images that could not be read.
      counted: How many were read and skipped; `read` counts all three kinds.
    """

    images: beam.PCollection[EncodedImage]
    dead: beam.PCollection[DeadLetter]
    counted: beam.PCollection[JobStats]


class Source(beam.PTransform):
    """A place that images come from. Outputs: `ReadOutputs`; bounded."""

    def check(self) -> None:
        """Checks before the job starts that there is an input, and reads no further.

        Raises:
          UserError: There is none; the message says what to change.
        """
        raise NotImplementedError

    def expand(self, begin: beam.pvalue.PBegin) -> ReadOutputs:
        """Wires the reading. Image bytes should pass no shuffle."""
        raise NotImplementedError
