"""Leaving out what is done: listing and ledger meet by name and generation, in the pipeline."""

import os

import pytest
from pipeline.results.ledger import list_files_of_rows
from pipeline.storage.spill_files import SpillFile

from pipeline.config import ReadConfig
from pipeline.read import only_new
from pipeline.read.only_new import PARTITIONS, CompletedKeys, KeyBlocks, keys_completed, packed_key, partition_of
from pipeline.read.read_images import ReadImages
from pipeline.records import ImageRef, dead_letter_row, row_bytes
from pipeline.results.completion import CompletionRule
from pipeline.stats.summary import merge_stats
from pipeline.storage.listing_backends import generation_of
from tests.ledger_rows import ARCHIVED, DEAD, DETECTIONS, MAKER, dead, detected, write
from tests.read.running import run


@pytest.fixture(params=["local", "gs"])
def places(request, tmp_path):
    """Folder of the images, folder of the results, and what puts an image there: local, or on Cloud Storage."""
    if request.param == "local":
        (tmp_path / "in").mkdir()

        def put(name, content=b"x"):
            (tmp_path / "in" / name).write_bytes(content)
            return f"{tmp_path}/in/{name}"

        return f"{tmp_path}/in/", f"{tmp_path}/out", put
    bucket = request.getfixturevalue("gcs_bucket")

    def put_object(name, content=b"x"):
        bucket.blob(f"in/{name}").upload_from_string(content)
        return f"gs://{bucket.name}/in/{name}"

    return f"gs://{bucket.name}/in/", f"gs://{bucket.name}/out", put_object


def read(inputs, output, done=None):
    """What is read of an input: (names, images read, skipped, of these done before)."""
    got = run(lambda pipeline: (pipeline | ReadImages(inputs, exclude=output, done=done or CompletionRule(MAKER)))._asdict())
    counted = merge_stats(got["counted"], 0)
    assert counted.read == len(got["images"]) + len(got["dead"]) + counted.skipped
    names = [image.ref.uri.rpartition("/")[2] for image in got["images"]]
    return sorted(names), counted.read, counted.skipped, counted.done


def write_records(path, *names):
    """Writes a TFRecord file of images that are called by what they hold."""
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path)) as writer:
        for name in names:
            values = {"image/encoded": name, "image/source_id": name}
            named = {key: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value])) for key, value in values.items()}
            writer.write(tf.train.Example(features=tf.train.Features(feature=named)).SerializeToString())


@pytest.mark.slow
def test_with_an_empty_ledger_everything_is_new(places):
    folder, output, put = places
    put("a.jpg")
    assert read([folder], output) == (["a.jpg"], 1, 0, 0)


@pytest.mark.slow
def test_what_has_a_row_of_a_batch_job_a_stream_or_a_dead_letter_for_good_is_skipped_and_counted(places):
    folder, output, put = places
    uris = {name: put(name) for name in ("batch.jpg", "stream.jpg", "dead.jpg", "passing.jpg", "other.jpg", "new.jpg")}
    now = {name: generation_of(uri) for name, uri in uris.items()}
    write(output, DETECTIONS, [detected(uris["batch.jpg"], now["batch.jpg"])])
    write(output, ARCHIVED, [detected(uris["stream.jpg"], now["stream.jpg"]), detected(uris["other.jpg"], "1", "other")])
    write(
        output,
        DEAD,
        [dead(uris["dead.jpg"], now["dead.jpg"]), dead(uris["passing.jpg"], now["passing.jpg"], "unreadable", "read")],
    )
    assert read([folder], output) == (["new.jpg", "other.jpg", "passing.jpg"], 6, 3, 3)
    assert read([folder], output, CompletionRule(MAKER, frozenset())) == (
        ["dead.jpg", "new.jpg", "other.jpg", "passing.jpg"],
        6,
        2,
        2,
    )
    assert read([folder], output, CompletionRule(MAKER._replace(version="4")))[3] == 0
    assert read([folder], output, CompletionRule(MAKER._replace(detections="cccccccc")))[3] == 1
    known = CompletedKeys.of(output, CompletionRule(MAKER))
    assert [name for name, uri in uris.items() if ImageRef(uri, now[name]) in known] == ["batch.jpg", "stream.jpg", "dead.jpg"]


