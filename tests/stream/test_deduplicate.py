"""One result for each version of an image, within a time."""

import pickle

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that, equal_to

from pipeline.records import EncodedImage, ImageRef
from pipeline.stream.deduplicate import DropDuplicates, DropDuplicatesInState
from pipeline.stream.run import RunSettings, opened

IMAGES = [EncodedImage(ImageRef(f"gs://b/{n % 7}", str(n % 2)), b"x") for n in range(70)]
DISTINCT = {image.ref.identity for image in IMAGES}


def test_repeats_come_out_apart_from_new_images():
    with opened(RunSettings("repeats")) as run, beam.Pipeline(runner=FnApiRunner()) as pipeline:
        parted = pipeline | beam.Create(IMAGES) | DropDuplicates(run.settings)
        assert_that(parted.new | "New" >> beam.Map(lambda image: image.ref.identity), equal_to(DISTINCT), "CheckNew")
        count = parted.repeats | beam.combiners.Count.Globally()
        assert_that(count, equal_to([len(IMAGES) - len(DISTINCT)]), "CheckRepeats")


def test_runner_state_drops_the_same():
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        new = pipeline | beam.Create(IMAGES) | DropDuplicatesInState(60.0) | beam.Map(lambda image: image.ref.identity)
        assert_that(new, equal_to(DISTINCT))


@pytest.mark.parametrize(
    "transform", [DropDuplicates(RunSettings("run")), DropDuplicatesInState(60.0)], ids=lambda t: type(t).__name__
)
def test_the_transforms_survive_pickling(transform):
    assert pickle.loads(pickle.dumps(transform)) == transform
