"""What lies beside the images of a real job: sidecars, strange manifests, and earlier results."""

import json
import shutil
from pathlib import Path

import pytest

from pipeline import run
from tests.launch.jobs import files_of, rows_by_name, rows_of, write_images

SOUND = b"ID3\x03\0\0\0\0\0\0" + b"x" * 100
SIDECARS = {
    "a.txt": b"0 0.5 0.5 0.1 0.1\n",
    "a.png.json": b'{"title": "a.png", "photoTakenTime": {"timestamp": "1"}}',
    "b.JSON": b"{}",
    "Thumbs.db": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 100,
    ".DS_Store": b"\0\0\0\x01Bud1" + b"\0" * 100,
    "a.mp3": SOUND,
    "classes.names": b"cat\n",
    "labels.csv": b"a.png,cat\nabsent.png,dog\n",
    "labels.jsonl": b'{"file_name": "a.png", "label": 3}\n',
    "README": b"",
}


@pytest.fixture
def job(bright_model, capsys):
    """Runs a job that ends with 0; its lines on standard output."""

    def start(*arguments: object) -> list[str]:
        assert run.main([*map(str, arguments), "--model", bright_model, "--batch-sizes=1", "--max-dead-share=1"]) == 0
        return capsys.readouterr().out.splitlines()

    return start


def letters_of(out: Path) -> dict[str, str]:
    return {row["image"]["uri"]: row["reason"] for row in rows_of(out, "dead_letters")}


def summary_of(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize("pattern", ["", "/*", "/**"], ids=["folder", "glob", "deep glob"])
def test_sidecars_beside_photos_are_skipped_counted_and_named_by_kind_and_the_dry_run_agrees(pattern, tmp_path, out, job):
    """What ends like an image, or begins like one, is none of them: it is detected, or a dead letter says why not."""
    folder = tmp_path / "in"
    write_images(folder, "a.png", "b.png")
    shutil.copy(folder / "a.png", folder / "without an ending")
    for name, content in SIDECARS.items():
        (folder / name).write_bytes(content)
    (folder / "broken.jpg").write_bytes(b"no image")
    (folder / "broken.heic").write_bytes(b"no image")
    (folder / "almost").write_bytes((folder / "a.png").read_bytes()[:60])
    sidecars = len(SIDECARS) - (not pattern)  # a folder stands for all files but hidden ones
    kinds = {".json": 2, ".txt": 1, ".db": 1, ".mp3": 1, ".names": 1, ".csv": 1, ".jsonl": 1, "no ending": 2 if pattern else 1}

    command = ("--input", f"{folder}{pattern}", "--output", out)
    skipped = f"skipped: {sidecars} files that are no images ("
    assert job(*command, "--dry-run")[0].startswith(f"input    6 images; {skipped}")
    assert not out.exists()

    (line,) = [line for line in job(*command) if skipped in line]
    assert "2 .json" in line
    assert summary_of(out)["images"] == {"read": 6 + sidecars, "detected": 3, "dead": 3, "skipped": sidecars}
    assert summary_of(out)["skipped_by_kind"] == kinds
    assert rows_by_name(out) == ["a.png", "b.png", "without an ending"]
    assert rows_by_name(out, "dead_letters") == ["almost", "broken.heic", "broken.jpg"]


def test_each_line_of_a_hostile_jsonl_is_an_image_or_one_dead_letter_and_the_job_goes_on(tmp_path, out, job):
    """The dead letter says the file and the line; the dry run knows of them; only their manifest is read again."""
    write_images(tmp_path / "in", "a.png", "b.png")
    lines = [
        b'{"uri": "a.png"}',
        b'{"uri": 5}',
        b"b.png",
        b'{"image": {}, "stage": "message", "reason": "bad_json", "message": "m", "payload_base64": "e30="}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'"' + b"x" * 3_000_000 + b'"',
        b"9" * 5000,
        b'{"uri": "b.png"}',
    ]
    manifest = tmp_path / "in" / "list.jsonl"
    manifest.write_bytes(b"\n".join(lines))
    bad = {f"{manifest}:{number}": "bad_line" for number in range(2, 9)}
    command = ("--input", manifest, "--output", out)
    assert job(*command, "--dry-run")[0] == "input    2 images, and 7 lines of manifests that name none"

    job(*command)
    assert letters_of(out) == bad
    assert summary_of(out)["images"] == {"read": 9, "detected": 2, "dead": 7, "skipped": 0}
    messages = {row["image"]["uri"]: row["message"] for row in rows_of(out, "dead_letters")}
    assert messages[f"{manifest}:3"] == f"{manifest}:3: expected JSON, got 'b.png'"
    assert "--retry-dead" in messages[f"{manifest}:4"]

    assert "9 of them done before" in job(*command)[0], "they fail for good"
    job("--output", out, "--retry-dead")
    assert len(rows_of(out, "dead_letters")) == 7


@pytest.mark.parametrize("link", ["", "input", pytest.param("output", marks=pytest.mark.matrix)])
def test_results_within_the_input_are_no_input_of_the_next_job(link, tmp_path, job):
    """Those of the job itself, and those of others; whichever of the two is named through a link."""
    folder = tmp_path / "photos"
    write_images(folder, "a.png", "b.png")
    (folder / "broken.png").write_bytes(b"")
    (tmp_path / "link").symlink_to(folder)
    source = tmp_path / "link" if link == "input" else folder
    target = tmp_path / "link" if link == "output" else folder
    for number in (1, 2, 3, 3):  # at last with its own, finished results there
        job("--input", f"{source}/**", "--output", f"{target}/run{number}", "--samples=2", "--export=coco")
        out = folder / f"run{number}"
        assert [row["image"]["uri"] for row in rows_of(out)] == [f"{folder}/a.png", f"{folder}/b.png"]
        assert letters_of(out) == {f"{folder}/broken.png": "empty"}
    own = sum(len(files_of(folder / f"run{number}")) + 2 for number in (1, 2))
    by_kind = summary_of(folder / "run3")["skipped_by_kind"]
    assert by_kind["this program's own"] >= own and by_kind.keys() == {"this program's own"}
