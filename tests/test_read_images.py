"""Listing and reading: every image that an input names is read once, or is a dead letter, or a double."""

import functools
import json
import os

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that
from apache_beam.transforms.window import FixedWindows, TimestampedValue

from pipeline.config import ReadConfig
from pipeline.errors import InputError
from pipeline.read_images import ReadAhead, ReadImages, check_inputs, images_of_examples, is_manifest, is_tfrecord, list_images
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.summary import merge_tallies

TREE = [
    "a.jpg",
    "b.PNG",
    "photo[1].jpg",
    "photo1.jpg",
    "star*.jpg",
    "ä b,c.jpg",
    "in/a.jpg",
    "in/deep/a.jpg",
    ".hidden.jpg",
    ".cache/a.jpg",
    "set [2]/a.jpg",
    "out/samples/a.jpg",
]
SEEN = sorted(name for name in TREE if not name.startswith("."))


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listed(pattern, **options):
    return [os.path.relpath(ref.uri) for ref in list_images(pattern, **options)]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.jpg", ["a.jpg"]),
        ("photo[1].jpg", ["photo[1].jpg"]),
        ("star*.jpg", ["star*.jpg"]),
        ("photo[0-9].jpg", ["photo1.jpg"]),
        ("photo*.jpg", ["photo1.jpg", "photo[1].jpg"]),
        ("?.jpg", ["a.jpg"]),
        ("in", ["in/a.jpg", "in/deep/a.jpg"]),
        ("in/", ["in/a.jpg", "in/deep/a.jpg"]),
        ("./in/", ["in/a.jpg", "in/deep/a.jpg"]),
        ("in/*", ["in/a.jpg"]),
        ("in/**", ["in/a.jpg", "in/deep/a.jpg"]),
        ("in/**/a.jpg", ["in/a.jpg", "in/deep/a.jpg"]),
        ("in/**/deep/**/*.jpg", ["in/deep/a.jpg"]),
        ("**/deep/*.jpg", ["in/deep/a.jpg"]),
        ("set [2]", ["set [2]/a.jpg"]),
        (".", SEEN),
        ("./", SEEN),
        ("*.gif", []),
        ("absent.jpg", []),
    ],
)
def test_patterns_mean_what_a_user_means(tree, pattern, names):
    assert listed(pattern) == names
    if pattern not in (".", "./"):
        assert listed(f"{tree}/{pattern}") == names
    if names:
        check_inputs([pattern])


def test_the_size_is_known_from_listing(tree):
    assert [ref.size_bytes for ref in list_images("in")] == [8, 13]


@pytest.mark.parametrize("exclude", ["out", "./out", "out/", "absolute"])
@pytest.mark.parametrize("pattern", [".", "**/*.jpg", "absolute"])
def test_the_jobs_own_output_is_no_input_however_it_is_written(tree, pattern, exclude):
    names = listed(
        str(tree) if pattern == "absolute" else pattern, exclude=str(tree / "out") if exclude == "absolute" else exclude
    )
    assert "out/samples/a.jpg" not in names
    assert "in/deep/a.jpg" in names


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        pytest.param("m.txt", "", [], id="empty"),
        pytest.param("m.txt", "a.jpg\n\n# no.jpg\n  in/a.jpg  \r\nabsent.jpg", ["a.jpg", "in/a.jpg", "absent.jpg"], id="txt"),
        pytest.param("m.txt", "\ufeffa.jpg\n", ["a.jpg"], id="byte order mark"),
        pytest.param(
            "M.TXT", "photo[1].jpg\nstar*.jpg\nä b,c.jpg\n", ["photo[1].jpg", "star*.jpg", "ä b,c.jpg"], id="names are no globs"
        ),
        pytest.param("m[1].txt", "a.jpg\n", ["a.jpg"], id="manifest whose name looks like a glob"),
        pytest.param("m?.txt", "a.jpg\n", ["a.jpg"], id="so too"),
        pytest.param("m.csv", "a.jpg,1\n\nin/a.jpg,2\n", ["a.jpg", "in/a.jpg"], id="csv without a header"),
        pytest.param("m.csv", '\ufeffid, URI \n1,"ä b,c.jpg"\n2\n3,\n', ["ä b,c.jpg"], id="csv with a header"),
        pytest.param("m.csv", "path,uri\nno,a.jpg\n", ["a.jpg"], id="csv prefers uri"),
        pytest.param(
            "m.jsonl", '"a.jpg"\n\n{"uri": "in/a.jpg"}\n{"path": "b.PNG"}\n', ["a.jpg", "in/a.jpg", "b.PNG"], id="jsonl"
        ),
        pytest.param(
            "dead.jsonl",
            '{"image": {"uri": "a.jpg", "generation": "1"}, "stage": "read", "reason": "x", "message": "y"}\n',
            ["a.jpg"],
            id="dead letters to try again",
        ),
        pytest.param("deep.txt", "gs://b/x.jpg\n/abs/y.jpg\n", ["gs://b/x.jpg", "/abs/y.jpg"], id="uris and absolute paths"),
    ],
)
def test_manifests_are_lists_of_images(tree, name, text, names):
    (tree / name).write_text(text, encoding="utf-8")
    assert is_manifest(name)
    assert [ref.uri for ref in list_images(name)] == names
    check_inputs([name])


