"""What lists may name that were found, and not named by the user."""

import pytest

from pipeline.read.allowed import may_name


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("photos/x", "secret"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "secret" / "key").write_bytes(b"key")
    (tmp_path / "photos" / "link").symlink_to(tmp_path / "secret" / "key")
    (tmp_path / "photos" / "link.tfrecord").symlink_to(tmp_path / "secret" / "key")
    (tmp_path / "photos" / "away").symlink_to(tmp_path / "secret")
    (tmp_path / "mounted").symlink_to(tmp_path / "photos")
    return tmp_path


@pytest.mark.parametrize(
    ("uri", "folders"),
    [
        ("{here}/photos/a.jpg", ["photos/"]),
        ("mounted/a.jpg", ["photos/"]),
        ("photos/a.jpg", ["mounted"]),
        ("photos/x/../a.jpg", ["photos/"]),
        ("file://{here}/photos/a.jpg", ["photos/"]),
        ("photos/a.tfrecord@0-99", ["photos/"]),
        ("photos/link", ["photos/", "secret/"]),
        ("photos/a.jpg", ["./"]),
        ("photos/a.jpg", ["/"]),
        ("gs://b/x/a.jpg", ["photos/", "gs://b/x/"]),
    ],
    ids=str,
)
def test_what_lies_below_a_folder_may_be_named_however_it_is_written(uri, folders, folder):
    assert may_name(uri.format(here=folder), [each.format(here=folder) for each in folders])


@pytest.mark.parametrize(
    ("uri", "folders"),
    [
        ("/etc/passwd", ["photos/"]),
        ("photos", ["photos/"]),
        ("photos-secret/a.jpg", ["photos"]),
        ("photos/../secret/key", ["photos/"]),
        ("photos/link", ["photos/"]),
        ("photos/link.tfrecord@0-99", ["photos/"]),
        ("photos/../a.zip#x.png", ["photos/"]),
        ("photos/away/key", ["photos/"]),
        ("file:///etc/passwd", ["photos/"]),
        ("FILE://localhost/etc/passwd", ["photos/"]),
        ("file://{here}/photos/%2e%2e/secret/key", ["photos/"]),
        ("file://photos/a.jpg", ["photos/"]),
        ("http://host/photos/a.jpg", ["photos/"]),
        ("gs://b/x/../y/a.jpg", ["gs://b/x/"]),
        ("gs://b-other/a.jpg", ["gs://b"]),
        ("gs://b/a.jpg", ["photos/", "./", "/"]),
        ("photos/a\0.jpg", ["photos/"]),
        ("photos/a.jpg", [""]),
        ("", ["photos/"]),
    ],
    ids=str,
)
def test_what_lies_elsewhere_may_not_be_named(uri, folders, folder):
    assert not may_name(uri.format(here=folder), folders)
