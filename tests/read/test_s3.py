"""Images on S3: listed by folder and glob, read with their ETag, and refused with the reasons of other storage."""

import json
import sys
import zipfile

import pytest

from pipeline import run
from pipeline.errors import InputError
from pipeline.failures import ImageError
from pipeline.read.fetch import StorageUnavailableError, fetch, look_up
from pipeline.read.list_images import check_inputs, list_images
from pipeline.read.reconciled import reconcile
from pipeline.records import ImageRef
from pipeline.storage import s3
from tests.conftest import write_bright_image
from tests.emulators import free_ports
from tests.launch.jobs import rows_of
from tests.read.test_videos import frames, write_video

NAMES = ["a.jpg", "d/b.png", "d/e/c.jpg", "d/.hidden/x.jpg", "d/notes.md", "ä b+%20.jpg", "dd/f.jpg"]
LIMIT = 1000


@pytest.fixture
def bucket(s3_bucket):
    for name in NAMES:
        s3_bucket.put_object(Key=f"in/{name}", Body=f"content of {name}".encode())
    return s3_bucket


def refusal(uri, **known):
    with pytest.raises(ImageError) as caught:
        fetch(ImageRef(uri, **known), LIMIT, retry_seconds=0.0)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("in", ["a.jpg", "d/b.png", "d/e/c.jpg", "dd/f.jpg", "ä b+%20.jpg"]),
        ("in/", ["a.jpg", "d/b.png", "d/e/c.jpg", "dd/f.jpg", "ä b+%20.jpg"]),
        ("in/*", ["a.jpg", "ä b+%20.jpg"]),
        ("in/*/*.jpg", ["dd/f.jpg"]),
        ("in/**/*.jpg", ["a.jpg", "d/.hidden/x.jpg", "d/e/c.jpg", "dd/f.jpg", "ä b+%20.jpg"]),
        ("in/d/b.png", ["d/b.png"]),
        ("in/d", ["d/b.png", "d/e/c.jpg"]),
        ("in/absent/*", []),
    ],
)
def test_folders_globs_and_names_are_listed_with_size_and_etag(bucket, pattern, found):
    listed = list(list_images([f"s3://{bucket.name}/{pattern}"]))
    assert sorted(ref.uri for ref in listed) == [f"s3://{bucket.name}/in/{name}" for name in found]
    for ref in listed:
        assert (ref.size_bytes, ref.generation) == s3.look_up(ref.uri)[1:]
        content, generation = fetch(ref, LIMIT)
        assert content.decode() == f"content of {ref.uri.partition('/in/')[2]}"
        assert generation == ref.generation == look_up(ref) != ""


def test_a_listing_of_several_pages_is_whole(s3_bucket):
    for number in range(1003):
        s3_bucket.put_object(Key=f"{number:04}.jpg", Body=b"x")
    assert len(list(list_images([f"s3://{s3_bucket.name}"]))) == 1003


def test_what_cannot_be_read_has_the_reason_of_other_storage(bucket):
    bucket.put_object(Key="large.jpg", Body=bytes(LIMIT + 1))
    assert refusal(f"s3://{bucket.name}/gone.jpg").reason == "not_found"
    assert refusal("s3://no-such-bucket-here/a.jpg").reason == "not_found"
    large = refusal(f"s3://{bucket.name}/large.jpg")
    assert large.reason == "too_large_file" and "max_file_mb" in str(large)


def test_a_server_that_does_not_answer_is_a_transient_failure(bucket, monkeypatch):
    (port,) = free_ports(1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    s3._client_of.cache_clear()
    error = refusal("s3://bucket/a.jpg")
    assert isinstance(error, StorageUnavailableError) and error.reason == "storage_unavailable"


def test_without_credentials_an_image_is_a_dead_letter_and_an_input_an_error_at_once(bucket, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    s3._client_of.cache_clear()
    assert refusal("s3://bucket/a.jpg").reason == "permission_denied"
    with pytest.raises(InputError, match=r"input s3://bucket/\*\*: cannot be listed: .*Unable to locate credentials"):
        check_inputs({"s3://bucket/": ["s3://bucket/"]})


def test_without_boto3_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    s3._client_of.cache_clear()
    said = "s3:// is read by boto3: pip install 'hybrid-detection-pipeline[s3]'"
    assert str(refusal("s3://bucket/a.jpg")) == f"s3://bucket/a.jpg cannot be read: {said}"
    with pytest.raises(InputError) as caught:
        check_inputs({"s3://bucket/": ["s3://bucket/"]})
    assert str(caught.value) == f"input s3://bucket/**: cannot be listed: {said}"


def test_archives_and_videos_are_read_there_piece_by_piece(s3_bucket, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x.jpg", b"x" * 100)
    s3_bucket.upload_file(str(tmp_path / "a.zip"), "a.zip")
    s3_bucket.upload_file(str(write_video(tmp_path / "a.mp4")), "a.mp4")
    assert frames(f"s3://{s3_bucket.name}/a.mp4") == [("0.000", 0), ("1.000", 25)]
    with s3.open_object(f"s3://{s3_bucket.name}/a.zip") as file, zipfile.ZipFile(file) as archive:
        assert archive.read("x.jpg") == b"x" * 100


def test_an_open_object_that_is_replaced_gives_an_error_not_parts_of_two(s3_bucket):
    s3_bucket.put_object(Key="a", Body=bytes(s3._BUFFER_BYTES + 10))
    with s3.open_object(f"s3://{s3_bucket.name}/a") as file:
        assert file.read(10) == bytes(10)
        s3_bucket.put_object(Key="a", Body=b"x" * (s3._BUFFER_BYTES + 10))
        with pytest.raises(Exception, match="pre-conditions"):
            file.read()


def test_a_job_reads_adds_and_reconciles_images_on_s3(s3_bucket, tmp_path, bright_model, capsys):
    """A replaced object is another image generation, also within the same second."""
    for number in range(3):
        write_bright_image(tmp_path / f"{number}.png", (64, 48), (10, 10 + number, 30, 30))
        s3_bucket.upload_file(str(tmp_path / f"{number}.png"), f"in/{number}.png")
    pattern, out = f"s3://{s3_bucket.name}/in", tmp_path / "out"

    def images(*flags):
        assert run.main(["--input", pattern, "--output", str(out), "--model", bright_model, *flags]) == 0, capsys.readouterr().err
        return json.loads((out / "summary.json").read_text())["images"]

    assert images()["detected"] == 3
    assert sorted(row["image"]["uri"] for row in rows_of(out)) == [f"{pattern}/{number}.png" for number in range(3)]
    assert reconcile([pattern], str(out)).counts == {"done": 3}
    s3_bucket.upload_file(str(tmp_path / "2.png"), "in/0.png")
    assert reconcile([pattern], str(out)).counts == {"done": 2, "stale": 1}
    again = images("--only-new")
    assert (again["detected"], again["skipped"]) == (1, 2)
