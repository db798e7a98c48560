"""Runs a pipeline, and gives what its collections hold."""

import contextlib
import functools

import apache_beam as beam
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that

from pipeline.failures import Failure
from pipeline.feed.prefetch import Prefetcher
from pipeline.feed.read_image import CircuitBreaker, read_image
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


def read_all(refs, max_bytes, breaker):
    """Images, or their dead letters, as a feeder process reads them."""
    ahead = Prefetcher(lambda read: read_image(read, max_bytes, breaker), threads=2, most_bytes=64e6)
    with contextlib.closing(ahead):
        results = [(read.ref, read.result.result()) for read in ahead.begin(refs)]
    return [found.dead_letter(ref) if isinstance(found, Failure) else found for ref, found in results]


def read_now(ref, max_bytes, breaker):
    """One image."""
    return read_all([ref], max_bytes, breaker)[0]


def images_read(pipeline, source, retry_seconds=60.0):
    """The outputs of `ReadImages`, with all images read."""
    max_bytes = source.read.max_file_bytes

    def read(image):
        found = read_now(image, max_bytes, CircuitBreaker(retry_seconds))
        return [beam.pvalue.TaggedOutput("dead", found) if isinstance(found, DeadLetter) else found]

    found = pipeline | source
    images, unread = found.images | beam.FlatMap(read).with_outputs("dead", main="images")
    return {"images": images, "dead": (found.dead, unread) | "AllDead" >> beam.Flatten(), "counted": found.counted}
