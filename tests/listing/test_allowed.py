"""What lists may name that were found, and not named by the user."""

import pytest

from pipeline.listing.allowed import may_name


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
    ("uri", "folders", "allowed"),
    [
        ("{here}/photos/a.jpg", ["photos/"], True),
        ("mounted/a.jpg", ["photos/"], True),
        ("photos/a.jpg", ["mounted"], True),
        ("photos/x/../a.jpg", ["photos/"], True),
        ("file://{here}/photos/a.jpg", ["photos/"], True),
        ("photos/a.tfrecord@0-99", ["photos/"], True),
        ("photos/link", ["photos/", "secret/"], True),
        ("photos/a.jpg", ["./"], True),
        ("photos/a.jpg", ["/"], True),
        ("gs://b/x/a.jpg", ["photos/", "gs://b/x/"], True),
        ("/etc/passwd", ["photos/"], False),
        ("photos", ["photos/"], False),
        ("photos-secret/a.jpg", ["photos"], False),
        ("photos/../secret/key", ["photos/"], False),
        ("photos/link", ["photos/"], False),
        ("photos/link.tfrecord@0-99", ["photos/"], False),
        ("photos/../a.zip#x.png", ["photos/"], False),
        ("photos/away/key", ["photos/"], False),
        ("file:///etc/passwd", ["photos/"], False),
        ("FILE://localhost/etc/passwd", ["photos/"], False),
        ("file://{here}/photos/%2e%2e/secret/key", ["photos/"], False),
        ("file://photos/a.jpg", ["photos/"], False),
        ("http://host/photos/a.jpg", ["photos/"], False),
        ("gs://b/x/../y/a.jpg", ["gs://b/x/"], False),
        ("gs://b-other/a.jpg", ["gs://b"], False),
        ("gs://b/a.jpg", ["photos/", "./", "/"], False),
        ("photos/a\0.jpg", ["photos/"], False),
        ("photos/a.jpg", [], False),
        ("photos/a.jpg", [""], False),
        ("", ["photos/"], False),
    ],
    ids=str,
)
def test_what_lies_below_a_folder_may_be_named_however_it_is_written_and_nothing_else(uri, folders, allowed, folder):
    assert may_name(uri.format(here=folder), [each.format(here=folder) for each in folders]) is allowed
