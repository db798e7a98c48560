"""Reading: every image that an input names is read once, or is a dead letter, a double, or done before, by URI and generation."""

import json
import os
import sys
import tarfile
import zlib

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from pipeline.config import ReadConfig
from pipeline.listing import done_rows
from pipeline.listing.done_rows import DETECTED, NEW, DoneRows
from pipeline.listing.read_images import ReadImages
from pipeline.listing.videos import images_of_video
from pipeline.records import ImageRef
from pipeline.results.completion import RowVersion
from pipeline.stats.job_stats import merge_stats
from pipeline.storage.files import write_file
from pipeline.storage.stores import generation_of
from tests.listing.running import images_read, run
from tests.listing.test_archives import add
from tests.listing.test_videos import write_video
from tests.memory import less_memory_than
from tests.shard_rows import VERSION, detected, failed, write_rows
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
    write("in/b.record-00000-of-00001", example(image_encoded=b"in a record", image_source_id=b"record"))
    inputs = ["a.jpg", "m.txt", "m.jsonl", "in", "in/*.record*"]
    got = run(lambda pipeline: images_read(pipeline, ReadImages(inputs, ReadConfig(read_threads=2, max_file_mb=0.002))))
    contents = {name: name.encode() for name in ("a.jpg", "in/a.jpg", "in/deep/a.jpg")}
    contents |= {"in/\udcff.jpg": b"no UTF-8 in its name", "record": b"in a record"}
    assert len(got["images"]) == 5
    assert {image.ref.uri.removeprefix(f"{tree}/"): image.content for image in got["images"]} == contents
    assert all(image.ref.generation and image.received_at for image in got["images"])
    assert sorted((letter.ref.uri, letter.stage, letter.reason) for letter in got["dead"]) == [
        (f"{tree}/absent.jpg", "read", "not_found"),
        (f"{tree}/in/fifo.jpg", "read", "not_a_file"),
        (f"{tree}/in/large.jpg", "read", "too_large_file"),
    ]
    counted = merge_stats(got["counted"], 0)
    assert (counted.read, counted.skipped) == (11, 3)
    assert counted.read == len(got["images"]) + len(got["dead"]) + counted.skipped


@pytest.mark.slow
def test_images_on_their_way_to_the_next_step_take_bounded_memory(tmp_path):
    """All of them would take 64 MB."""
    write(tmp_path / "large.tfrecord", *[example(image_encoded=bytes(2_000_000))] * 32)

    def build(pipeline):
        images = (pipeline | ReadImages([f"{tmp_path}/large.tfrecord"])).images
        return {"sizes": images | beam.Map(lambda image: len(image.content))}

    with less_memory_than(40_000_000):
        sizes = run(build)["sizes"]
    assert sizes == [2_000_000] * 32


@pytest.fixture(params=["local", pytest.param("gs", marks=pytest.mark.matrix)])
def places(request, tmp_path):
    """Folder of the images, and of the results: local, or on Cloud Storage."""
    top = f"{tmp_path}" if request.param == "local" else f"gs://{request.getfixturevalue('gcs_bucket').name}"
    return f"{top}/in/", f"{top}/out"


def put(uri, content=b"x"):
    write_file(uri, content)
    return uri


def read(inputs, output, version=VERSION, prefixes=("",)):
    """What is read of an input: (names, images read, skipped, of these done before)."""
    done = DoneRows(output, version, prefixes, os.urandom(4).hex())
    got = run(lambda pipeline: images_read(pipeline, ReadImages(inputs, exclude=output, done=done)))
    counted = merge_stats(got["counted"], 0)
    assert counted.read == len(got["images"]) + len(got["dead"]) + counted.skipped
    names = [image.ref.uri.rpartition("/")[2] for image in got["images"]]
    return sorted(names), counted.read, counted.skipped, counted.done


@pytest.mark.slow
def test_rows_and_permanent_dead_letters_count_as_done_and_transient_ones_do_not(places):
    folder, output = places
    uris = [put(f"{folder}{name}.jpg") for name in ("dead", "done", "new", "other", "passing")]
    images = [ImageRef(uri, generation_of(uri)) for uri in uris]
    dead, done, _, other, passing = ((image.uri, image.generation) for image in images)
    assert read([folder], output) == (["dead.jpg", "done.jpg", "new.jpg", "other.jpg", "passing.jpg"], 5, 0, 0)
    write_rows(output, [detected(*done)], [failed(*dead), failed(*passing, stage="read", reason="unreadable")])
    write_rows(output, [detected(*other, version=VERSION._replace(model="other"))])
    assert read([folder], output) == (["new.jpg", "other.jpg", "passing.jpg"], 5, 2, 2)

    def count(**other):
        return (DoneRows(output, VERSION._replace(**other), run=os.urandom(4).hex()).among(images) != NEW).sum()

    one, other = (RowVersion.of({"detect": {"max_megapixels": most}}, ("m", "1")) for most in (50, 100))
    assert one.settings == other.settings and one.limits != other.limits
    assert (count(), count(version="8"), count(settings="cccccccc")) == (2, 0, 0)
    assert count(limits=one.limits) == 1, "a dead letter counts only for the limits that it was refused by"


