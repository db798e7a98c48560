"""Signals that come while a job ends, each at a chosen system call."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import write_bright_image
from tests.forked_jobs import ForkedJob, SystemCall
from tests.launch.jobs import files_of, rows_of
from tests.processes import wait_until
from tests.streaming_job import CONFIG, StreamingJob

# a module that Python imports at its start: SIGTERM comes when TensorFlow is half imported
HOOK = """
import os, signal, sys

happened = []

def happen(name, args):
    if name == "import" and str(args[0]).startswith("tensorflow.python.eager") and not happened:
        happened.append(name)
        os.kill(os.getpid(), signal.SIGTERM)

sys.addaudithook(happen)
"""


def write_images(folder: Path) -> None:
    for n in range(4):
        write_bright_image(folder / f"{n}.png", (64, 48), (10, 10, 30, 30))
    (folder / "broken.png").write_bytes(b"")


@pytest.fixture(scope="module")
def done_before(tmp_path_factory, run_job, bright_model):
    """The arguments of a job, and the results of its first run."""
    folder = tmp_path_factory.mktemp("earlier")
    write_images(folder / "in")
    arguments = ["--input", folder / "in", "--model", bright_model, "--shards", 2]
    assert run_job(*arguments, "--output", folder / "out")[0] == 0
    return arguments, folder / "out"


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("os.rename:-00001-of-00002.jsonl", id="a file has its name, the next one not yet"),
        pytest.param("os.rename:/dead_letters/dead_letters-", id="the last file has not its name yet"),
        pytest.param("os.rename:/run.json#3", id="all files have their names"),
        pytest.param("os.rename:/report.html", id="the report is written"),
        pytest.param("os.rename:/summary.json", id="the summary is written"),
        pytest.param("shutil.rmtree:/.staging-", id="what is left over is removed"),
    ],
)
def test_a_signal_while_results_get_their_names_does_not_lose_them(place, tmp_path, run_job, done_before):
    """Not those of this run, nor those of the run before: the job says so, and ends by itself."""
    arguments, earlier = done_before
    out = tmp_path / "out"
    shutil.copytree(earlier, out)
    expected = files_of(out)
    before = json.loads((out / "summary.json").read_text())["run"]

    code, stdout, stderr = run_job(*arguments, "--output", out, at=SystemCall(place))

    assert (code, stderr) == (0, "stopping: the results get their names, then the job ends\n"), stdout
    assert files_of(out) == expected
    summary = json.loads((out / "summary.json").read_text())
    assert summary["images"] == {"read": 5, "detected": 4, "dead": 1, "skipped": 0}
    assert summary["run"] != before
    assert not list(out.glob(".*"))


@contextlib.contextmanager
def tee(pipe: Path, log: Path):
    """Copies what comes through a named pipe to a log; yields a function that ends this, so that nobody reads the pipe."""
    os.mkfifo(pipe)
    log.touch()
    with pipe.open("r+b", buffering=0) as end:
        process = subprocess.Popen(["tee", "-a", str(log)], stdin=end, stdout=subprocess.DEVNULL)

    def end_tee() -> None:
        process.kill()
        process.wait()

    try:
        yield end_tee
    finally:
        end_tee()


def test_a_batch_that_commits_ends_well_when_nobody_reads_its_errors(tmp_path, done_before):
    """As where Ctrl-C ends the `tee` behind the job first: the handler of the signal cannot write its line."""
    out, printed, log = tmp_path / "out", tmp_path / "printed", tmp_path / "log"
    at, pipe = SystemCall("os.rename:/report.html", signal.SIGINT), tmp_path / "pipe"
    with tee(pipe, log) as end_tee, ForkedJob([*done_before[0], "--output", out], printed, at, errors=pipe) as job:
        wait_until(lambda: list(out.glob(".staging-*")), log.read_text, job)
        end_tee()
        assert job.wait() == 0, printed.read_text()
    assert json.loads((out / "summary.json").read_text())["images"]["detected"] == 4
    assert files_of(out) == files_of(done_before[1])


def test_a_stream_finishes_what_it_has_when_nobody_reads_its_errors(tmp_path, pubsub_emulator, bright_model):
    """The first signal ends the intake, whether or not its line can be written."""
    write_bright_image(tmp_path / "bright.png", (64, 48), (10, 10, 30, 30))
    job = StreamingJob(pubsub_emulator, tmp_path, bright_model)
    job.errors = tmp_path / "pipe"
    with tee(job.errors, job.log) as end_tee, job:
        job.publish((tmp_path / "bright.png").read_bytes())
        job.take(job.detections, 1)
        end_tee()
        assert job.signal(signal.SIGINT) == 0, job.output()
    assert json.loads((tmp_path / "archive" / "summary.json").read_text())["images"]["detected"] == 1


def test_a_stream_whose_summary_cannot_be_written_is_one_line(tmp_path, pubsub_emulator, bright_model):
    """No traceback, exit code 1, and whoever is notified gets the reason."""
    notice = tmp_path / "notice.json"
    notify = f"tee {notice}"
    gone = SystemCall("os.rename:/summary.json", None)
    with StreamingJob(pubsub_emulator, tmp_path, bright_model, "--notify", notify, at=gone) as job:
        assert job.signal(signal.SIGTERM) == 1, job.output()
    *_, last = job.output().splitlines()
    assert "Traceback" not in job.output() and re.match("error: the job failed: .*storage is gone", last)
    assert last == f"error: {json.loads(notice.read_text())['error']}"


def test_a_signal_before_the_first_file_has_its_name_stops_the_job(tmp_path, run_job, bright_model):
    """Then nothing of this run is committed, and what an earlier one committed stays; the same command goes on from its rows."""
    write_images(tmp_path / "in")
    out = tmp_path / "out"
    arguments = ["--input", tmp_path / "in", "--output", out, "--model", bright_model]
    assert run_job(*arguments)[0] == 0
    (tmp_path / "in" / "broken.png").unlink()

    code, stdout, stderr = run_job(*arguments, at=SystemCall("open:/detections/detections-"))

    said = "4 images are done; the same command goes on from there\nstopped; nothing was committed\n"
    assert (code, stdout, stderr) == (128 + signal.SIGINT, "", said)
    assert [len(rows_of(out, kind)) for kind in ("detections", "dead_letters")] == [4, 1]

    code, stdout, stderr = run_job(*arguments)
    assert (code, stderr) == (0, "") and "  4 of them were done by a run of this command that was cut short\n" in stdout
    assert [len(rows_of(out, kind)) for kind in ("detections", "dead_letters")] == [4, 0]
    assert not list(out.glob(".*"))


def test_a_signal_while_the_model_loads_stops_a_stream(tmp_path, run_job, pubsub_emulator, bright_model):
    """It has no message yet. A new interpreter, so that the signal meets the import of TensorFlow."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    _, subscription = pubsub_emulator.create()
    output, _ = pubsub_emulator.create()
    arguments = ["--config", CONFIG, "--input", subscription, "--output", output, "--model", bright_model]
    code, stdout, stderr = run_job(*arguments, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (code, stdout, stderr) == (128 + signal.SIGINT, "", "stopped; nothing was committed\n")


def test_a_second_signal_while_a_stream_sums_up_does_not_lose_its_summary(tmp_path, pubsub_emulator, bright_model):
    """The first one ends the intake; when the next comes, the report is being written."""
    write_bright_image(tmp_path / "bright.png", (64, 48), (10, 10, 30, 30))
    with StreamingJob(pubsub_emulator, tmp_path, bright_model, at=SystemCall("os.rename:/report.html")) as job:
        job.publish((tmp_path / "bright.png").read_bytes())
        job.take(job.detections, 1)
        assert job.signal(signal.SIGTERM) == 0, job.output()
    assert job.output().count("stopping: finishing what is in hand") == 2
    assert json.loads((tmp_path / "archive" / "summary.json").read_text())["images"]["detected"] == 1
