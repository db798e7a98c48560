"""TFRecord files: every record is an image or one dead letter, whatever is damaged; and no more than one is held."""

import gzip
import os
import struct

import pytest

from pipeline.listing.names import record_range
from pipeline.listing.tfrecords import images_of_file
from pipeline.records import EncodedImage, ImageRef
from tests.memory import less_memory_than
from tests.tfrecord_files import example, framed, write

LIMIT = 1000


def images(path, **known):
    """What a file holds: (content, uri) of an image, (reason, uri) of a dead letter."""
    found = []
    for image in images_of_file(ImageRef(str(path), **known), LIMIT):
        is_image = isinstance(image, EncodedImage)
        found.append((image.content if is_image else image.reason, image.ref.uri))
        assert is_image or "\n" not in image.message
    return found


def numbered(count):
    return [example(image_encoded=b"%d" % n, image_source_id=b"id-%d" % n) for n in range(count)]


def starts_of(content):
    """Where each record of an undamaged file begins, and where the last ends."""
    starts = [0]
    while starts[-1] < len(content):
        starts.append(starts[-1] + 16 + struct.unpack_from("<Q", content, starts[-1])[0])
    return starts


def test_tfrecord_shards_are_told_by_their_name():
    yes = ["a.tfrecord", "gs://b/a.tfrecords", "a.TFRecord.gz", "a.record", "a.records", "a.tfrecord*", "a.record-?????-of-00010"]
    yes += ["gs://b/a.record-00000-of-00010", "a.tfrecord-00000-of-00010.gz", "a.tfrecord.gz@12-"]
    no = ["tfrecord/a.jpg", "a.tfrecord/a.jpg", "a.jpg", "a.tfrecord.jpg", "a.record-1.jpg", "record", "a.recording"]
    assert [name for name in (*yes, *no) if record_range(name)] == yes


@pytest.mark.parametrize(
    ("record", "found"),
    [
        pytest.param({"image_encoded": b"x", "image_source_id": b"id", "image_filename": b"name"}, (b"x", "id"), id="source id"),
        pytest.param({"image_encoded": b"x", "image_source_id": b"", "image_filename": b"name"}, (b"x", "name"), id="file name"),
        pytest.param({"image_encoded": b"x", "image_source_id": 7}, (b"x", "7"), id="a number as its name"),
        pytest.param({"image_encoded": b"x", "image_source_id": b"\xff"}, (b"x", "\udcff"), id="a name that is no UTF-8"),
        pytest.param({"image_encoded": (b"x", b"y"), "image_source_id": ()}, (b"x", "tfrecord:2d711642b726b044"), id="no name"),
        pytest.param({"image_encoded": b"", "image_source_id": b"id"}, (b"", "id"), id="empty, which decoding refuses"),
        pytest.param({"image_encoded": ()}, "no_image", id="no value"),
        pytest.param({"image_source_id": b"id"}, ("no_image", "id"), id="no such key"),
        pytest.param({"image_encoded": 5}, "no_image", id="a number"),
    ],
)
def test_what_an_example_holds_is_an_image_or_one_dead_letter(tmp_path, record, found):
    path = write(tmp_path / "a.tfrecord", example(**record), *numbered(1))
    first, neighbour = images(path)
    assert neighbour == (b"0", "id-0")
    assert first == found if isinstance(found, tuple) else first == (found, f"{path}@0-{16 + len(example(**record))}")


@pytest.mark.parametrize("record", [b"no example", b"\x0a\xff", os.urandom(200)], ids=["text", "cut", "noise"])
def test_a_record_that_is_no_example_is_one_dead_letter(tmp_path, record):
    good = numbered(2)
    path = write(tmp_path / "a.tfrecord", good[0], record, good[1])
    start = 16 + len(good[0])
    assert images(path) == [(b"0", "id-0"), ("no_example", f"{path}@{start}-{start + 16 + len(record)}"), (b"1", "id-1")]


def test_damaged_content_costs_its_own_record(tmp_path):
    """One bit, in the content or in its checksum."""
    path = write(tmp_path / "a.tfrecord", *numbered(4))
    content = bytearray(path.read_bytes())
    starts = starts_of(content)
    content[starts[1] + 20] ^= 1
    content[starts[4] - 1] ^= 1
    path.write_bytes(content)
    assert images(path) == [
        (b"0", "id-0"),
        ("bad_checksum", f"{path}@{starts[1]}-{starts[2]}"),
        (b"2", "id-2"),
        ("bad_checksum", f"{path}@{starts[3]}-{starts[4]}"),
    ]