def test_a_manifests_relative_paths_may_be_relative_to_itself(tree, monkeypatch):
    (tree / "in" / "m.txt").write_text("deep/a.jpg\nabsent.jpg\n")
    assert [ref.uri for ref in list_images("in/m.txt")] == ["in/deep/a.jpg", "absent.jpg"]
    (tree / "deep").mkdir()
    (tree / "deep" / "a.jpg").touch()  # the current folder comes first
    assert [ref.uri for ref in list_images("in/m.txt")] == ["deep/a.jpg", "absent.jpg"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.txt", b"\xff\xfe", "manifest m.txt: expected UTF-8 text with one URI a line"),
        ("m.csv", b"x" * 200_000, "manifest m.csv: expected UTF-8 text with one URI a line"),
        ("m.jsonl", b'"a.jpg"\nb.jpg\n', "manifest m.jsonl, line 2: expected JSON, got 'b.jpg'"),
        ("m.jsonl", b"{}", "manifest m.jsonl, line 1: expected a URI as a text"),
        ("m.jsonl", b'{"image": {"uri": 5}}', "manifest m.jsonl, line 1: expected a URI as a text"),
        ("m.jsonl", b"[1]", "manifest m.jsonl, line 1: expected a URI as a text"),
    ],
)
def test_a_manifest_that_is_none_is_one_clear_error(tree, name, content, message):
    (tree / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        list(list_images(name))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ([], "no input: expected --input"),
        (["a.jpg", "absent/*.jpg"], "input absent/*.jpg: no file matches"),
        (["empty"], "input empty: no file matches"),
        (["absent.txt"], "input absent.txt: no file matches"),
        (["nosuchscheme://x/y"], "input nosuchscheme://x/y: cannot be listed"),
    ],
)
def test_an_input_that_names_nothing_is_one_clear_error(tree, patterns, message):
    (tree / "empty").mkdir()
    with pytest.raises(InputError) as caught:
        check_inputs(patterns)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "yes"),
    [
        ("a.tfrecord", True),
        ("gs://b/a.tfrecords", True),
        ("a.tfrecord-00000-of-00010", True),
        ("a.tfrecord*", True),
        ("a.TFRecord.gz", True),
        ("tfrecord/a.jpg", False),
        ("a.tfrecord/a.jpg", False),
        ("a.jpg", False),
    ],
)
def test_tfrecord_shards_are_told_by_their_name(name, yes):
    assert is_tfrecord(name) is yes


KEPT = {}


def keep(name, elements):
    """Of this module, not of a closure, so that Beam pickles it by name and it fills this very dict."""
    KEPT[name] = list(elements)


def run(transform_of):
    """Runs a pipeline; gives what `transform_of(pipeline)`'s named outputs hold."""
    KEPT.clear()
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        for name, collection in transform_of(pipeline).items():
            assert_that(collection, functools.partial(keep, name), label=f"Keep{name}")
    return dict(KEPT)


