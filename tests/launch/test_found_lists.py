"""Whoever may add files to the input of a job reads nothing else with it: a list that is found names only what lies beside it."""

import json

import pytest

from pipeline import run
from pipeline.storage.files import write_file
from tests.conftest import write_bright_image
from tests.launch.jobs import rows_of
from tests.launch.test_retry_dead import detected
from tests.tfrecord_files import example
from tests.tfrecord_files import write as write_tfrecord

SECRET = b"q7z:*:19000:0:99999:7:::"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("in/own.png", "in/deep/listed.png", "elsewhere/private.png"):
        write_bright_image(tmp_path / name, (64, 48), (10, 12, 30, 36))
    write_file(str(tmp_path / "elsewhere" / "shadow"), SECRET)
    return tmp_path


def test_a_list_that_was_found_names_only_what_lies_where_it_was_found(folder, job):
    """Nothing of what its author may not read gets into the results."""
    named = [
        f"{folder}/elsewhere/shadow",
        "in/../elsewhere/private.png",
        f"file://{folder}/elsewhere/shadow",
        "gs://private/a.png",
    ]
    lines = [*({"uri": uri} for uri in named), {"uri": "in/deep/listed.png", "camera": 7}]
    write_file("in/upload.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    images = job("--input", "in/*.jsonl")
    refused = [f"{folder}/elsewhere/private.png", f"{folder}/elsewhere/shadow", "gs://private/a.png"]
    dead = [(row["image"]["uri"], row["reason"]) for row in rows_of(folder / "out", "dead_letters")]
    assert set(dead) == {(uri, "not_allowed") for uri in refused}
    assert images["read"] - images["skipped"] == len(detected(folder)) + len(dead)
    (listed,) = rows_of(folder / "out")
    assert (listed["image"]["uri"], listed["extra"]) == (f"{folder}/in/deep/listed.png", {"camera": 7})
    for path in (folder / "out").rglob("*"):
        assert not path.is_file() or SECRET[:4] not in path.read_bytes(), path


def test_a_dry_run_does_not_open_what_may_not_be_named(folder, bright_model, capfd):
    write_file("in/a.jsonl", json.dumps({"uri": f"{folder}/elsewhere/private.png"}).encode())
    assert run.main(["--input", "in/a*.jsonl", "--output", "out", "--model", bright_model, "--dry-run"]) == 0
    said = capfd.readouterr().out
    assert "tried" not in said and "private.png' is named in a file that was found" in said


def test_an_image_of_a_tfrecord_file_is_tried_again_where_it_lies_in_that(folder, job):
    """Whatever it is called there: its name is what somebody wrote into the file."""
    secret = f"{folder}/elsewhere/private.png"
    write_bright_image(folder / "wide.png", (200, 100), (10, 12, 30, 36))
    large = (folder / "wide.png").read_bytes()
    names = [b"first.png", secret.encode(), b"third.png"]
    (folder / "shards").mkdir()
    write_tfrecord("shards/a.tfrecord", *(example(image_encoded=large, image_source_id=name) for name in names))
    assert job("--input", "shards", "--max-megapixels", "0.01")["dead"] == 3
    rows = rows_of(folder / "out", "dead_letters")
    assert [row["image"]["uri"] for row in rows] == sorted(name.decode() for name in names)
    places = sorted(row["record"] for row in rows)
    assert places[0].startswith(f"{folder}/shards/a.tfrecord@0-")

    write_bright_image(folder / "elsewhere" / "private.png", (20, 20), (1, 1, 5, 5))
    assert job("--retry-dead")["dead"] == 3, "nothing says where it may read"
    images = job("--retry-dead", "--input", "shards")
    assert (images["detected"], images["dead"]) == (3, 0)
    (row,) = [row for row in rows_of(folder / "out") if row["image"]["uri"] == secret]
    assert (row["image"]["width"], row["image"]["height"]) == (200, 100), "the record, not the file of that name"
