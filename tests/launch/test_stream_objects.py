"""A stream whose bucket notifies of everything: photos, sidecars, archives, folders, and what the stream itself writes there."""

import io
import json
import signal
import tarfile
import zipfile

import pytest

from pipeline.records import row_bytes
from pipeline.stream import members
from tests.conftest import write_bright_image
from tests.launch.jobs import rows_of
from tests.processes import wait_until
from tests.shard_rows import rows_in
from tests.streaming_job import StreamingJob
from tests.tfrecord_files import example, framed


@pytest.fixture
def photo(tmp_path):
    write_bright_image(tmp_path / "photo.png", (64, 48), (10, 12, 30, 36))
    return (tmp_path / "photo.png").read_bytes()


def zipped(contents):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return file.getvalue()


def tarred(contents):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def notice(blob):
    """What Cloud Storage sends of a new object."""
    attributes = {"eventType": "OBJECT_FINALIZE", "bucketId": blob.bucket.name, "objectId": blob.name}
    return json.dumps({"size": str(blob.size)}).encode(), {**attributes, "objectGeneration": str(blob.generation)}


def test_batch_and_stream_give_equal_rows_of_the_same_objects_and_a_stream_does_not_read_what_it_wrote(
    pubsub_emulator, gcs_bucket, tmp_path, bright_model, photo, run_job
):
    def uploaded(name, content):
        blob = gcs_bucket.blob(name)
        blob.upload_from_string(content)
        return blob

    objects = {
        "in/a.png": photo,
        "in/no-ending": photo,
        "in/broken.jpg": b"no image",
        "in/a.json": b'{"camera": 7}',
        "in/README": b"text",
        "in/empty": b"",
        "in/x/": b"",
        "in/._a.png": b"\0\5\x16\7",
        "in/some.zip": zipped({"b.png": photo, "notes.txt": b"text", "../c.png": photo, "d/e.png": photo}),
        "in/cut.tar": tarred({"f.png": photo, "g.png": photo})[:1300],
        "in/few.tfrecord": framed(example(image_encoded=photo, image_source_id=b"h.png")) + framed(b"none"),
    }
    blobs = [uploaded(*each) for each in objects.items()]
    place = f"gs://{gcs_bucket.name}"
    assert run_job("--input", f"{place}/in/", "--output", tmp_path / "out", "--model", bright_model)[0] == 0
    batch, dead = rows_of(tmp_path / "out"), rows_of(tmp_path / "out", "dead_letters")
    assert (len(batch), len(dead)) == (6, 4)

    flags = ("--archive", f"{place}/results", "--shard-seconds", "1")
    with StreamingJob(pubsub_emulator, tmp_path, bright_model, *flags) as job:
        job.publish(*map(notice, blobs))
        wait_until(lambda: len(rows_in(f"{place}/results")) + len(rows_in(f"{place}/results", "dead_letters")) >= 10, job.output)
        own = [gcs_bucket.get_blob(blob.name) for blob in gcs_bucket.list_blobs(prefix="results/")]
        assert len(own) >= 2
        job.publish(*map(notice, own), (photo, {"name": "last"}))
        wait_until(lambda: len(rows_in(f"{place}/results")) == 7, job.output)
        assert job.signal(signal.SIGTERM) == 0, job.output()
        by_uri = sorted(rows_in(f"{place}/results"), key=row_bytes)
    assert [row for row in by_uri if row["image"]["uri"] != "inline:last"] == batch
    assert rows_in(f"{place}/results", "dead_letters") == dead
    images = json.loads(gcs_bucket.blob("results/summary.json").download_as_bytes())["images"]
    assert (images["detected"], images["dead"]) == (7, 4)
    assert images["read"] == 11 + images["skipped"]
    assert images["skipped"] == 6 + len(own)  # a.json, README, empty, x/, ._a.png, notes.txt


def test_a_stream_that_dies_amid_an_archive_gets_it_again_and_its_request_is_answered_with_all_members(
    pubsub_emulator, tmp_path, bright_model, photo
):
    names = [f"{n:03d}.png" for n in range(150)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.zip").write_bytes(zipped(dict.fromkeys([*names, "none.txt"], photo)))
    path = f"{tmp_path}/in/a.zip"
    job = StreamingJob(pubsub_emulator, tmp_path, bright_model, "--allow-uri-prefix", tmp_path / "in", "--shard-seconds", "1")
    with job:
        assert job.signal(signal.SIGTERM) == 0, job.output()
        job.publish(json.dumps({"request_id": "all", "images": [path, f"{tmp_path}/in/gone.png"]}).encode())
        job.start("the hundredth member")
        assert job.wait() == -signal.SIGKILL, job.output()
        assert not rows_in(str(job.archive))
        job.start()
        answers = []
        wait_until(lambda: answers.extend(job.take(job.answers, 1, timeout_s=5)) or answers, job.output)
        assert job.signal(signal.SIGTERM) == 0, job.output()
    answer = json.loads(answers[0].data)
    assert answer["complete"] and [row["reason"] for row in answer["failed"]] == ["not_found"]
    members = sorted(row["image"]["uri"] for row in answer["results"])
    assert members == [f"{path}#{name}" for name in sorted([*names, "none.txt"])]
    assert sorted(row["image"]["uri"] for row in rows_in(str(job.archive))) == members


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_second_image_of_one_name_in_an_archive_is_a_dead_letter_as_in_a_batch_job(tmp_path, photo):
    import threading

    from pipeline.config import Config
    from pipeline.records import DeadLetter, ImageRef
    from pipeline.stream.members import members_of

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for content in (photo, b"another picture"):
            archive.writestr("a.png", content)
    image, letter = members_of(ImageRef(f"{tmp_path}/a.zip", message_id="m"), Config(), threading.Event())
    assert image.content == photo and isinstance(letter, DeadLetter)
    assert (letter.ref.uri, letter.reason, letter.ref.message_id) == (image.ref.uri, "bad_member", "m")


@pytest.mark.parametrize("bound", ["MAX_MEMBERS", "MAX_BYTES"])
def test_an_archive_above_a_streams_bounds_is_a_dead_letter_that_names_batch(tmp_path, monkeypatch, photo, bound):
    import threading

    from pipeline.config import Config
    from pipeline.records import ImageRef

    monkeypatch.setattr(members, bound, {"MAX_MEMBERS": 2, "MAX_BYTES": 2 * len(photo)}[bound])
    (tmp_path / "a.zip").write_bytes(zipped({f"{n}.png": photo for n in range(4)}))
    path = f"{tmp_path}/a.zip"
    ref = ImageRef(path, message_id="m")
    *images, letter = members.members_of(ref, Config(), threading.Event())
    assert [image.ref.uri for image in images] == [f"{path}#0.png", f"{path}#1.png"]
    assert {image.ref.message_id for image in (*images, letter)} == {"m"}
    assert (letter.reason, letter.ref.uri) == ("too_large_for_stream", path)
    assert letter.message.endswith(f"a batch job reads it: --mode batch --input {path}")
    (letter,) = members.members_of(ImageRef(path, size_bytes=10**12), Config(), threading.Event())
    assert letter.reason == "too_large_for_stream"
