"""The results folder as a user meets it: other jobs, other settings and other people's files."""

import os
import signal
import time

from tests.launch.jobs import WORK_IMAGES, files_of, images_of, rows_by_name, rows_of, signal_at_work, write_images, write_work
from tests.shard_rows import rows_in


def test_of_a_killed_job_its_rows_stay_and_its_unfinished_files_go_once_they_are_old(tmp_path, run_job, bright_model):
    """SIGKILL while images are worked on: readers find whole rows, and a later job, of whatever images, cleans up."""
    write_work(tmp_path / "work")
    write_images(tmp_path / "in", "a.png", "b.png")
    out = tmp_path / "out"
    arguments = ["--output", out, "--model", bright_model, "--request-images", 16, "--input"]
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
    assert sorted(row["image"]["uri"] for row in rows_in(str(out))) == sorted(
        [*done, f"{tmp_path}/in/a.png", f"{tmp_path}/in/b.png"]
    )


def test_dead_letters_as_the_input_of_their_own_folder_add_what_was_mended(tmp_path, run_job, bright_model):
    write_images(tmp_path / "in", "good.png")
    (tmp_path / "in" / "broken.png").touch()
    out = tmp_path / "out"
    assert run_job("--input", tmp_path / "in", "--output", out, "--model", bright_model, "--samples", 1)[0] == 0
    before = {name: content for name, content in files_of(out).items() if not name.startswith("samples/")}
    write_images(tmp_path / "in", "broken.png")
    again = ["--input", f"{out}/dead_letters/*.jsonl", "--output", out, "--model", bright_model, "--max-dead-share", 1]
    assert run_job(*again)[0] == 0
    assert [row["reason"] for row in rows_of(out, "dead_letters")] == ["empty", "not_allowed"], "found by a wildcard"
    assert run_job(*again, "--allow-uri-prefix", tmp_path)[0] == 0
    assert rows_by_name(out) == ["broken.png", "good.png"]
    assert {name: files_of(out).get(name) for name in before} == before


def test_samples_are_those_of_the_newest_run_and_those_of_somebody_else_stay(tmp_path, run_job, bright_model):
    write_images(tmp_path / "in", "a.png", "b.png")
    out = tmp_path / "out"
    arguments = ["--input", tmp_path / "in", "--output", out, "--model", bright_model]
    assert run_job(*arguments, "--samples", 2)[0] == 0
    (first,) = (out / "runs").iterdir()
    write_images(out / "samples", "003-mine.jpg", "mine.jpg")
    (tmp_path / "in" / "a.png").rename(tmp_path / "in" / "c.png")
    assert run_job(*arguments, "--samples", 1)[0] == 0
    assert sorted(path.name for path in (out / "samples").iterdir()) == ["001-c.jpg", "003-mine.jpg", "mine.jpg"]
    assert len(list((first / "samples").iterdir())) == 2


def test_input_and_output_may_be_one_folder(tmp_path, run_job, bright_model):
    """Only what this program wrote is left out, and it is counted; images that others put among the results are read."""
    write_images(tmp_path, "a.png", "samples/a.png", "detections/deep/b.png")
    (tmp_path / "dead_letters").mkdir()
    (tmp_path / "dead_letters" / "broken.png").touch()
    arguments = ["--input", tmp_path, "--output", tmp_path, "--model", bright_model, "--samples", 2, "--export", "coco"]
    own = len([path for path in tmp_path.rglob("*") if path.is_file()]) - 4
    assert own == 0
    for rows in (1, 2):
        assert run_job(*arguments, "--again")[0] == 0
        assert images_of(tmp_path) == {"read": 4 + own, "detected": 3, "dead": 1, "skipped": own}
        assert [row["image"]["uri"] for row in rows_of(tmp_path)] == [
            f"{tmp_path}/{name}" for name in ("a.png", "detections/deep/b.png", "samples/a.png") for _ in range(rows)
        ]
        own = len([path for path in tmp_path.rglob("*") if path.is_file()]) - 4
