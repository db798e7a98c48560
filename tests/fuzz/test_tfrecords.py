"""Whatever a TFRecord file is: each record is an image or a dead letter, and what lies before the damage is untouched."""

import gzip
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.failures import REASONS
from pipeline.listing.tfrecords import images_of_file
from pipeline.records import EncodedImage, ImageRef, dead_letter_row, row_bytes
from tests.memory import less_memory_than
from tests.tfrecord_files import feature, framed
from tests.without_keras import tf

LIMIT = 5000

lists = (st.lists(each, max_size=3) for each in (st.binary(max_size=40), st.integers(-9, 9), st.floats(width=32)))
values = st.one_of(*lists).map(lambda some: feature(*some)) | st.just(tf.train.Feature())
keys = st.sampled_from(["image/encoded", "image/source_id", "image/filename", "image/height"]) | st.text(max_size=5)
examples = st.dictionaries(keys, values, max_size=4).map(
    lambda named: tf.train.Example(features=tf.train.Features(feature=named)).SerializeToString()
)

records = st.one_of(  # with whether their length is true
    examples.map(lambda content: (framed(content), True)),
    st.binary(max_size=60).map(lambda content: (framed(content), True)),
    st.tuples(st.binary(max_size=30), st.integers(0, 2**64 - 1) | st.integers(0, 60)).map(lambda lie: (framed(*lie), False)),
    st.just((framed(bytes(LIMIT + 1)), True)),
)


# a place as a share of the file, how many bytes go there, what comes instead
damages = st.tuples(st.floats(0, 1), st.integers(0, 20), st.binary(max_size=20) | st.binary(max_size=300))


def found_in(path):
    found = list(images_of_file(ImageRef(str(path)), LIMIT))
    for image in found:
        if isinstance(image, EncodedImage):
            assert image.ref.uri and image.ref.generation
        else:
            assert image.reason in REASONS[image.stage]
            assert len(image.message.splitlines()) == 1
            assert row_bytes(dead_letter_row(image))
    return [(image.ref.uri, getattr(image, "content", None), getattr(image, "reason", "")) for image in found]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("records") / "a.tfrecord"


@given(st.lists(records, max_size=5), st.lists(damages, max_size=3), st.booleans())
@example([], [(0.0, 0, b"\x1f\x8b")], False)
@example([], [(0.0, 0, b"\x1f\x8b\x08" + bytes(200))], False)
@example([(framed(b""), True)], [], True)
@example([(framed(b"", 2**64 - 1), False)], [], True)
@example([(framed(b"", 2**63), False)], [], False)
@example([(framed(b"", 6), False), (framed(b""), True)], [(0.5, 3, b"")], False)
def test_a_file_is_images_and_dead_letters(path, parts, damaged, zipped):
    whole = content = b"".join(part for part, _ in parts)
    first = len(content)
    for share, cut, put_in in damaged:
        at = int(share * len(content))
        content = content[:at] + put_in + content[at + cut :]
        first = min(at, first)
    path.write_bytes(gzip.compress(content, 1) if zipped else content)
    found = found_in(path)
    assert len(found) <= len(content) // 16 + 1

    ends = itertools.accumulate(len(part) for part, _ in parts)
    untouched = sum(itertools.takewhile(bool, (true and end <= first for (_, true), end in zip(parts, ends, strict=True))))
    path.write_bytes(whole)
    assert found[:untouched] == found_in(path)[:untouched], "what lies before the damage"


@pytest.mark.parametrize("length", [2**60, LIMIT])
def test_a_lie_about_a_length_takes_no_memory(path, length):
    """An exabyte, or all that the limit allows."""
    for content in (framed(b"", length), gzip.compress(framed(b"", length))):
        path.write_bytes(content)
        found_in(path)
        with less_memory_than(10_000_000):
            assert [reason for *_, reason in found_in(path)] == ["broken_file"]
