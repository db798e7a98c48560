"""Checkpoints: what a killed run had done goes over to the next run of its command, whole, once, and from nobody who lives."""

import os
import shutil
import time
from pathlib import Path

import pytest

from pipeline.records import row_bytes
from pipeline.results.other_runs import others, remove_dead, take_over_killed
from pipeline.results.resume_points import ResumePoint, footer_of, resume_points_of, rows_in
from pipeline.results.run import Run
from pipeline.results.run_state import Commit
from pipeline.storage.files import write_file
from pipeline.storage.spill_files import SpillFile, SpillWriter
from tests.results.test_run import dies_at


def write_resume_point(staging, counted, *keyed, complete=True):
    """A checkpoint of spills, each (key, lines)."""
    spiller = SpillWriter(
        f"{staging.folder}/spill",
        0,
        ".resume",
        lambda spills: footer_of(ResumePoint(spills, counted))[: None if complete else -1],
    )
    for key, lines in keyed:
        for line in lines:
            assert list(spiller.add(key, line)) == []
    return list(spiller.flush())


def killed(output, work, same="command", state="running"):
    """Leaves the folder of a run that was killed after some work, in a state."""
    staging = Run.new(str(output))
    os.makedirs(output, exist_ok=True)

    def do():
        with staging.held({"same": same}):
            work(staging)
            if state == "done":
                staging.commit([])
            elif state == "committed":
                written = {**staging.state(), "state": state, "commit": Commit([], {})}
                write_file(f"{staging.folder}/run.json", row_bytes(written))
            os._exit(0)

    dies_at(1000, do)
    assert os.path.isdir(staging.folder)
    return staging


def one_resume_point(staging):
    write_resume_point(staging, 2, ("a", [b"row\n"]), ("b", [b"row\n"]))
    write_resume_point(staging, 1, ("a", [b"cut short\n"]), complete=False)
    write_file(f"{staging.folder}/spill/empty.resume", b"")


def points_of(staging):
    """What was taken over: what was counted, and the content of each spill."""
    return sorted(
        (checkpoint.counted, [b"".join(spill.read()) for _, spill in checkpoint.spills])
        for checkpoint in resume_points_of(staging.folder)
    )


@pytest.fixture
def taking_over(tmp_path):
    """Takes over in a results folder; gives what was."""

    def take(same="command", output=tmp_path):
        staging = Run.new(str(output))
        with staging.held({"same": same}):
            take_over_killed(staging, same)
            return points_of(staging)

    return take


def test_what_stands_in_a_checkpoint_is_taken_over_once(tmp_path, taking_over):
    killed(tmp_path, one_resume_point)
    assert taking_over() == [(2, [b"row\n", b"row\n"])]
    assert taking_over() == []
    assert others(str(tmp_path)) == []


def test_a_run_without_a_checkpoint_leaves_nothing_to_take_over(tmp_path, taking_over):
    killed(tmp_path, lambda staging: write_resume_point(staging, 1, ("a", [b"row\n"]), complete=False))
    assert taking_over() == []


def test_another_command_takes_nothing(tmp_path, taking_over):
    staging = killed(tmp_path, one_resume_point)
    assert taking_over("another command") == []
    assert others(str(tmp_path)) == [staging]


@pytest.mark.parametrize("state", ["committed", "done"])
def test_of_a_run_that_has_committed_nothing_is_left_to_be_done(state, tmp_path, taking_over):
    killed(tmp_path, one_resume_point, state=state)
    assert taking_over() == []


def test_nobody_takes_what_a_run_at_work_has(tmp_path, taking_over):
    staging = Run.new(str(tmp_path))
    with staging.held({"same": "command"}):
        one_resume_point(staging)
        assert taking_over() == []
        assert rows_in(staging.folder) == 2


def test_a_run_that_took_over_may_be_killed_too(tmp_path, taking_over):
    killed(tmp_path, one_resume_point)

    def go_on(staging):
        take_over_killed(staging, "command")
        write_resume_point(staging, 3, ("c", [b"more\n", b"rows\n"]))

    killed(tmp_path, go_on)
    assert taking_over() == [(2, [b"row\n", b"row\n"]), (3, [b"more\nrows\n"])]


@pytest.mark.slow
def test_killed_at_any_moment_of_taking_over_nothing_is_lost_or_there_twice(tmp_path, taking_over):
    first = tmp_path / "first"

    def go_on(staging):
        take_over_killed(staging, "command")
        write_resume_point(staging, 3, ("c", [b"row\n"]))

    killed(first, one_resume_point)
    killed(first, go_on)
    number, died = 0, True
    while died:
        number += 1
        output = tmp_path / str(number)
        shutil.copytree(first, output)

        def work(output=output):
            staging = Run.new(str(output))
            with staging.held({"same": "command"}):
                take_over_killed(staging, "command")
                os._exit(0)

        died = dies_at(number, work)
        assert taking_over(output=output) == [(2, [b"row\n", b"row\n"]), (3, [b"row\n"])]
    assert number > 5


@pytest.mark.parametrize("days", [6, 8])
def test_they_are_kept_for_their_command_for_a_week(days, tmp_path, taking_over):
    """Also when another one has ended well there, which removes what else is left of killed runs."""
    staging = killed(tmp_path, one_resume_point)
    without = killed(tmp_path, lambda staging: write_resume_point(staging, 1, ("a", [b"row\n"]), complete=False))
    for path in Path(staging.folder).rglob("*"):
        os.utime(path, (time.time() - days * 86_400,) * 2)
    remove_dead(str(tmp_path))
    assert others(str(tmp_path)) == ([staging] if days < 7 else [])
    assert not os.path.exists(without.folder)
    assert taking_over() == ([(2, [b"row\n", b"row\n"])] if days < 7 else [])


@pytest.mark.parametrize("state", ["committed", "done"])
def test_of_a_run_that_has_committed_nothing_is_kept(state, tmp_path):
    killed(tmp_path, one_resume_point, state=state)
    remove_dead(str(tmp_path))
    assert others(str(tmp_path)) == []


@pytest.mark.parametrize("spoiled", [b"\x02", b"\x80"], ids=["of a later version", "a pickle"])
def test_what_another_version_of_this_program_wrote_is_left_out(spoiled, tmp_path, taking_over, capfd):
    def work(staging):
        footer = footer_of(ResumePoint([("a", SpillFile("", 1, 0, 4))], 1))
        write_file(f"{staging.folder}/spill/0a.resume", b"row\n" + spoiled + footer[1:])
        write_resume_point(staging, 1, ("b", [b"another\n"]))

    killed(tmp_path, work)
    assert taking_over() == [(1, [b"another\n"])]
    assert "0a.resume cannot be read and counts as absent" in capfd.readouterr().err
