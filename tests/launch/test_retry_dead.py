"""What failed is tried again: by its name, by the payload of its dead letter; what has recovered counts as done."""

import base64
import json

import pytest

from pipeline import run
from pipeline.records import DeadLetter, ImageRef
from pipeline.results.layout import DEAD_LETTERS
from tests.launch.jobs import rows_by_name, write_images
from tests.shard_rows import rows_in, write_rows


@pytest.fixture
def folder(tmp_path, job):
    write_images(tmp_path, "a.png")
    return tmp_path


def detected(folder):
    """The names of images that have a row, without the folder."""
    return sorted(row["image"]["uri"].removeprefix(f"{folder}/") for row in rows_in(f"{folder}/out"))


def letter(stage, reason, uri="", payload=b"", extra=""):
    return DeadLetter(ImageRef(uri, extra=extra), stage, reason, "no", payload)


def test_what_failed_is_tried_again_and_a_success_counts(folder, job, capfd):
    """`--retry-dead` takes the dead letters of earlier runs as its input."""
    write_images(folder / "in", "good.png")
    (folder / "in" / "fixed.png").write_bytes(b"")
    (folder / "in" / "broken.png").write_bytes(b"")
    (folder / "list.txt").write_text("in/good.png\nin/fixed.png\nin/broken.png\nin/late.png\n")
    assert job("--input", "list.txt") == {"read": 4, "detected": 1, "dead": 3, "skipped": 0}
    write_images(folder / "in", "fixed.png", "late.png")

    assert job("--input", "list.txt", "--retry-dead") == {"read": 3, "detected": 2, "dead": 0, "skipped": 1}
    assert json.loads((folder / "out" / "summary.json").read_text())["recovered"] == 2
    assert "  recovered 2 of 2 failed images\n" in capfd.readouterr().out
    assert detected(folder) == ["in/fixed.png", "in/good.png", "in/late.png"]
    assert {*rows_by_name(folder / "out", DEAD_LETTERS)} == {"fixed.png", "broken.png", "late.png"}

    job("--retry-dead", "--allow-uri-prefix", "in")
    assert "3 images read: 0 detected, 0 dead, 3 skipped (3 of them done before)" in capfd.readouterr().out
    assert detected(folder) == ["in/fixed.png", "in/good.png", "in/late.png"]


def test_a_replay_of_final_failures_alone_does_nothing_and_is_no_alarm(folder, job, bright_model, capfd):
    """A nightly replay would else alarm for ever for one broken photo, which is tried with --again, or once it was replaced."""
    (folder / "broken.png").write_bytes(b"")
    assert job("--input", "*.png", "--max-dead-share", "1")["dead"] == 1
    replay = ["--output", "out", "--model", bright_model, "--retry-dead", "--allow-uri-prefix", f"{folder}/"]
    letters = rows_in("out", DEAD_LETTERS)
    for more, code, images in [
        ([], 0, "1 image read: 0 detected, 0 dead, 1 skipped (1 of them done before)"),
        (["--again"], 4, "1 image read: 0 detected, 1 dead, 0 skipped"),
    ]:
        capfd.readouterr()
        assert run.main([*replay, *more]) == code
        assert images in capfd.readouterr().out
    assert rows_in("out", DEAD_LETTERS)[:1] == letters
    write_images(folder, "broken.png")
    assert run.main(replay) == 0
    assert "2 images read: 1 detected, 0 dead, 1 skipped" in capfd.readouterr().out