@pytest.mark.slow
def test_an_image_that_is_too_large_is_refused_once(places):
    """Its dead letter says which version that was, though nobody read it; a version that is small enough is read."""
    folder, output, put = places
    limit = ReadConfig(max_file_mb=0.001)
    put("a.jpg", bytes(2000))
    got = run(lambda pipeline: (pipeline | ReadImages([folder], limit))._asdict())
    (letter,) = got["dead"]
    assert (letter.reason, letter.ref.generation) == ("too_large_file", generation_of(letter.ref.uri))
    write(output, DEAD, [row_bytes(dead_letter_row(letter)) + b"\n"])
    assert read([folder], output) == ([], 1, 1, 1)
    put("a.jpg")
    assert read([folder], output) == (["a.jpg"], 1, 0, 0)


@pytest.mark.slow
def test_an_image_that_was_overwritten_is_new(places):
    folder, output, put = places
    uri = put("a.jpg")
    write(output, DETECTIONS, [detected(uri, generation_of(uri))])
    assert read([folder], output) == ([], 1, 1, 1)
    put("a.jpg", b"another version")
    assert read([folder], output) == (["a.jpg"], 1, 0, 0)


def test_an_image_that_a_manifest_names_is_asked_for_its_generation_where_it_may_be_done(places, tmp_path, monkeypatch):
    folder, output, put = places
    done, overwritten, new = put("done.jpg"), put("overwritten.jpg"), put("new.jpg")
    write(output, DETECTIONS, [detected(done, generation_of(done)), detected(overwritten, "1"), detected(f"{folder}gone.jpg")])
    manifest = tmp_path / "m.txt"
    manifest.write_text("\n".join([done, overwritten, new, done, f"{folder}gone.jpg"]))
    asked = []
    monkeypatch.setattr(only_new, "generation_of", lambda uri: asked.append(uri) or generation_of(uri))
    got = run(lambda pipeline: (pipeline | ReadImages([str(manifest)], exclude=output, done=CompletionRule(MAKER)))._asdict())
    counted = merge_stats(got["counted"], 0)
    assert sorted(image.ref.uri for image in got["images"]) == sorted([overwritten, new])
    assert [letter.reason for letter in got["dead"]] == ["not_found"]
    assert (counted.read, counted.skipped, counted.done) == (5, 2, 1)
    assert sorted(asked) == sorted([done, overwritten, f"{folder}gone.jpg"])


@pytest.mark.slow
def test_rows_whose_settings_are_not_known_are_not_taken_for_done(places):
    folder, output, put = places
    uri = put("a.jpg")
    write(output, DETECTIONS, [detected(uri, generation_of(uri))], provenance=None)
    assert read([folder], output) == (["a.jpg"], 1, 0, 0)


@pytest.mark.slow
def test_images_in_tfrecord_files_are_left_out_by_their_content(tmp_path):
    write_records(tmp_path / "a.tfrecord", b"one", b"two")
    inputs, output = [f"{tmp_path}/a.tfrecord"], f"{tmp_path}/out"
    everything = run(lambda pipeline: (pipeline | ReadImages(inputs))._asdict())["images"]
    (one,) = [image.ref for image in everything if image.ref.uri == "one"]
    write(output, DETECTIONS, [detected("one", one.generation), detected("two", "of other content")])
    assert read(inputs, output) == (["two"], 2, 1, 1)