@pytest.mark.slow
def test_an_image_that_is_too_large_is_refused_once(places):
    """Its dead letter says which generation that was, though nobody read it; one that is small enough is read."""
    folder, output = places
    put(f"{folder}a.jpg", bytes(2000))
    got = run(lambda pipeline: images_read(pipeline, ReadImages([folder], ReadConfig(max_file_mb=0.001))))
    (letter,) = got["dead"]
    assert (letter.reason, letter.ref.generation) == ("too_large_file", generation_of(letter.ref.uri))
    write_rows(output, [], [letter])
    assert read([folder], output) == ([], 1, 1, 1)
    put(f"{folder}a.jpg")
    assert read([folder], output) == (["a.jpg"], 1, 0, 0)


@pytest.mark.slow
def test_storage_is_asked_for_the_generation_of_what_a_manifest_names_unless_nothing_is_done(places, tmp_path, monkeypatch):
    folder, output = places
    done, overwritten, new = (put(f"{folder}{name}.jpg") for name in ("done", "overwritten", "new"))
    gone, manifest, asked = f"{folder}gone.jpg", tmp_path / "m.txt", []
    manifest.write_text("\n".join([done, overwritten, new, done, gone]))
    monkeypatch.setattr(done_rows, "generation_of", lambda uri: asked.append(uri) or generation_of(uri))
    assert read([str(manifest)], output)[3] == 0 and asked == []
    write_rows(output, [detected(done, generation_of(done)), detected(overwritten, "1"), detected(gone)])
    assert read([str(manifest)], output) == (["new.jpg", "overwritten.jpg"], 5, 2, 1)
    assert sorted(asked) == sorted([done, overwritten, new, gone])


def test_storage_is_asked_nothing_of_what_an_inventory_names(tmp_path, monkeypatch):
    """There is no bucket; each image has the generation that its line tells."""
    asked, inventory, output = [], tmp_path / "m.csv", f"{tmp_path}/out"
    inventory.write_text("uri,generation,size\n" + "".join(f"gs://b/{number}.jpg,7,12\n" for number in range(9)))
    write_rows(output, [detected(f"gs://b/{number}.jpg", "7") for number in range(8)] + [detected("gs://b/8.jpg", "6")])
    monkeypatch.setattr(done_rows, "generation_of", asked.append)
    got = run(lambda pipeline: (pipeline | ReadImages([str(inventory)], done=DoneRows(output, VERSION, run="one")))._asdict())
    assert [image.uri for image in got["images"]] == ["gs://b/8.jpg"]
    assert merge_stats(got["counted"], 0).done == 8 and asked == []


@pytest.mark.slow
def test_images_in_tfrecord_files_are_left_out_by_their_content(tmp_path):
    write(f"{tmp_path}/a.tfrecord", *(example(image_encoded=name, image_source_id=name) for name in (b"one", b"two")))
    inputs, output = [f"{tmp_path}/a.tfrecord"], f"{tmp_path}/out"
    everything = run(lambda pipeline: (pipeline | ReadImages(inputs))._asdict())["images"]
    (one,) = [image.ref for image in everything if image.ref.uri == "one"]
    write_rows(output, [detected("one", one.generation), detected("two", "of other content")])
    assert read(inputs, output) == (["two"], 2, 1, 1)
    assert read(inputs, output, prefixes=(f"{tmp_path}/",)) == (["two"], 2, 1, 1), "their names do not begin as their file's"