def test_images_that_came_within_messages_are_tried_again_from_their_dead_letters(folder, job, capfd):
    png, named = (folder / "a.png").read_bytes(), str(folder / "a.png")
    inline = json.dumps({"bytes": base64.b64encode(png).decode(), "name": "b.png"}).encode()
    letters = [
        letter("detect", "model_failed", "inline:cam.png", png, extra='{"camera": 7}'),
        letter("decode", "truncated", "inline:broken.png", png[:60]),
        letter("message", "too_large", payload=inline),
        letter("message", "not_allowed", payload=json.dumps({"uri": named}).encode()),
        letter("message", "bad_json", payload=b"{"),
        letter("read", "not_found", named),
    ]
    written = write_rows("out", letters=letters)

    assert job("--retry-dead") == {"read": 5, "detected": 2, "dead": 3, "skipped": 0}, (
        "of the message that is no JSON nothing is read"
    )
    assert "  not allowed are images outside of the folders that --input and --allow-uri-prefix name\n" in capfd.readouterr().out
    assert detected(folder) == ["inline:b.png", "inline:cam.png"]
    (camera,) = [row for row in rows_in(f"{folder}/out") if row["image"]["uri"] == "inline:cam.png"]
    assert camera["extra"] == {"camera": 7} and camera["detections"]
    (folder / written[0]).unlink()
    again = sorted((row["reason"], row.get("payload_base64", "")) for row in rows_in(f"{folder}/out", DEAD_LETTERS))
    refused = json.dumps({"uri": named}).encode()
    assert [(reason, base64.b64decode(payload)) for reason, payload in again] == [
        ("not_allowed", b""),
        ("not_allowed", refused),
        ("truncated", png[:60]),
    ]

    write_rows("out", letters=letters)
    for _ in range(2):
        images = job("--retry-dead")
        assert (images["detected"], images["dead"]) == (0, 2), "what failed twice is tried once, what fails for good not at all"
    allowed = job("--retry-dead", "--allow-uri-prefix", f"{folder}/")
    assert (allowed["detected"], allowed["dead"]) == (1, 0)
    capfd.readouterr()
    job("--retry-dead", "--allow-uri-prefix", f"{folder}/")
    assert " images read: 0 detected, 0 dead, " in capfd.readouterr().out, "its image has a row by now"
    assert detected(folder) == ["a.png", "inline:b.png", "inline:cam.png"]


def test_where_nothing_failed_there_is_nothing_to_do(folder, job, capfd):
    job("--input", "a.png")
    capfd.readouterr()
    job("--retry-dead")
    assert "0 images read: 0 detected" in capfd.readouterr().out


def test_a_folder_without_results_is_refused(folder, bright_model, error_of):
    """A wrong path would else say that nothing had failed, and become a results folder."""
    (folder / "photos").mkdir()
    (folder / "photos" / "a.png").write_bytes(b"")
    before = sorted(folder.rglob("*"))
    for output in ("photos", "missing"):
        error = error_of("--output", output, "--model", bright_model, "--retry-dead")
        assert error.endswith(f"{output}: expected the results folder of an earlier run, found no results in it\n")
    assert sorted(folder.rglob("*")) == before


def test_a_dry_run_says_what_would_be_tried(folder, job, bright_model, capfd):
    letters = [letter("read", "not_found", "a.png"), letter("detect", "model_failed", "inline:b.png", b"png")]
    write_rows("out", letters=letters)
    assert run.main(["--output", "out", "--model", bright_model, "--retry-dead", "--dry-run", "--allow-uri-prefix", "."]) == 0
    said = capfd.readouterr().out
    assert "input    2 images" in said and "a.png" in said and "out/dead_letters/" in said


def test_the_failures_of_another_results_folder_are_tried_into_this_one(folder, job, error_of, bright_model, capfd):
    """A path that is none is refused."""
    write_rows("old", letters=[letter("read", "not_found", str(folder / "a.png")), letter("read", "not_found", "gone.png")])
    before = rows_in("old", DEAD_LETTERS)
    images = job("--retry-dead", "old/", "--allow-uri-prefix", f"{folder}/")
    assert images == {"read": 2, "detected": 1, "dead": 1, "skipped": 0}
    assert [row["image"]["uri"] for row in rows_in(f"{folder}/out")] == [str(folder / "a.png")]
    assert rows_in("old", DEAD_LETTERS) == before
    capfd.readouterr()
    error = error_of("--output", "new", "--model", bright_model, "--retry-dead", "odl")
    assert error == "error: output odl: expected the results folder of an earlier run, found no results in it\n"
