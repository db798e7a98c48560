"""What lies beside the images of a real job: sidecars, strange manifests, earlier results, and commands that look alike."""

import json
import os
import shutil
from pathlib import Path

import pytest

from pipeline import run
from pipeline.errors import BUSY
from tests.conftest import write_bright_image
from tests.launch.jobs import files_of, paused_with_lock, rows_of

BOX = (10, 10, 30, 30)
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
    """Runs a job: (exit code, its lines on standard output, its lines on standard error)."""

    def start(*arguments: object) -> tuple[int, list[str], list[str]]:
        code = run.main([*map(str, arguments), "--model", bright_model, "--batch-sizes", "1"])
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err.splitlines()

    return start


def images_of(out: Path) -> list[str]:
    return sorted(row["image"]["uri"] for row in rows_of(out))


def letters_of(out: Path) -> dict[str, str]:
    return {row["image"]["uri"]: row["reason"] for row in rows_of(out, "dead_letters")}


def summary_of(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def photos(folder: Path, *names: str) -> None:
    for name in names:
        write_bright_image(folder / name, (64, 48), BOX)


@pytest.mark.parametrize("pattern", ["", "/*", "/**"], ids=["folder", "glob", "deep glob"])
def test_sidecars_beside_photos_are_skipped_counted_and_named_by_kind_and_the_dry_run_agrees(pattern, tmp_path, job):
    """What ends like an image, or begins like one, is none of them: it is detected, or a dead letter says why not."""
    folder, out = tmp_path / "in", tmp_path / "out"
    photos(folder, "a.png", "b.png")
    shutil.copy(folder / "a.png", folder / "without an ending")
    for name, content in SIDECARS.items():
        (folder / name).write_bytes(content)
    (folder / "broken.jpg").write_bytes(b"no image")
    (folder / "broken.heic").write_bytes(b"no image")
    (folder / "almost").write_bytes((folder / "a.png").read_bytes()[:60])
    sidecars = len(SIDECARS) - (not pattern)  # a folder stands for all files but hidden ones
    kinds = {".json": 2, ".txt": 1, ".db": 1, ".mp3": 1, ".names": 1, ".csv": 1, ".jsonl": 1, "no ending": 2 if pattern else 1}

    command = ("--input", f"{folder}{pattern}", "--output", out, "--max-dead-share", "0.6")
    code, plan, _ = job(*command, "--dry-run")
    assert code == 0 and not out.exists()
    said = f"skipped: {sidecars} files that are no images ("
    assert plan[0].startswith(f"input    6 images; {said}")

    code, lines, _ = job(*command)
    assert code == 0
    assert summary_of(out)["images"] == {"read": 6 + sidecars, "detected": 3, "dead": 3, "skipped": sidecars}
    assert summary_of(out)["skipped_by_kind"] == kinds
    assert len([line for line in lines if said in line and "2 .json" in line]) == 1
    assert images_of(out) == [f"{folder}/{name}" for name in ("a.png", "b.png", "without an ending")]
    assert letters_of(out).keys() == {f"{folder}/{name}" for name in ("almost", "broken.heic", "broken.jpg")}


def test_each_line_of_a_hostile_jsonl_is_an_image_or_one_dead_letter_and_the_job_goes_on(tmp_path, job):
    """The dead letter says the file and the line; the dry run knows of them; only their manifest is read again."""
    folder, out = tmp_path / "in", tmp_path / "out"
    photos(folder, "a.png", "b.png")
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
    manifest = folder / "list.jsonl"
    manifest.write_bytes(b"\n".join(lines))
    bad = {f"{manifest}:{number}": "bad_line" for number in range(2, 9)}
    command = ("--input", manifest, "--output", out, "--max-dead-share", "1")

    code, plan, _ = job(*command, "--dry-run")
    assert code == 0
    assert plan[0] == "input    2 images, and 7 lines of manifests that name none"

    assert job(*command)[0] == 0
    assert letters_of(out) == bad
    assert summary_of(out)["images"] == {"read": 9, "detected": 2, "dead": 7, "skipped": 0}
    messages = {row["image"]["uri"]: row["message"] for row in rows_of(out, "dead_letters")}
    assert messages[f"{manifest}:3"] == f"{manifest}:3: expected JSON, got 'b.png'"
    assert "--retry-dead" in messages[f"{manifest}:4"]

    code, lines, _ = job(*command)
    assert code == 0 and "9 of them done before" in lines[0], "they fail for good"
    assert len(rows_of(out, "dead_letters")) == 7
    assert job("--output", out, "--retry-dead", "--max-dead-share", "1")[0] == 0
    assert len(rows_of(out, "dead_letters")) == 7


@pytest.mark.parametrize("link", ["", "input", "output"])
def test_results_within_the_input_are_no_input_of_the_next_job(link, tmp_path, job):
    """Those of the job itself, and those of others; whichever of the two is named through a link."""
    folder = tmp_path / "photos"
    photos(folder, "a.png", "b.png")
    (folder / "broken.png").write_bytes(b"")
    (tmp_path / "link").symlink_to(folder)
    source = tmp_path / "link" if link == "input" else folder
    target = tmp_path / "link" if link == "output" else folder
    flags = ("--samples", "2", "--max-dead-share", "1", "--export", "coco")
    for number in (1, 2, 3):
        assert job("--input", f"{source}/**", "--output", f"{target}/run{number}", *flags)[0] == 0
        out = folder / f"run{number}"
        assert images_of(out) == [f"{folder}/a.png", f"{folder}/b.png"]
        assert letters_of(out) == {f"{folder}/broken.png": "empty"}
    own = sum(len(files_of(folder / f"run{number}")) + 2 for number in (1, 2))
    by_kind = summary_of(folder / "run3")["skipped_by_kind"]
    assert by_kind["this program's own"] >= own and by_kind.keys() == {"this program's own"}
    assert job("--input", f"{source}/**", "--output", f"{target}/run3", *flags)[0] == 0  # with its own, finished results there
    assert images_of(folder / "run3") == [f"{folder}/a.png", f"{folder}/b.png"]


def test_two_names_of_one_folder_are_one_command(tmp_path, job, bright_model):
    """A job on a link to a folder meets the job on the folder itself."""
    photos(tmp_path / "in", "a.png")
    os.symlink(tmp_path / "in", tmp_path / "link")
    out = tmp_path / "out"
    command = ["--input", tmp_path / "in", "--output", out, "--model", bright_model, "--batch-sizes", 1]
    with paused_with_lock(command, tmp_path / "log"):
        assert job("--input", tmp_path / "link", "--output", out, "--when-busy", "stop")[0] == BUSY
