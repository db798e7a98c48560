"""Runs that add up in one folder, as a user starts them."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from pipeline.compact import compact
from pipeline.results.write_policy import run_name
from tests.conftest import REPO, write_bright_image
from tests.forked_jobs import SystemCall
from tests.launch.jobs import files_of, images_of, rows_by_name, rows_of, without_run, write_images


def test_runs_add_up_and_what_an_earlier_one_left_is_kept(tmp_path, run_job, bright_model):
    """A changed image and a new one are done, and no other; a dead letter that is for good is not tried again."""
    write_images(tmp_path / "in", "a.png", "b.png")
    (tmp_path / "in" / "broken.png").touch()
    out = tmp_path / "out"
    arguments = ["--input", tmp_path / "in", "--output", out, "--model", bright_model, "--coco", "--samples", 1]
    assert run_job(*arguments)[0] == 0
    first = files_of(out)
    summary = json.loads((out / "summary.json").read_text())

    write_bright_image(tmp_path / "in" / "a.png", (80, 48), (10, 10, 30, 30))
    write_images(tmp_path / "in", "c.png")
    code, said, err = run_job(*arguments, "--only-new")

    assert (code, err) == (0, "")
    assert said.startswith("4 images read: 2 detected, 0 dead, 2 skipped (2 of them done before); ")
    assert (images_of(out), rows_by_name(out)) == (
        {"read": 4, "detected": 2, "dead": 0, "skipped": 2},
        ["a.png", "a.png", "b.png", "c.png"],
    )
    assert rows_by_name(out, "dead_letters") == ["broken.png"]
    kept = f"runs/{summary['name']}"
    beside = ("coco/", "samples/")
    moved = {f"{kept}/{name}" if name.startswith(beside) else name: content for name, content in first.items()}
    assert {name: files_of(out).get(name) for name in moved} == moved
    assert json.loads((out / kept / "summary.json").read_text()) == summary
    assert len(json.loads((out / "coco" / "images.json").read_text())["images"]) == 2

    before = files_of(out)
    assert run_job(*arguments, "--only-new")[0] == 0
    assert images_of(out) == {"read": 4, "detected": 0, "dead": 0, "skipped": 4}
    rows = {name: content for name, content in before.items() if not name.startswith(("coco/", "samples/", "runs/"))}
    assert {name: files_of(out).get(name) for name in rows} == rows
    assert rows_by_name(out) == ["a.png", "a.png", "b.png", "c.png"]

    code, _, err = run_job(*arguments)
    assert code == 2 and "holds the results of several runs; give --only-new to add what they lack, --replace" in err
    assert run_job(*arguments, "--replace")[0] == 0
    assert rows_by_name(out) == ["a.png", "b.png", "c.png"]


def test_other_settings_are_other_rows_and_stand_beside(tmp_path, run_job, bright_model):
    """`--only-new` takes for done only what was done with the same settings."""
    write_images(tmp_path / "in", "a.png")
    out = tmp_path / "out"
    arguments = ["--input", tmp_path / "in", "--output", out, "--model", bright_model]
    for more in ([], ["--only-new", "--score-threshold", 0.5], ["--only-new", "--score-threshold", 0.5]):
        assert run_job(*arguments, *more)[0] == 0
    assert rows_by_name(out) == ["a.png", "a.png"]
    assert images_of(out)["skipped"] == 1
    assert (
        without_run(name for name in files_of(out) if name.startswith("index/det"))
        == ["index/detections-00000-of-00001.parquet"] * 2
    )


@pytest.mark.parametrize("first", [[], ["--only-new"]], ids=["a plain job first", "one that adds first"])
def test_the_result_of_the_later_job_stays_also_in_a_copy_of_the_folder(tmp_path, run_job, bright_model, first):
    """All files of a copy are as old as the copy was made in which order, not as their rows."""
    write_images(tmp_path / "in", "a.png")
    arguments = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--model", bright_model]
    assert run_job(*arguments, *first)[0] == 0
    earlier = list(tmp_path.glob("out/detections/*"))
    assert run_job(*arguments, "--only-new", "--score-threshold", 0.95)[0] == 0  # the model's boxes have 0.9
    for path in tmp_path.glob("out/detections/*"):
        seconds = 2e9 if path in earlier else 1e9
        os.utime(path, (seconds, seconds))
    out = shutil.copytree(tmp_path / "out", tmp_path / "copy")
    assert compact(str(out)).dropped == 1
    assert [row["detections"] for row in rows_of(out)] == [[]]


def test_a_plan_says_how_many_are_done(tmp_path, run_job, bright_model):
    write_images(tmp_path / "in", "a.png", "b.png")
    out = tmp_path / "out"
    arguments = ["--output", out, "--model", bright_model, "--input"]
    assert run_job(*arguments, tmp_path / "in" / "a.png")[0] == 0
    code, said, _ = run_job(*arguments, tmp_path / "in", "--only-new", "--dry-run")
    assert code == 0 and "input    1 images, and 1 that are done\n" in said


def test_to_add_and_to_replace_at_once_is_refused(tmp_path, run_job, bright_model):
    write_images(tmp_path / "in", "a.png")
    arguments = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--model", bright_model]
    code, _, err = run_job(*arguments, "--only-new", "--replace")
    assert (code, err.count("\n")) == (2, 1) and err.startswith("error: only_new and replace: expected one of them")


def test_a_job_says_under_which_name_its_files_come(tmp_path, run_job, bright_model):
    """So that a compaction knows them while the job is at work."""
    write_images(tmp_path / "in", "a.png")
    out = tmp_path / "out"
    arguments = ["--input", tmp_path / "in", "--output", out, "--model", bright_model, "--only-new"]
    assert run_job(*arguments, at=SystemCall("os.rename:/run.json#3", None))[0] == 1
    (said,) = out.glob(".staging-*/run.json")
    about = json.loads(said.read_text())
    name = run_name(about["settings"], about["started_at"])
    assert [path.name for path in (out / "detections").iterdir()] == [f"detections-{name}-00000-of-00001.jsonl"]


NOTHING_NEW = """
import sys
from pipeline.run import main
code = main(sys.argv[1:])
print(code, [name for name in sys.modules if name.partition(".")[0] == "tensorflow"])
"""


@pytest.mark.slow
def test_a_run_that_finds_nothing_new_loads_no_model_and_ends_with_one_line(tmp_path, run_job, bright_model):
    write_images(tmp_path / "in", "a.png")
    (tmp_path / "in" / "notes.md").touch()
    arguments = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--model", bright_model]
    assert run_job(*arguments)[0] == 0
    command = [sys.executable, "-c", NOTHING_NEW, *map(str, arguments), "--only-new"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=True)
    said, ended = done.stdout.splitlines()
    assert said.startswith("2 images read: 0 detected, 0 dead, 2 skipped (1 of them done before); ") and ended == "0 []"
