"""The results folder as a user meets it: other jobs, other settings and other people's files."""

import os
import signal
import time

from tests.launch.jobs import WORK_IMAGES, images_of, rows_of, signal_at_work, write_images, write_work
from tests.shard_rows import rows_in


def test_of_a_killed_job_its_rows_stay_and_its_unfinished_files_go_once_they_are_old(out, tmp_path, run_job, bright_model):
    """SIGKILL while images are worked on: readers find whole rows, and a later job, of whatever images, cleans up."""
    write_work(tmp_path / "work")
    write_images(tmp_path / "in", "a.png", "b.png")
    arguments = ["--output", out, "--model", bright_model, "--batch-sizes", 16, "--input"]
    signal_at_work(signal.SIGKILL, [*arguments, tmp_path / "work"], out)
    done = [row["image"]["uri"] for row in rows_in(str(out))]
    assert 0 < len(done) == len({*done}) < WORK_IMAGES
    (unfinished,) = out.glob(".staging-*")
    assert run_job(*arguments, tmp_path / "in" / "a.png")[0] == 0
    assert unfinished.exists(), "it may be at work"
    for path in (unfinished, *unfinished.iterdir()):
        os.utime(path, (time.time() - 90_000,) * 2)
    assert run_job(*arguments, tmp_path / "in")[0] == 0
    assert not list(out.glob(".staging-*"))
    added = [f"{tmp_path}/in/a.png", f"{tmp_path}/in/b.png"]
    assert sorted(row["image"]["uri"] for row in rows_in(str(out))) == sorted([*done, *added])


def test_input_and_output_may_be_one_folder(tmp_path, run_job, bright_model):
    """Only what this program wrote is left out, and it is counted; images that others put among the results are read."""
    write_images(tmp_path, "a.png", "samples/a.png", "detections/deep/b.png")
    (tmp_path / "dead_letters").mkdir()
    (tmp_path / "dead_letters" / "broken.png").touch()
    arguments = ["--input", tmp_path, "--output", tmp_path, "--model", bright_model, "--samples", 2, "--export", "coco"]
    own = 0
    for rows in (1, 2):
        assert run_job(*arguments, "--again")[0] == 0
        assert images_of(tmp_path) == {"read": 4 + own, "detected": 3, "dead": 1, "skipped": own}
        names = [f"{tmp_path}/{name}" for name in ("a.png", "detections/deep/b.png", "samples/a.png")]
        assert [row["image"]["uri"] for row in rows_of(tmp_path)] == [name for name in names for _ in range(rows)]
        own = len([path for path in tmp_path.rglob("*") if path.is_file()]) - 4
