"""Runs a pipeline, and gives what its collections hold."""

import contextlib
import functools

import apache_beam as beam
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that

from pipeline.read.fetch import CircuitBreaker, read_image
from pipeline.read.prefetch import Prefetcher
from pipeline.records import DeadLetter

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


def read_now(image, max_bytes, breaker):
    """An image, or its dead letter, as a feeder process reads it."""
    ahead = Prefetcher(lambda read: read_image(read, max_bytes, breaker), threads=1, most_bytes=64e6)
    with contextlib.closing(ahead):
        return ahead.begin([image])[0].result.result()


def images_read(pipeline, source, retry_seconds=60.0):
    """The outputs of `ReadImages`, with all images read."""
    max_bytes = source.read.max_file_bytes

    def read(image):
        found = read_now(image, max_bytes, CircuitBreaker(retry_seconds))
        return [beam.pvalue.TaggedOutput("dead", found) if isinstance(found, DeadLetter) else found]

    found = pipeline | source
    images, unread = found.images | beam.FlatMap(read).with_outputs("dead", main="images")
    return {"images": images, "dead": (found.dead, unread) | "AllDead" >> beam.Flatten(), "counted": found.counted}
