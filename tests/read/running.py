"""Runs a pipeline, and gives what its collections hold."""

import functools

import apache_beam as beam
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that

from pipeline.read.read_ahead import ReadAhead

KEPT = {}


def keep(name, elements):
    """Of this module, not of a closure, so that Beam pickles it by name and it fills this very dict."""
    KEPT[name] = list(elements)


def run(transform_of):
    """Runs a pipeline; gives what `transform_of(pipeline)`'s named outputs hold."""
    KEPT.clear()
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        outputs = {name: each[0] if name == "expected" else each for name, each in transform_of(pipeline).items()}
        for name, collection in outputs.items():
            assert_that(collection, functools.partial(keep, name), label=f"Keep{name}")
    return dict(KEPT)


def images_read(pipeline, source, **settings):
    """The outputs of `ReadImages`, with all images read."""
    found = pipeline | source
    reading = beam.ParDo(ReadAhead(source.read, **settings))
    images, unread = found.images | reading.with_outputs("dead", main="images")
    return {"images": images, "dead": (found.dead, unread) | "AllDead" >> beam.Flatten(), "counted": found.counted}
