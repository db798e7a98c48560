"""Two jobs at the same images: what the second one does, says and exits with, and what becomes of a job that lost its images."""

import functools
import itertools
import threading
import types

import pytest
from pipeline.results.claims import EVERYTHING, LeaseTimes
from pipeline.results.lease import leased

from pipeline import run
from pipeline.config import load_config
from pipeline.launch import batch
from pipeline.results import cancellation
from pipeline.results.run import Run, fence
from tests.conftest import write_bright_image
from tests.launch.jobs import files_of, rows_of
from tests.results.test_lease import left, take_over


@pytest.fixture
def places(tmp_path):
    """(input, output, arguments of a job)"""
    write_bright_image(tmp_path / "in" / "a.png", (64, 48), (10, 10, 30, 30))
    return tmp_path / "in", tmp_path / "out", ["--input", f"{tmp_path}/in", "--output", f"{tmp_path}/out"]


def another_run(out, *patterns):
    return leased(Run.new(str(out)).folder, patterns, wait_s=0.0, lost=lambda: None, fence=fence)


@pytest.mark.parametrize("at_work", ["the same", "a part", "everything"])
def test_one_that_shall_skip_says_so_in_one_line_and_is_done(at_work, places, bright_model, capsys):
    """With `--when-busy skip` a scheduler's second job exits with 0."""
    folder, out, arguments = places
    with another_run(out, {"the same": str(folder), "a part": f"{folder}/a.png", "everything": EVERYTHING}[at_work]):
        assert run.main([*arguments, "--model", bright_model, "--when-busy", "skip"]) == 0
        said, err = capsys.readouterr()
        assert said.startswith(f"skipped: output {out}: run ") and said.endswith("; nothing was done\n") and said.count("\n") == 1
        assert (err, files_of(out).keys()) == ("", {name for name in left(str(out)) if name.startswith(".lease-")})


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        pytest.param(["--when-busy", "stop"], "; --when-busy wait waits for it", id="stop"),
        pytest.param(["--busy-wait-s", "0.1"], ", and this one waited for 0.1 s", id="wait, as nobody says otherwise"),
    ],
)
def test_one_that_cannot_wait_ends_with_an_exit_code_of_its_own(flags, end, places, bright_model, capsys):
    """Exit code 3, whether it does not wait or has waited for as long as it may."""
    folder, out, arguments = places
    with another_run(out, str(folder)):
        assert run.main([*arguments, "--model", bright_model, *flags]) == run.BUSY == 3
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"error: output {out}: run ") and said.endswith(f"{end}")
        assert rows_of(out) == []


def test_one_that_replaces_what_is_there_waits_for_all(places, bright_model):
    """Also for a job on other images, whose rows it would remove."""
    folder, out, arguments = places
    with another_run(out, f"{folder}/../elsewhere/*"):
        assert run.main([*arguments, "--model", bright_model, "--when-busy", "stop", "--replace"]) == run.BUSY


def test_a_look_before_a_run_and_other_images_need_no_wait(places, bright_model, capsys):
    folder, out, arguments = places
    with another_run(out, str(folder)):
        assert run.main([*arguments, "--model", bright_model, "--dry-run"]) == 0
    with another_run(out, f"{folder}/../elsewhere/*"):
        assert run.main([*arguments, "--model", bright_model, "--when-busy", "stop"]) == 0
    assert len(rows_of(out)) == 1
    assert "waiting" not in capsys.readouterr().err
    assert not list(out.glob(".*"))


def test_of_two_backfills_that_started_in_the_same_second_none_overwrites_the_other_ones_rows(places, bright_model, monkeypatch):
    """The second one has waited, and an image has come meanwhile."""
    folder, out, _ = places
    clock = types.SimpleNamespace(time=itertools.count(1_795_000_000.0).__next__)
    monkeypatch.setattr(batch, "time", clock)
    config = load_config([], {"input": [str(folder)], "output": str(out), "model.path": bright_model, "only_new": True})
    jobs = [batch.prepare(config, [], "python -m pipeline.run", 1_794_999_000.0) for _ in range(2)]
    assert batch.run(jobs[0]) == 0
    write_bright_image(folder / "b.png", (64, 48), (10, 10, 30, 30))
    assert batch.run(jobs[1]) == 0
    assert sorted(row["image"]["uri"] for row in rows_of(out)) == [f"{folder}/a.png", f"{folder}/b.png"]


def test_a_job_that_lost_its_images_while_it_worked_ends_at_once_and_commits_nothing(
    gcs_bucket, places, bright_model, monkeypatch, capsys
):
    """Its exit code is that of one that met another run."""
    monkeypatch.setattr(batch, "leased", functools.partial(leased, times=LeaseTimes(renew_s=0.05)))
    output, ended = f"gs://{gcs_bucket.name}/out", threading.Event()

    def take() -> None:
        while not gcs_bucket.get_blob("out/.lease"):
            ended.wait(0.05)
        while not ended.wait(0.05):
            take_over(output)  # a renewal under way may undo it here, where nothing is written on a condition

    thread = threading.Thread(target=take)
    thread.start()
    try:
        code = run.main([*places[2][:2], "--output", output, "--model", bright_model])
    finally:
        ended.set()
        thread.join()
    said = capsys.readouterr()
    assert (code, said.out) == (run.BUSY, "")
    assert said.err.splitlines()[-1] == (
        f"error: output {output}: another run took over, since this one had not renewed its lease; nothing was committed"
    )
    assert [name for name in left(output) if ".lease" not in name] == []
    assert not cancellation.stopped() and not cancellation.steps_are_cancelled(), "the next run is not stopped"