def test_keys_are_spread_over_the_partitions_where_their_images_are(tmp_path):
    refs = [ImageRef(f"{n}.jpg", "1") for n in range(100)]
    for number in range(10):
        some = [detected(ref.uri, ref.generation) for ref in refs[number::10]]
        write(tmp_path, DETECTIONS.replace("00000-of-00001", f"{number:05d}-of-00010"), some)
    blocks = KeyBlocks(10)
    spread = [*blocks.add(keys_completed(list_files_of_rows(str(tmp_path)), CompletionRule(MAKER))), *blocks.flush()]
    found = sorted((partition, block[n : n + 16]) for partition, block in spread for n in range(0, len(block), 16))
    assert found == sorted((partition_of(ref.uri), packed_key(ref)) for ref in refs)
    assert max(partition for partition, _ in spread) < PARTITIONS
    assert list(blocks.flush()) == []


@pytest.mark.slow
def test_the_generation_of_a_file_is_that_of_the_listing_and_of_the_row(tmp_path):
    (tmp_path / "a[1]*.jpg").write_bytes(b"x")
    (found,) = run(lambda pipeline: (pipeline | ReadImages([str(tmp_path)]))._asdict())["images"]
    assert generation_of(found.ref.uri) == found.ref.generation != ""
    os.mkdir(tmp_path / "deep")
    assert [generation_of(f"{tmp_path}/{name}") for name in ("absent.jpg", "deep")] == ["", ""]


@pytest.mark.slow
class TestResumed:
    """What a killed run of the same command has spilled is not read again, and counts as read."""

    @pytest.fixture
    def spill(self, tmp_path):
        def make(*lines):
            content = b"".join(sorted(lines))
            (tmp_path / "spill").write_bytes(b"another one" + content + b"what is told of them")
            return [SpillFile(f"{tmp_path}/spill", len(lines), len(b"another one"), len(content))]

        return make

    def read(self, inputs, resumed, **settings):
        got = run(lambda pipeline: (pipeline | ReadImages(inputs, resumed=resumed, **settings))._asdict())
        counted = merge_stats(got["counted"], 0)
        names = sorted(image.ref.uri.rpartition("/")[2] for image in got["images"])
        return names, counted.read - counted.skipped - len(got["dead"]) - len(names), counted.skipped

    def test_its_images_are_left_out_whatever_became_of_them(self, places, spill):
        folder, _, put = places
        uris = {name: put(name) for name in ("resumed.jpg", "overwritten.jpg", "dead.jpg", "new.jpg")}
        resumed = spill(
            detected(uris["resumed.jpg"], generation_of(uris["resumed.jpg"])),
            detected(uris["overwritten.jpg"], "1"),
            detected(f"{folder}gone.jpg"),
            dead(uris["dead.jpg"], "", "unreadable", "read"),
        )
        assert self.read([folder], resumed) == (["new.jpg"], 4, 0)
        assert self.read([folder, uris["resumed.jpg"]], resumed) == (["new.jpg"], 4, 1)

    def test_an_image_that_is_done_and_begun_is_counted_once(self, places, spill):
        folder, output, put = places
        uri = put("a.jpg")
        row = detected(uri, generation_of(uri))
        write(output, DETECTIONS, [row])
        assert self.read([folder], spill(row), exclude=output, done=CompletionRule(MAKER)) == ([], 1, 0)

    def test_images_in_tfrecord_files_are_known_by_name_and_content(self, tmp_path, spill):
        write_records(tmp_path / "a.tfrecord", b"one", b"two")
        (tmp_path / "a.jpg").write_bytes(b"x")
        inputs = [f"{tmp_path}/a.tfrecord", f"{tmp_path}/a.jpg"]
        everything = run(lambda pipeline: (pipeline | ReadImages(inputs))._asdict())["images"]
        (one,) = [image.ref for image in everything if image.ref.uri == "one"]
        assert self.read(inputs, spill(detected("one", one.generation))) == (["a.jpg", "two"], 1, 0)

    def test_a_tfrecord_file_that_could_not_be_opened_is_not_opened_again(self, tmp_path, spill):
        write_records(tmp_path / "a.tfrecord", b"one")
        resumed = spill(dead(f"{tmp_path}/a.tfrecord", "", "unreadable", "read"))
        assert self.read([f"{tmp_path}/a.tfrecord"], resumed) == ([], 1, 0)