def test_every_listed_image_is_read_or_dead_or_skipped(tree):
    (tree / "m.txt").write_text("a.jpg\nabsent.jpg\na.jpg\n")
    os.mkfifo(tree / "in" / "fifo.jpg")
    (tree / "in" / "large.jpg").write_bytes(bytes(3000))

    def build(pipeline):
        outputs = pipeline | ReadImages(["a.jpg", "m.txt", "in"], ReadConfig(read_threads=2, max_file_mb=0.002))
        return outputs._asdict()

    got = run(build)
    assert sorted(image.ref.uri for image in got["images"]) == ["a.jpg", "in/a.jpg", "in/deep/a.jpg"]
    assert {image.content.decode() for image in got["images"]} == {"a.jpg", "in/a.jpg", "in/deep/a.jpg"}
    assert all(image.ref.generation and image.received_at for image in got["images"])
    assert sorted((letter.ref.uri, letter.stage, letter.reason) for letter in got["dead"]) == [
        ("absent.jpg", "read", "not_found"),
        ("in/fifo.jpg", "read", "not_a_file"),
        ("in/large.jpg", "read", "too_large_file"),
    ]
    counted = merge_tallies((tally for _, tally in got["counted"]), 0)
    assert (counted.read, counted.skipped) == (8, 2)
    assert counted.read == len(got["images"]) + len(got["dead"]) + counted.skipped


def test_reading_ahead_keeps_order_windows_and_timestamps(tree):
    names = [name for name in SEEN for _ in range(20)]

    class Note(beam.DoFn):
        def process(self, image, timestamp=beam.DoFn.TimestampParam, window=beam.DoFn.WindowParam):
            yield (image.ref.uri, int(timestamp), int(window.start))

    def build(pipeline):
        refs = (
            pipeline
            | beam.Create([None])
            | beam.FlatMap(lambda _: (TimestampedValue(ImageRef(name), n) for n, name in enumerate(names)))
            | beam.WindowInto(FixedWindows(10))
        )
        read = refs | beam.ParDo(ReadAhead(ReadConfig(read_threads=3))).with_outputs("dead", main="images")
        return {"noted": read.images | beam.ParDo(Note()) | "Global" >> beam.WindowInto(beam.transforms.window.GlobalWindows())}

    seen = run(build)["noted"]
    assert seen == [(name, n, n // 10 * 10) for n, name in enumerate(names)]


def test_what_has_its_bytes_already_passes_unread():
    given = EncodedImage(ImageRef("inline"), b"bytes")
    read_ahead = ReadAhead(ReadConfig())
    assert list(read_ahead.process(given)) == [given]


def test_tfrecord_shards_carry_their_images(tmp_path):
    import tensorflow as tf

    def feature(*values):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))

    def example(**features):
        named = {name.replace("_", "/", 1): feature(value) for name, value in features.items()}
        return tf.train.Example(features=tf.train.Features(feature=named)).SerializeToString()

    with tf.io.TFRecordWriter(str(tmp_path / "shard.tfrecord-00000-of-00001")) as writer:
        writer.write(example(image_encoded=b"one", image_source_id=b"id-1", image_filename=b"name-1"))
        writer.write(example(image_encoded=b"two", image_filename=b"name-2"))
        writer.write(example(image_encoded=b"three", image_source_id=b""))
        writer.write(example(image_source_id=b"id-4"))
        writer.write(example(image_encoded=b"", image_source_id=b"id-5"))
    (tmp_path / "a.jpg").write_text("file")
    got = run(lambda pipeline: (pipeline | ReadImages([f"{tmp_path}/a.jpg", f"{tmp_path}/shard.tfrecord*"]))._asdict())
    images = {image.content: image.ref for image in got["images"]}
    assert images.keys() == {b"file", b"one", b"two", b"three", b""}  # an empty one is known to be none once it is decoded
    assert (images[b"one"].uri, images[b"two"].uri) == ("id-1", "name-2")
    assert images[b"three"].uri == f"tfrecord:{images[b'three'].generation}"
    assert [(letter.ref.uri, letter.stage, letter.reason) for letter in got["dead"]] == [("id-4", "read", "no_image")]
    assert merge_tallies((tally for _, tally in got["counted"]), 0).read == 6


def test_examples_without_any_of_the_columns_are_dead_letters():
    import pyarrow as pa

    batch = pa.RecordBatch.from_pydict({"label": pa.array([[1], [2]])})
    assert [letter.reason for letter in images_of_examples(batch)] == ["no_image", "no_image"]


def test_dead_letters_written_as_rows_are_a_manifest(tree):
    from pipeline.records import dead_letter_row

    letters = [
        DeadLetter(ImageRef("a.jpg", "1"), "read", "not_found", "x"),
        DeadLetter(ImageRef("ä b,c.jpg"), "decode", "empty", "y"),
    ]
    (tree / "dead.jsonl").write_text("".join(json.dumps(dead_letter_row(letter)) + "\n" for letter in letters))
    assert [ref.uri for ref in list_images("dead.jsonl")] == ["a.jpg", "ä b,c.jpg"]
