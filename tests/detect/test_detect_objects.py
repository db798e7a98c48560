"""What StartDetecting starts at once: chunks as large as a batch, bounded by images and by encoded bytes."""

import functools

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.window import FixedWindows, TimestampedValue

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.detect.batcher import Batcher
from pipeline.detect.detect_objects import DetectObjects, DetectorHandler, StartDetecting
from pipeline.detect.engine import FunctionEngine
from pipeline.detect.load_detector import shared_detector
from pipeline.detect.loaded_model import LoadedModel
from pipeline.records import EncodedImage, ImageRef

HW = (8, 16)


def nothing(_detect):
    """A model that finds nothing."""

    def run(pixels):
        return {"boxes": np.zeros((len(pixels), 1, 4), np.float32), "scores": np.zeros((len(pixels), 1), np.float32)}

    engine = FunctionEngine(run, DetectConfig(batch_sizes=(1, 32), concurrent_batches=1))
    return LoadedModel(DetectorMetadata("nothing", HW, "stretch", ()), "1", Batcher(engine, HW))


@pytest.mark.parametrize(
    ("kilobytes", "chunks"),
    [
        pytest.param(1, [32] * 4 + [22], id="small images: by their number"),
        pytest.param(4_000, [16] * 9 + [6], id="large images: by the bytes that the detector may hold"),
        pytest.param(70_000, [1] * 3, id="one image always passes"),
    ],
)
def test_a_chunk_is_bounded_by_images_and_by_bytes(kilobytes, chunks):
    content = b"x" * (kilobytes * 1000)
    starting = StartDetecting(DetectorHandler(functools.partial(shared_detector, nothing, DetectConfig())))
    with beam.Pipeline() as pipeline:
        images = pipeline | beam.Create([sum(chunks)]) | beam.FlatMap(lambda n: [EncodedImage(ImageRef("a"), content)] * n)
        sizes = images | beam.ParDo(starting) | beam.Map(lambda chunk: len(chunk.images))
        assert_that(sizes, equal_to(chunks))


def test_each_result_has_the_window_and_the_time_of_its_image():
    def seen(letter, window=beam.DoFn.WindowParam, time=beam.DoFn.TimestampParam):
        return letter.ref.uri, float(time), float(window.start)

    with beam.Pipeline() as pipeline:
        images = (
            pipeline
            | beam.Create(range(40))
            | beam.Map(lambda n: TimestampedValue(EncodedImage(ImageRef(str(n)), b"no image"), n))
            | beam.WindowInto(FixedWindows(10))
        )
        dead = (images | DetectObjects(nothing)).dead | beam.Map(seen)
        assert_that(dead, equal_to([(str(n), float(n), n // 10 * 10.0) for n in range(40)]))
