"""Runs that add up in one folder, as a user starts them: each adds what lacks a row."""

import os
import subprocess
import sys
import time

import pytest

from pipeline.results.compact import compact
from pipeline.storage.files import write_file
from tests.conftest import REPO, write_bright_image
from tests.launch.jobs import files_of, images_of, rows_by_name, write_images


def test_runs_add_up_and_what_an_earlier_one_left_is_kept(arguments, out, tmp_path, run_job):
    """A changed image and a new one are done, and no other; a dead letter that is permanent is not tried again.

    What a run that was killed left unfinished goes once it is old; until then that run may be at work.
    """
    write_images(tmp_path / "in", "a.png", "b.png")
    (tmp_path / "in" / "broken.png").touch()
    arguments += ["--samples", 1]
    assert run_job(*arguments)[0] == 0
    first = {name: content for name, content in files_of(out).items() if name.startswith(("detections/", "dead", "runs/"))}

    old, fresh = out / ".staging-0123456789ab", out / ".staging-ba9876543210"
    for folder, age_s in ((old, 90_000), (fresh, 80_000)):
        write_file(f"{folder}/a.parquet", b"half a shard")
        for path in (folder / "a.parquet", folder):
            os.utime(path, (time.time() - age_s,) * 2)
    write_bright_image(tmp_path / "in" / "a.png", (80, 48), (10, 10, 30, 30))
    write_images(tmp_path / "in", "c.png")
    assert "input    2 images, and 2 that are done\n" in run_job(*arguments, "--dry-run")[1]
    code, said, err = run_job(*arguments)
    assert (code, err) == (0, "")
    assert said.startswith("4 images read: 2 detected, 0 dead, 2 skipped (2 of them done before); ")
    assert images_of(out) == {"read": 4, "detected": 2, "dead": 0, "skipped": 2}
    assert rows_by_name(out) == ["a.png", "a.png", "b.png", "c.png"]
    assert rows_by_name(out, "dead_letters") == ["broken.png"]
    assert {name: files_of(out).get(name) for name in first} == first, "no file of the first run has changed"
    assert (old.exists(), fresh.exists()) == (False, True)


def test_other_settings_are_other_rows_and_again_adds_rows(arguments, out, tmp_path, run_job):
    """Only what was done with the same settings counts as done; of equal ones the newest row stays."""
    write_images(tmp_path / "in", "a.png")
    for more in ([], ["--score-threshold", 0.5]):
        assert run_job(*arguments, *more)[0] == 0
    assert rows_by_name(out) == ["a.png", "a.png"]
    code, said, _ = run_job(*arguments, "--score-threshold", 0.5)
    assert code == 0 and "nothing is new" in said and rows_by_name(out) == ["a.png", "a.png"]
    assert run_job(*arguments, "--again")[0] == 0
    assert rows_by_name(out) == ["a.png"] * 3
    compact(str(out))
    assert rows_by_name(out) == ["a.png"] * 2


def test_images_behind_a_link_below_an_input_are_done_once(arguments, out, tmp_path, run_job):
    """Their rows have the name of the real folder, which does not begin as the input does."""
    write_images(tmp_path / "elsewhere", "a.png")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    assert run_job(*arguments)[0] == 0
    code, said, _ = run_job(*arguments)
    assert code == 0 and "nothing is new" in said and rows_by_name(out) == ["a.png"]


NOTHING_NEW = """
import sys
from pipeline.run import main
code = main(sys.argv[1:])
print(code, [name for name in sys.modules if name.partition(".")[0] == "tensorflow"])
"""


@pytest.mark.slow
def test_the_same_command_twice_finds_nothing_new_loads_no_model_and_leaves_the_report_on_top(arguments, out, tmp_path, run_job):
    write_images(tmp_path / "in", "a.png")
    (tmp_path / "in" / "notes.md").touch()
    assert run_job(*arguments)[0] == 0
    summary = (out / "summary.json").read_bytes()
    command = [sys.executable, "-c", NOTHING_NEW, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=True)
    assert "nothing is new: each image has a row" in done.stdout and done.stdout.splitlines()[-1] == "0 []"
    assert (out / "summary.json").read_bytes() == summary and len(list((out / "runs").glob("*/summary.json"))) == 2
    assert len(list((out / "detections").glob("*.parquet"))) == 1
