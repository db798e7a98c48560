"""What a batch job imports on its way; imported once, for all that are forked afterwards."""

import tensorflow  # noqa: F401
from apache_beam.runners.direct import direct_runner  # noqa: F401

import pipeline.compact
import pipeline.detect.load_model
import pipeline.launch.batch
import pipeline.launch.in_memory
import pipeline.report.page
import pipeline.run  # noqa: F401