@pytest.mark.slow
def test_a_video_that_is_damaged_behind_some_frames_is_not_done_with_its_dead_letter(tmp_path):
    """They may have no rows: the job was killed between two shards, or `fps` was less."""
    path, output = write_video(tmp_path / "in" / "a.mkv"), f"{tmp_path}/out"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    frame, letter = images_of_video(ImageRef(str(path)), 1.0, 1.0)
    write_rows(output, [], [letter])
    assert letter.reason == "broken_file" and read([str(path)], output) == (["a.mkv#t=0.000"], 2, 0, 0)
    write_rows(output, [detected(frame.ref.uri, frame.ref.generation)])
    assert read([str(path)], output)[0] == []
    path.write_bytes(b"nothing of a video")
    (letter,) = images_of_video(ImageRef(str(path)), 1.0, 1.0)
    write_rows(output, [], [letter])
    assert read([str(path)], output) == ([], 1, 1, 1)


def test_shards_that_cannot_hold_wanted_rows_are_not_read(tmp_path):
    """Of a year of days only the shards whose statistics fit are opened beyond their footers."""
    for day in range(1, 31):
        write_rows(str(tmp_path), [detected(f"gs://b/2026/11/{day:02d}/{n}.jpg") for n in range(3)])
    done = DoneRows(str(tmp_path), VERSION, ("gs://b/2026/11/07/",), "a")
    assert done.have([(f"gs://b/2026/11/07/{n}.jpg", "1") for n in range(4)]).tolist() == [DETECTED] * 3 + [NEW]
    assert done.total == 3
    assert DoneRows(str(tmp_path), VERSION, ("gs://b/2026/12/",), "b").total == 0
    assert DoneRows(str(tmp_path), VERSION, ("",), "c").total == 90


_OPENED: list[list[str]] = []  # of the test that asks for it; a hook stays until its process ends


def _note_open(event, arguments):
    if event == "open" and _OPENED and isinstance(arguments[0], (str, bytes)):
        _OPENED[-1].append(os.fsdecode(arguments[0]))


sys.addaudithook(_note_open)
SCANNED: list[list[str]] = []


def _note_scan(event, arguments):
    if event == "os.scandir" and SCANNED:
        SCANNED[-1].append(arguments[0])


sys.addaudithook(_note_scan)


def folders_scanned(_image):
    """How many folders this process has listed; of this module, so that Beam pickles it by name."""
    return len(SCANNED[-1])


@pytest.fixture
def scanned():
    """The folders that this process has listed."""
    SCANNED.append([])
    yield SCANNED[-1]
    SCANNED.pop()


@pytest.fixture
def opened():
    """The files that this process has opened."""
    _OPENED.append([])
    yield _OPENED[-1]
    _OPENED.pop()


def containers(folder):
    """A tar file with an image, a damaged link, a hidden and another file; records, of which one is none; and a video."""
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as archive:
        for name in ("one.jpg", "two.jpg", ".hidden.jpg", "notes.txt"):
            add(archive, name, b"x" * 1000)
        add(archive, "link.jpg", kind=tarfile.SYMTYPE)
    write(f"{folder}/a.tfrecord", example(image_encoded=b"x", image_source_id=b"three"), b"no example")
    write_video(folder / "a.mkv", 50)
    return [f"{folder}/{name}" for name in ("a.tar", "a.tfrecord", "a.mkv")]


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["listed", "in a manifest"])
def test_a_container_of_which_all_images_have_rows_is_not_opened(tmp_path, opened, named):
    """Whatever they were: detected, or refused for good. One that may pass, a row less or a new generation opens it again."""
    paths, output = containers(tmp_path / "in"), f"{tmp_path}/out"
    (tmp_path / "m.txt").write_text("\n".join(paths))
    inputs = [f"{tmp_path}/m.txt" if named else f"{tmp_path}/in"]
    got = run(lambda pipeline: images_read(pipeline, ReadImages(inputs, done=DoneRows(output, VERSION, run="first"))))
    images = [image.ref for image in got["images"]]
    assert (len(images), [letter.reason for letter in got["dead"]]) == (5, ["bad_member", "no_example"])
    assert {*paths} <= {*opened}
    rows = {ref.uri: detected(ref.uri, ref.generation) for ref in images}
    last = rows.pop(f"{paths[0]}#one.jpg")
    write_rows(output, [*rows.values()], got["dead"])
    opened.clear()
    assert read(inputs, output) == (["a.tar#one.jpg"], 8, 6, 5)
    assert [path for path in paths if path in opened] == paths[:1]
    write_rows(output, [last])
    opened.clear()
    assert read(inputs, output) == ([], 8, 8, 7)
    assert not {*paths} & {*opened}
    (tmp_path / "in" / "a.tar").write_bytes((tmp_path / "in" / "a.tar").read_bytes())
    opened.clear()
    assert read(inputs, output)[1] == 8
    assert [path for path in paths if path in opened] == paths[:1]


