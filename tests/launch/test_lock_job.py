"""Two jobs for one results folder: equal commands do the work once, different ones run side by side."""

import concurrent.futures
import contextlib
import signal

import pytest

from pipeline import run
from pipeline.errors import BUSY
from pipeline.launch import batch
from pipeline.results.lock import locked
from pipeline.results.reader import list_shards
from tests.forked_jobs import ForkedJob
from tests.launch.jobs import paused_with_lock, rows_by_name, rows_of, write_images
from tests.processes import wait_until
from tests.shard_rows import detected, rows_in, write_rows

DAYS = 400


@pytest.fixture
def arguments(arguments, tmp_path):
    """Of a job over one image."""
    write_images(tmp_path / "in", "a.png")
    return arguments


def main(*arguments):
    return run.main([*map(str, arguments)])


def test_of_two_equal_commands_the_second_waits_and_finds_nothing_new(arguments, out, tmp_path):
    said = (tmp_path / "second").read_text
    with paused_with_lock(arguments, tmp_path / "first") as first, ForkedJob(arguments, tmp_path / "second") as second:
        wait_until(lambda: (tmp_path / "second").exists() and "waiting: output" in said(), lambda: "no line", second)
        first.send_signal(signal.SIGCONT)
        assert (first.wait(), second.wait()) == (0, 0), said()
    assert "nothing is new" in said()
    assert rows_by_name(out) == ["a.png"]
    assert not list(out.glob(".*"))


def test_a_folder_that_became_a_link_during_the_wait_is_not_written_to(arguments, out, tmp_path, capsys, monkeypatch):
    def waited(*_arguments, **_more):
        out.joinpath("detections").symlink_to(tmp_path)
        return contextlib.nullcontext()

    monkeypatch.setattr(batch, "locked", waited)
    assert main(*arguments) == 2
    assert "expected detections to be a folder of its own, it is a link" in capsys.readouterr().err


def test_different_commands_run_side_by_side(arguments, out, tmp_path):
    """Another input, or other settings: neither waits, and each adds its rows."""
    write_images(tmp_path / "next", "b.png")
    with paused_with_lock(arguments, tmp_path / "log") as first:
        others = (["--input", tmp_path / "next", *arguments[2:]], [*arguments, "--score-threshold", 0.5])
        for other in others:
            assert main(*other, "--when-busy", "stop") == 0
        assert rows_by_name(out) == ["a.png", "b.png"]
        first.send_signal(signal.SIGCONT)
        assert first.wait() == 0, (tmp_path / "log").read_text()
    assert rows_by_name(out) == ["a.png", "a.png", "b.png"]


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        (["in"], ["./in/"], True),
        (["in"], ["link"], True),
        (["in"], ["in/**"], False),  # finds hidden files, too
        (["{date}", "--dates", "2026-11-20"], ["{date}", "--dates", "2026-11-21"], False),
    ],
)
def test_commands_are_equal_if_they_name_the_same_images(tmp_path, monkeypatch, bright_model, capsys, one, other, are_equal):
    """The days of a job, too: that of today does not wait for the one of yesterday, which takes longer than a day."""
    for folder in ("in", "2026-11-20", "2026-11-21"):
        write_images(tmp_path / folder, "a.png")
    (tmp_path / "link").symlink_to("in")
    monkeypatch.chdir(tmp_path)
    with paused_with_lock(["--input", *one, "--output", "out", "--model", bright_model], tmp_path / "log"):
        code = main("--input", *other, "--output", "out", "--model", bright_model, "--when-busy", "stop")
    assert code == (BUSY if are_equal else 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("when_busy", "code", "beginning", "end"),
    [("skip", 0, "skipped: ", "; nothing was done\n"), ("stop", BUSY, "error: ", "; --when-busy wait waits for it\n")],
)
def test_one_that_must_not_wait_is_one_line(arguments, out, tmp_path, capsys, when_busy, code, beginning, end):
    """A scheduler's second job may skip its work with exit code 0, or end with 3. A look before a run needs no wait."""
    with paused_with_lock(arguments, tmp_path / "log"):
        assert main(*arguments, "--dry-run") == 0
        capsys.readouterr()
        assert main(*arguments, "--when-busy", when_busy) == code
    printed, error = capsys.readouterr()
    line, other = (printed, error) if code == 0 else (error, printed)
    assert line.splitlines()[-1].startswith(f"{beginning}output {out}: another run is processing the same (run ")
    assert line.endswith(end) and other == "" and rows_of(out) == []


@pytest.mark.matrix
def test_four_hundred_jobs_of_a_day_each_into_one_folder_write_no_object_twice(strict_gcs_bucket):
    """Cloud Storage takes one write of an object a second; all end well, and each row is there once.

    As far as locks and shards go, without models.
    """
    output = f"gs://{strict_gcs_bucket.name}/out"

    def job(day: int) -> list[str]:
        with locked(output, f"{day:016x}", what=f"run {day}"):
            return write_rows(output, [detected(f"gs://cams/{day}.jpg")], run=f"{day:012x}")

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        written = [path for paths in pool.map(job, range(DAYS)) for path in paths]

    assert len({*written}) == len(written) == DAYS
    assert sorted(shard.path for shard in list_shards(output)) == sorted(written)
    assert sorted(row["image"]["uri"] for row in rows_in(output)) == sorted(f"gs://cams/{day}.jpg" for day in range(DAYS))
    versions = [blob.name for blob in strict_gcs_bucket.list_blobs(prefix="out/", versions=True)]
    assert len(versions) == len({*versions}) == DAYS, "a shard a day; no lock is left"
