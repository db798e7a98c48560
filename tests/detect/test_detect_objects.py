"""What RunInference waits for at once: many small images or few large ones."""

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that, equal_to

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.detect_objects import DetectorHandler, StartedImage
from pipeline.records import EncodedImage, ImageRef


@pytest.mark.parametrize(
    ("kilobytes", "settings", "requests"),
    [
        pytest.param(1, {}, [64, 64, 22], id="small images: by their number"),
        pytest.param(4_000, {}, [16] * 9 + [6], id="large images: by the bytes that the detector may hold"),
        pytest.param(4_000, {"request_mb": 8.0}, [2] * 75, id="fewer bytes"),
        pytest.param(4_000, {"request_mb": 1.0}, [1] * 150, id="one image always passes"),
        pytest.param(1, {"request_images": 50}, [50] * 3, id="fewer images"),
    ],
)
def test_a_request_is_bounded_by_images_and_by_bytes(kilobytes, settings, requests):
    content = b"x" * (kilobytes * 1000)
    handler = DetectorHandler(ModelConfig("digits"), DetectConfig(**settings))
    with beam.Pipeline() as pipeline:
        images = pipeline | beam.Create([150]) | beam.FlatMap(lambda n: [StartedImage(EncodedImage(ImageRef("a"), content))] * n)
        sizes = images | beam.BatchElements(**handler.batch_elements_kwargs()) | beam.Map(len)
        assert_that(sizes, equal_to(requests))
