"""A short run over mutated images, the cases that ever failed, and that the fuzzing itself would notice."""

import pytest

from tests.decoding_process import DecodingProcess
from tests.fuzz import images
from tests.fuzz.image_seeds import seeds
from tests.hostile_images import jpeg_of_many_scans


@pytest.fixture(scope="module")
def process():
    with DecodingProcess(images.MAX_PIXELS) as process:
        yield process


def test_mutated_images_end_as_pixels_or_as_one_reason(process):
    """No damage to an image crashes the decoder or takes longer or more memory than it may."""
    for number in range(600):
        _, content = images.make_case(0, number)
        assert images.problem(content, process.decode(content)) == "", number


@pytest.mark.parametrize("path", sorted(images.CORPUS.glob("*.bin")), ids=lambda path: path.stem)
def test_what_once_failed_does_not_fail_again(process, path):
    """Images that earlier runs of `make fuzz` have found."""
    content = path.read_bytes()
    assert images.problem(content, process.decode(content)) == ""


def test_every_seed_is_an_image(process):
    assert {process.decode(content).end for contents in seeds().values() for content in contents} == {"pixels"}


def test_an_image_that_takes_too_long_ends_its_process_and_not_the_run():
    slow = jpeg_of_many_scans((1000, 1000), 4000)
    with DecodingProcess(seconds=0.1) as process:
        outcome = process.decode(slow)
        assert (outcome.end, outcome.message) == ("too_much_work", "SIGPROF")
        assert process.decode(b"").end == "empty"
