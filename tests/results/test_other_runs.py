"""Runs that go on without a launcher: the next one finds what their workers tell, and others leave it alone."""

import os
import time

from pipeline.results.other_runs import attached_run, remove_dead
from pipeline.results.run import Run
from pipeline.results.run_state import DetachedJob
from pipeline.storage.files import write_file

WEEK_SECONDS = 7 * 86_400
SETTINGS = {"mode": "streaming"}


def left_in(output: str, run: str, job: str) -> tuple[str, DetachedJob]:
    staging, left = Run(output, run), DetachedJob(job, 1.5, 2.5)
    with staging.held({"settings": SETTINGS}):
        staging.detach(SETTINGS, left)
    return staging, left


def test_a_run_that_was_left_is_found_by_its_job(tmp_path):
    left = [left_in(str(tmp_path), run, job) for run, job in (("0a", "one"), ("0b", "two"))]
    assert [attached_run(str(tmp_path), job) for job in ("one", "two")] == left


def test_of_other_jobs_and_of_none_nothing_is_found(tmp_path):
    left_in(str(tmp_path), "0a", "one")
    with Run(str(tmp_path), "0b").held({"settings": SETTINGS}):
        assert [attached_run(str(tmp_path), job) for job in ("other", "")] == [None, None]


def test_it_is_found_again_where_the_next_launcher_was_cut_short(tmp_path):
    staging, left = left_in(str(tmp_path), "0a", "one")
    with staging.held({"settings": SETTINGS, "detached": left}):
        pass
    assert attached_run(str(tmp_path), "one") == (staging, left)


def test_another_run_leaves_it_alone_while_its_workers_tell_something_within_a_week(tmp_path):
    staging, left = left_in(str(tmp_path), "0a", "one")
    earlier = time.time() - WEEK_SECONDS - 60
    for path in (tmp_path / ".staging-0a").rglob("*"):
        os.utime(path, (earlier, earlier))
    write_file(f"{staging.folder}/figures/0c", b"")
    remove_dead(str(tmp_path))
    assert attached_run(str(tmp_path), "one") == (staging, left)
    os.utime(f"{staging.folder}/figures/0c", (earlier, earlier))
    remove_dead(str(tmp_path))
    assert attached_run(str(tmp_path), "one") is None and not os.path.exists(staging.folder)
