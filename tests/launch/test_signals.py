"""Signals that come while a job ends, each at a chosen call."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_jobs import Moment
from tests.launch.jobs import files_of, write_images
from tests.monitoring.test_notify import Webhook
from tests.processes import running
from tests.shard_rows import rows_in
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


def counts(out: Path) -> tuple[int, int]:
    """The numbers of detected images and of dead letters."""
    return len(rows_in(str(out))), len(rows_in(str(out), "dead_letters"))


@pytest.fixture(scope="module")
def done_before(tmp_path_factory, run_job, bright_model):
    """The arguments of a job, and the results of its first run."""
    folder = tmp_path_factory.mktemp("earlier")
    write_images(folder / "in", *(f"{n}.png" for n in range(4)))
    (folder / "in" / "broken.png").touch()
    arguments = ["--input", folder / "in", "--model", bright_model]
    assert run_job(*arguments, "--output", folder / "out")[0] == 0
    return arguments, folder / "out"


@pytest.mark.parametrize(
    ("place", "having", "number", "rows", "reported"),
    [
        pytest.param("os:replace", "/dead_letters/", 1, None, False, id="a shard gets its name, the next one has none yet"),
        pytest.param("os:replace", "/report.html", 1, 5, True, id="all rows are there, and the report gets its name"),
        pytest.param("os:replace", "/summary.json", 2, 5, True, id="and the summary's copy on top", marks=pytest.mark.matrix),
        pytest.param("shutil:rmtree", "/.staging-", 1, 5, True, id="unfinished files are removed", marks=pytest.mark.matrix),
    ],
)
def test_a_signal_while_a_job_ends_loses_no_row_and_the_same_command_does_the_rest(
    place, having, number, rows, reported, out, run_job, done_before
):
    """Neither rows of this run nor those of the run before; each image has one row of each run in the end."""
    arguments, earlier = done_before
    shutil.copytree(earlier, out)
    before = files_of(out)
    arguments = [*arguments, "--output", out, "--score-threshold", 0.5]

    code, stdout, stderr = run_job(*arguments, at=Moment(place, number, having=having, sent=signal.SIGTERM))

    assert (code, stderr) == (
        128 + signal.SIGINT,
        "stopped; rows that were written stay, and the same command does the rest\n",
    ), stdout
    assert {name: files_of(out).get(name) for name in before} == before
    new = sum(counts(out)) - 5
    assert new == rows if rows else 0 <= new <= 5
    assert len([*out.glob("runs/*/summary.json")]) == 1 + reported

    code, stdout, stderr = run_job(*arguments)
    assert (code, stderr) == (0, "")
    assert f"{new} skipped ({new} of them done before)" in stdout if new else "0 skipped;" in stdout
    assert counts(out) == (8, 2)


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


def test_a_second_signal_ends_a_batch_at_once():
    """Also while its end waits for a store that is away."""
    code = "import time\nfrom pipeline.launch.signals import stopped_by_signals\nwith stopped_by_signals():\n"
    code += "    try:\n        print('works', flush=True)\n        time.sleep(600)\n"
    code += "    finally:\n        print('ends', flush=True)\n        time.sleep(600)\n"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as job:
        for said in ("works\n", "ends\n"):
            assert job.stdout.readline() == said
            job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=60) == -signal.SIGTERM


AS_FIRST = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]


def can_be_first() -> bool:
    return bool(shutil.which("unshare")) and subprocess.run([*AS_FIRST, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_be_first(), reason="unshare makes no namespace of processes here")
@pytest.mark.parametrize(
    ("block", "ends"),
    [
        ("stopped_by_signals()", "ends"),
        pytest.param("finished_by_signals(lambda: None)", "stopping: finishing in-flight images", marks=pytest.mark.matrix),
    ],
)
def test_a_second_signal_ends_the_first_process_of_a_container_at_once(block, ends):
    """The kernel ignores signals without a handler there."""
    code = f"import time\nfrom pipeline.launch.signals import finished_by_signals, stopped_by_signals\nwith {block}:\n"
    code += "    try:\n        print('works', flush=True)\n        time.sleep(600)\n"
    code += "    finally:\n        print('ends', flush=True)\n        time.sleep(600)\n"
    command = [*AS_FIRST, sys.executable, "-c", code]
    with running(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        for said in ("works", ends):
            assert job.stdout.readline() == f"{said}\n"
            (first,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
            os.kill(int(first), signal.SIGTERM)
        assert job.wait(timeout=60) == 128 + signal.SIGTERM
        job.stdout.close()


def test_a_stream_finishes_what_it_has_when_nobody_reads_its_errors(tmp_path, pubsub_emulator, bright_model, bright_png):
    """The first signal ends the intake, whether or not its line can be written."""
    job = StreamingJob(pubsub_emulator, tmp_path, bright_model)
    job.errors = tmp_path / "pipe"
    with tee(job.errors, job.log) as end_tee, job:
        job.publish(bright_png)
        job.take(job.detections, 1)
        end_tee()
        assert job.signal(signal.SIGINT) == 0, job.output()
    assert json.loads((tmp_path / "archive" / "summary.json").read_text())["images"]["detected"] == 1


def test_a_stream_whose_summary_cannot_be_written_is_one_line(tmp_path, pubsub_emulator, bright_model):
    """No traceback, exit code 1, and whoever is notified gets the reason."""
    gone = Moment("os:replace", 1, "fails", "/summary.json")
    with Webhook(200) as webhook, StreamingJob(pubsub_emulator, tmp_path, bright_model, "--notify", webhook.url, at=gone) as job:
        assert job.signal(signal.SIGTERM) == 1, job.output()
    *_, last = job.output().splitlines()
    assert "Traceback" not in job.output() and re.match("error: output .*: No space left on device; free some space", last)
    assert [f"error: {told['error']}" for told in webhook.got] == [last]


def test_a_signal_while_the_model_loads_stops_a_stream(tmp_path, run_job, pubsub_emulator, bright_model):
    """It has no message yet. A new interpreter, so that the signal meets the import of TensorFlow."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    (output, _), (_, subscription) = pubsub_emulator.create(), pubsub_emulator.create()
    arguments = ["--config", CONFIG, "--input", subscription, "--output", output, "--model", bright_model]
    ended = run_job(*arguments, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert ended == (128 + signal.SIGINT, "", "stopped; rows that were written stay, and the same command does the rest\n")


def test_a_second_signal_while_a_stream_sums_up_does_not_lose_its_summary(tmp_path, pubsub_emulator, bright_model, bright_png):
    """The first one ends the intake; when the next comes, the report is being written."""
    with StreamingJob(
        pubsub_emulator, tmp_path, bright_model, at=Moment("os:replace", having="/report.html", sent=signal.SIGTERM)
    ) as job:
        job.publish(bright_png)
        job.take(job.detections, 1)
        assert job.signal(signal.SIGTERM) == 0, job.output()
    assert job.output().count("stopping: finishing in-flight images") == 2
    assert json.loads((tmp_path / "archive" / "summary.json").read_text())["images"]["detected"] == 1
