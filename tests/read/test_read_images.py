"""Reading: every image that an input names is read once, or is a dead letter, or a double."""

import json
import os

import apache_beam as beam
import pytest

from pipeline.config import ReadConfig
from pipeline.read.read_images import ReadImages
from pipeline.stats.job_stats import merge_stats
from tests.memory import less_memory_than
from tests.read.running import run
from tests.tfrecord_files import example, write

NAMES = ["a.jpg", "b.jpg", "in/a.jpg", "in/deep/a.jpg"]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_listed_image_is_read_or_dead_or_skipped(tree):
    (tree / "m.txt").write_text("a.jpg\nabsent.jpg\na.jpg\n")
    (tree / "in" / "\udcff.jpg").write_text("no UTF-8 in its name")
    (tree / "m.jsonl").write_text(json.dumps(f"{tree}/in/\udcff.jpg"))
    os.mkfifo(tree / "in" / "fifo.jpg")
    (tree / "in" / "large.jpg").write_bytes(bytes(3000))

    step = ReadImages(["a.jpg", "m.txt", "m.jsonl", "in"], ReadConfig(read_threads=2, max_file_mb=0.002))
    got = run(lambda pipeline: (pipeline | step)._asdict())
    contents = {name: name.encode() for name in ("a.jpg", "in/a.jpg", "in/deep/a.jpg")}
    contents["in/\udcff.jpg"] = b"no UTF-8 in its name"
    assert len(got["images"]) == 4
    assert {image.ref.uri.removeprefix(f"{tree}/"): image.content for image in got["images"]} == contents
    assert all(image.ref.generation and image.received_at for image in got["images"])
    assert sorted((letter.ref.uri, letter.stage, letter.reason) for letter in got["dead"]) == [
        (f"{tree}/absent.jpg", "read", "not_found"),
        (f"{tree}/in/fifo.jpg", "read", "not_a_file"),
        (f"{tree}/in/large.jpg", "read", "too_large_file"),
    ]
    counted = merge_stats(got["counted"], 0)
    assert (counted.read, counted.skipped) == (10, 3)
    assert counted.read == len(got["images"]) + len(got["dead"]) + counted.skipped


@pytest.mark.slow
def test_the_bytes_of_tfrecords_are_held_by_no_shuffle(tmp_path):
    """64 MB of records on their way to the next step: a few of them are in memory at a time."""
    write(tmp_path / "large.tfrecord", *[example(image_encoded=bytes(2_000_000))] * 32)

    def build(pipeline):
        read = pipeline | ReadImages([f"{tmp_path}/large.tfrecord"])
        return {"sizes": read.images | beam.Map(lambda image: len(image.content))}

    with less_memory_than(40_000_000):
        sizes = run(build)["sizes"]
    assert sizes == [2_000_000] * 32


def test_a_folder_may_hold_images_and_tfrecord_files(tree):
    """Each file is read as what it is, and one that is named twice once."""
    write("in/b.record-00000-of-00001", example(image_encoded=b"in a record"))
    (tree / "in" / "a.tfrecord.jpg").write_text("an image")
    got = run(lambda pipeline: (pipeline | ReadImages(["in", "in/*.record*"]))._asdict())
    assert sorted(image.content for image in got["images"]) == [b"an image", b"in a record", b"in/a.jpg", b"in/deep/a.jpg"]
    assert got["dead"] == []
    counted = merge_stats(got["counted"], 0)
    assert (counted.read, counted.skipped) == (4, 0)