@pytest.mark.slow
def test_an_image_that_may_be_readable_another_time_leaves_its_container_open(tmp_path, opened):
    (path, *_), output = containers(tmp_path / "in"), f"{tmp_path}/out"
    assert read([path], output)[1:] == (4, 1, 0)
    refs = [f"{path}#{name}.jpg" for name in ("one", "two")]
    generation = f"1000-{zlib.crc32(b'x' * 1000):08x}"
    write_rows(output, [detected(refs[0], generation)], [failed(refs[1], generation, reason="decoder_died")])
    write_rows(output, [], [failed(f"{path}#link.jpg", "", stage="read", reason="bad_member")])
    opened.clear()
    assert read([path], output)[0] == ["a.tar#two.jpg"]
    assert path in opened


@pytest.mark.slow
def test_members_that_are_named_singly_are_read_in_one_pass_of_their_archive(tmp_path, opened):
    names = [f"{n}.jpg" for n in range(300)]
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in [*names, "other.jpg"]:
            add(archive, name, b"x")
    (tmp_path / "m.txt").write_text("\n".join(f"a.tar#{name}" for name in [*names, "gone.jpg"]))
    opened.clear()
    got = run(lambda pipeline: images_read(pipeline, ReadImages([f"{tmp_path}/m.txt"])))
    assert sorted(image.ref.uri for image in got["images"]) == sorted(f"{tmp_path}/a.tar#{name}" for name in names)
    assert [(letter.ref.uri, letter.reason) for letter in got["dead"]] == [(f"{tmp_path}/a.tar#gone.jpg", "not_found")]
    assert opened.count(f"{tmp_path}/a.tar") == 2, "Python's open with an opener is two events"


@pytest.mark.parametrize(
    ("inputs", "shuffled"),
    [
        (["in"], False),
        (["in/*.jpg", "other/**"], False),
        (["in/2026-01*", "in/2026-02*"], False),
        (["gs://b/2026/11/01/**", "gs://b/2026/11/02/**"], False),
        (["in", "in/deep"], True),
        (["in/a.jpg", "in/a.jpg"], True),
        (["in/*.jpg", "in/a*"], True),
        (["gs://b/2026/11/1**", "gs://b/2026/11/10/**"], True),
        (["m.txt"], True),
        (["https://h/a?token=1", "https://h/a?token=2"], True),
    ],
)
def test_names_are_shuffled_only_where_two_inputs_may_name_one_image(tree, inputs, shuffled):
    def labels(**remote):
        pipeline = beam.Pipeline(runner=FnApiRunner())
        _ = pipeline | "Read" >> ReadImages(inputs, **remote)
        return {label.partition("/")[2] for label in pipeline.applied_labels}

    (tree / "m.txt").touch()
    assert ("GatherDoubles" in labels(rebalance=False)) is shuffled
    assert ("GatherDoubles" in labels(rebalance=True)) is (shuffled or not inputs[0].startswith("gs://")), (
        "links may lead anywhere"
    )


def test_the_first_image_comes_while_the_listing_goes_on(tmp_path, scanned):
    for n in range(400):
        (tmp_path / "in" / f"{n:03d}").mkdir(parents=True)
        (tmp_path / "in" / f"{n:03d}" / "a.jpg").touch()
    scanned.clear()

    def build(pipeline):
        images = (pipeline | ReadImages([f"{tmp_path}/in"], rebalance=False)).images
        return {"before": images | beam.Map(folders_scanned)}

    before = run(build)["before"]
    assert len(before) == 400
    assert min(before) < 200 < len(scanned)


@pytest.mark.parametrize("pattern", ["in", "in/**/*.jpg", "in/*/*.jpg"])
def test_a_file_that_several_links_lead_to_is_read_once_without_a_shuffle(tmp_path, pattern):
    for name in ("in/a/1.jpg", "elsewhere/2.jpg", "second/3.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for link, target in (("in/b", "a"), ("in/c", "../elsewhere"), ("in/d", "../elsewhere"), ("in/e", "../second")):
        (tmp_path / link).symlink_to(target)
    inputs = [f"{tmp_path}/{pattern}", f"{tmp_path}/second"]
    found = run(lambda pipeline: (pipeline | ReadImages(inputs, rebalance=False))._asdict())["images"]
    assert sorted(ref.uri for ref in found) == [
        f"{tmp_path}/{name}" for name in ("elsewhere/2.jpg", "in/a/1.jpg", "second/3.jpg")
    ]
