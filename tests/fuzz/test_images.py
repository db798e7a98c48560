"""A short run over mutated images, the cases that ever failed, and that the fuzzing itself would notice."""

import pytest

from tests.decoding_process import DecodingProcess, Outcome
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


def test_a_case_is_the_same_each_time_and_cases_differ():
    """Its number is enough to repeat a case."""
    cases = [images.make_case(3, number) for number in range(50)]
    assert cases == [images.make_case(3, number) for number in range(50)]
    assert len({content for _, content in cases}) > 45


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        (Outcome("pixels", seconds=0.4), ""),
        (Outcome("corrupt"), ""),
        (Outcome("error", "KeyError"), "ended as error: KeyError"),
        (Outcome("program", "os.system"), "ended as program: os.system"),
        (Outcome("decoder_died", "ended with SIGSEGV"), ""),
        (Outcome("decoder_died", "ended with exit code 1"), "ended as decoder_died: ended with exit code 1"),
        (Outcome("too_much_work", seconds=5.0), "ended as too_much_work: took 5.00 s of CPU"),
        (Outcome("pixels", megabytes=600), "took 600 MB, at most 500 are allowed"),
    ],
)
def test_what_must_not_be_is_complained_about(outcome, complaint):
    """The check itself finds what it is there to find."""
    assert images.problem(b"", outcome) == complaint


def test_an_image_that_takes_too_long_ends_its_process_and_not_the_run():
    slow = jpeg_of_many_scans((1000, 1000), 4000)
    with DecodingProcess(seconds=0.1) as process:
        outcome = process.decode(slow)
        assert (outcome.end, outcome.message) == ("too_much_work", "SIGPROF")
        assert process.decode(b"").end == "empty"
