"""File names that are no text: such a file is an image like any other, from the listing to its row and back."""

import os
import shutil

import pytest

from tests.conftest import write_bright_image
from tests.launch.jobs import RUNNERS, rows_of

NAMES = [b"plain.png", b"gr\xfcn.png", b"\xff\xfe\x80.png", "日本語のとても長い名前.png".encode(), b"new\nline.png"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_files_whose_names_are_no_utf8_are_images_like_others(runner, tmp_path, run_job, bright_model):
    """One job with good and broken ones: each is one row under the name from which the operating system's bytes come back."""
    folder = os.fsencode(tmp_path / "in")
    write_bright_image(tmp_path / "in" / "plain.png", (64, 48), (10, 10, 30, 30))
    for name in NAMES[1:]:
        shutil.copy(folder + b"/plain.png", folder + b"/" + name)
    with open(folder + b"/broken\xff.png", "wb"):
        pass
    arguments = ["--model", bright_model, "--runner", runner, "--samples", 3]

    code, out, err = run_job("--input", tmp_path / "in", "--output", tmp_path / "out", *arguments)
    assert code == 0, err
    assert "6 images read: 5 detected, 1 dead, 0 skipped" in out
    found = rows_of(tmp_path / "out")
    assert sorted(os.fsencode(row["image"]["uri"]) for row in found) == sorted(folder + b"/" + name for name in NAMES)
    assert [len(row["detections"]) for row in found] == [1] * 5
    dead = rows_of(tmp_path / "out", "dead_letters")
    assert [(os.fsencode(row["image"]["uri"]), row["reason"]) for row in dead] == [(folder + b"/broken\xff.png", "empty")]

    shutil.copy(folder + b"/plain.png", folder + b"/broken\xff.png")
    dead_letters = tmp_path / "out" / "dead_letters" / "*.jsonl"
    again = ["--input", dead_letters, "--allow-uri-prefix", tmp_path / "in", "--output", tmp_path / "again"]
    assert run_job(*again, *arguments)[0] == 0
    assert [os.fsencode(row["image"]["uri"]) for row in rows_of(tmp_path / "again")] == [folder + b"/broken\xff.png"]
