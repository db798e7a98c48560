"""A short run over mutated images, and the cases that ever failed."""

import pytest

from tests.decoding_process import DecodingProcess
from tests.fuzz import images
from tests.fuzz.image_seeds import seeds


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
