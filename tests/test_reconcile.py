"""The command that says what of a listing has a result: its table, its manifests, its exit codes."""

import json
import re

import pytest

from models import progress
from pipeline import run
from pipeline.reconcile import main
from tests.conftest import write_bright_image
from tests.shard_rows import detected, failed, write_rows


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("2026/11/20/a", "2026/11/20/b", "2026/11/21/c"):
        write_bright_image(tmp_path / "in" / f"{name}.png", (64, 48), (10, 12, 30, 36))
    return tmp_path


def reconciled(capsys, *arguments):
    """Exit code, and what was said."""
    code = main(["--input", "in/**", "--output", "out", *arguments])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err


def test_what_a_job_did_is_complete_and_what_came_afterwards_is_missing(folder, bright_model, capsys):
    assert run.main(["--input", "in/**", "--output", "out", "--model", bright_model]) == 0
    capsys.readouterr()
    code, said, _ = reconciled(capsys, "--model", bright_model)
    assert (code, said[:2], said[-1]) == (0, ["          3 listed", "          3 done"], "complete")

    write_bright_image(folder / "in" / "d.png", (64, 48), (10, 12, 30, 36))
    (folder / "in" / "2026/11/20/a.png").write_bytes((folder / "in" / "2026/11/20/a.png").read_bytes() + b" ")
    code, said, _ = reconciled(capsys, "--write-missing", "missing.jsonl", "--write-stale", "stale.jsonl")
    assert code == 1
    assert said == [
        "          4 listed",
        "          2 done",
        "          0 dead",
        "          1 stale",
        f"            {folder}/in/2026/11/20/a.png",
        "          1 missing",
        f"            {folder}/in/d.png",
        "          0 orphaned",
        "not complete: the same detect-objects run does what is missing or stale",
    ]
    for name, uri in (("missing", "in/d.png"), ("stale", "in/2026/11/20/a.png")):
        (row,) = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
        assert row["uri"] == f"{folder}/{uri}" and re.fullmatch(r"\d+-\d+", row["generation"])
    reconciled(capsys, "--write-missing", "one.jsonl", "--write-stale", "one.jsonl")
    assert (folder / "one.jsonl").read_text() in [(folder / f"{name}.jsonl").read_text() for name in ("missing", "stale")]
    assert run.main(["--input", "missing.jsonl", "--output", "mended", "--model", bright_model]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--input", "in/**"], "error: no output: expected --output"),
        (["--output", "out"], "error: no input: expected --input"),
        (["--input", "in/**", "--output", "out"], "error: output 'out': expected a results folder"),
        (["--input", "in/**", "--output", "projects/p/topics/t"], "error: no output: expected --output"),
        (["--input", "gs://", "--output", "out"], "error: input gs:"),
        (["--input", "in/{date}", "--output", "out"], "error: "),
        (["--input", "in/**", "--output", "out", "--model", "nothing-here"], "error: model nothing-here"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_is_one_line(folder, capsys, arguments, said):
    code = main(arguments)
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert captured.err.startswith(said)
    assert not (folder / "out").exists()


def test_a_manifest_has_its_name_only_when_all_is_told(folder, capsys):
    (folder / "list.txt").write_text("in/a.png\n")
    (folder / "loop.txt").symlink_to("loop.txt")
    code = main(["--input", "list.txt", "loop.txt", "--output", "out", "--write-missing", "missing.jsonl"])
    assert (code, capsys.readouterr().err.count("\n")) == (2, 1)
    assert sorted(path.name for path in folder.iterdir()) == ["in", "list.txt", "loop.txt"]


def test_on_cloud_storage(gcs_bucket, capsys):
    for name in ("a", "b"):
        gcs_bucket.blob(f"raw/2026/11/20/{name}.png").upload_from_string(b"x")
    output, uri = f"gs://{gcs_bucket.name}/out", f"gs://{gcs_bucket.name}/raw/2026/11/20/a.png"
    generation = str(gcs_bucket.get_blob("raw/2026/11/20/a.png").generation)
    write_rows(output, [detected(uri, generation)])
    assert main(["--input", f"gs://{gcs_bucket.name}/raw/**", "--output", output]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["          2 listed", "          1 done"]


def test_a_reconciliation_that_takes_long_shows_how_far_it_is(folder, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0)
    write_rows("out", [detected("in/2026/11/20/a.png")], [failed(f"{folder}/in/2026/11/20/b.png", "")])
    code, said, shown = reconciled(capsys)
    assert code == 1 and "          1 dead" in said
    assert "comparing: 3 images" in shown