def test_behind_a_damaged_length_the_rest_is_one_dead_letter_that_says_how_much(tmp_path):
    path = write(tmp_path / "a.tfrecord", *numbered(4))
    content = bytearray(path.read_bytes())
    start = starts_of(content)[2]
    content[start] ^= 1
    path.write_bytes(content)
    *good, rest = images_of_file(ImageRef(str(path)), LIMIT)
    assert [image.ref.uri for image in good] == ["id-0", "id-1"]
    assert (rest.stage, rest.reason, rest.ref.uri) == ("read", "broken_file", f"{path}@{start}-")
    assert f"its last {len(content) - start} of {len(content)} bytes cannot be read" in rest.message


def test_a_file_that_ends_within_a_record_loses_that_one(tmp_path):
    """Wherever it was cut: within the length, the content, or the checksum."""
    path = write(tmp_path / "a.tfrecord", *numbered(2))
    content = path.read_bytes()
    start = starts_of(content)[1]
    for end in range(start + 1, len(content)):
        path.write_bytes(content[:end])
        assert images(path) == [(b"0", "id-0"), ("broken_file", f"{path}@{start}-")]


def test_a_gzipped_file_that_ends_too_early_loses_what_lies_behind(tmp_path):
    records = [example(image_encoded=os.urandom(200), image_source_id=b"id-%d" % n) for n in range(200)]
    path = write(tmp_path / "a.tfrecord.gz", *records, options="GZIP")
    path.write_bytes(path.read_bytes()[:20_000])
    *good, rest = images_of_file(ImageRef(str(path)), LIMIT)
    assert [image.ref.uri for image in good] == [f"id-{n}" for n in range(len(good))]
    assert 50 < len(good) < 200
    lost_from = sum(16 + len(record) for record in records[: len(good)])
    assert (rest.reason, rest.ref.uri) == ("broken_file", f"{path}@{lost_from}-")
    assert "all that is gzipped behind it cannot be read" in rest.message


def test_a_record_above_the_limit_is_passed_over_without_taking_its_bytes(tmp_path):
    """Also one that says it is an exabyte."""
    large, small = example(image_encoded=bytes(30_000_000), image_source_id=b"large"), numbered(1)[0]
    path = write(tmp_path / "a.tfrecord", large, small)
    with open(path, "ab") as file:
        file.write(framed(b"", 1 << 60))
    end = 16 + len(large)
    with less_memory_than(1_000_000):
        found = images(path)
    last = end + 16 + len(small)
    assert found == [("too_large_file", f"{path}@0-{end}"), (b"0", "id-0"), ("broken_file", f"{path}@{last}-")]


@pytest.mark.parametrize("options", [None, "GZIP"])
def test_each_record_is_an_image_and_a_range_reads_some_of_them_also_of_a_gzipped_file_under_any_name(tmp_path, options):
    """The range is that of a dead letter whose records were fixed."""
    assert images(write(tmp_path / "none.tfrecord", options=options)) == []
    path = write(tmp_path / "a.tfrecord", *numbered(4), options=options)
    assert images(path) == [(b"%d" % n, f"id-{n}") for n in range(4)]
    starts = starts_of(gzip.decompress(path.read_bytes()) if options else path.read_bytes())
    assert images(f"{path}@{starts[1]}-{starts[2]}") == [(b"1", "id-1")]
    assert images(f"{path}@{starts[2]}-") == [(b"2", "id-2"), (b"3", "id-3")]


def test_a_file_that_is_no_tfrecord_or_cannot_be_opened_is_one_dead_letter(tmp_path):
    path = tmp_path / "a.record"
    for content in (bytes(100), b"\xff\xd8\xff\xe0" + bytes(50), b"short"):
        path.write_bytes(content)
        assert images(path) == [("broken_file", f"{path}@0-")]
    path.unlink()
    os.mkfifo(path)  # nobody writes into it
    assert images(path) == [("not_a_file", f"{path}")]


def test_a_file_is_read_record_by_record(tmp_path):
    """Sixty images of 1 MB, of which one is held."""
    path = write(tmp_path / "a.tfrecord", *[example(image_encoded=bytes(1_000_000))] * 60)
    with less_memory_than(10_000_000):
        assert sum(1 for _ in images_of_file(ImageRef(str(path)), 2_000_000)) == 60


def test_an_image_that_is_named_by_a_signed_address_has_its_public_name(tmp_path):
    signed = b"https://me:hunter2@host/a.jpg?sig=hunter2"
    path = write(tmp_path / "a.tfrecord", example(image_encoded=b"x", image_source_id=signed), example(image_source_id=signed))
    assert images(path) == [(b"x", "https://host/a.jpg"), ("no_image", "https://host/a.jpg")]
