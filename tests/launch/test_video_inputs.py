"""Videos as inputs of whole jobs: a frame is an image like others when a job adds, retries, resumes or reconciles."""

import os

import numpy as np
import pytest

from pipeline import reconcile as command
from pipeline import run
from tests.launch.jobs import rows_of, write_images
from tests.launch.test_archived_inputs import names
from tests.read.test_videos import write_video


def bright(_number, wh):
    drawn = np.zeros((*wh[::-1], 3), np.uint8)
    drawn[10:30, 12:40] = 255
    return drawn


def reconciled(capsys, *arguments):
    """Exit code, and the counts that are not zero."""
    capsys.readouterr()
    code = command.main(["--output", "out", "--input", "in", *arguments])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line[:11].strip().isdecimal()]
    return code, {words[1]: int(words[0]) for words in lines if words[0] != "0"}


@pytest.mark.parametrize("given", ["in", "in/*", "in/**/*.mp4"])
def test_the_frames_of_a_found_video_are_images_and_a_dry_run_tries_one(tmp_path, job, given, capsys):
    write_video(tmp_path / "in" / "clip.mp4", 75, draw=bright)
    (tmp_path / "in" / "notes.md").write_text("text")
    assert run.main(["--input", given, "--output", "out", "--model", "digits", "--dry-run"]) == 0
    assert f"tried    {tmp_path}/in/clip.mp4#t=0.000: 64x48" in capsys.readouterr().out
    assert job("--input", given)["detected"] == 3
    assert names(tmp_path) == [f"in/clip.mp4#t={second}.000" for second in range(3)]
    (box,) = rows_of(tmp_path / "out")[0]["detections"]
    assert box["box_xyxy"] == pytest.approx([12, 10, 40, 30], abs=1.5)


def test_a_second_run_reads_the_frames_that_have_no_row_and_reconcile_agrees(tmp_path, job, capsys):
    path = write_video(tmp_path / "in" / "clip.mkv", 75, draw=bright)
    write_images(tmp_path / "in", "a.png")
    assert job("--input", "in")["detected"] == 4
    assert reconciled(capsys) == (0, {"listed": 4, "done": 4})
    assert reconciled(capsys, "--fps", "2") == (1, {"listed": 7, "done": 4, "missing": 3})

    images = job("--input", "in", "--fps", "2")
    assert (images["detected"], images["skipped"]) == (3, 4)
    assert reconciled(capsys, "--fps", "2") == (0, {"listed": 7, "done": 7})

    os.utime(path, (0, 0))  # another content, for all that is known
    assert reconciled(capsys, "--fps", "2") == (1, {"listed": 7, "done": 1, "stale": 6})
    assert job("--input", "in", "--fps", "2")["detected"] == 6
    path.unlink()
    assert reconciled(capsys)[1] == {"listed": 1, "done": 1, "orphaned": 6}
