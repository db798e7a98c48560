"""Jobs that get stuck: the watchdog ends them with exit code 1 and the stacks of all threads; the next run does the rest."""

import collections
import json
import re
import signal
import socket
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.bright_model import export_bright_model
from tests.conftest import REPO
from tests.forked_jobs import Moment, run_forked
from tests.launch.jobs import rows_by_name, write_images
from tests.launch.test_elsewhere import TWO_PROCESSES
from tests.monitoring.prometheus import port_of, samples_of
from tests.monitoring.test_notify import Webhook
from tests.processes import running, wait_until
from tests.shard_rows import rows_in
from tests.streaming_job import StreamingJob

IMAGES, MANY = 12, 400
STUCK = re.compile(r"^error: the job is stuck in its (\w+): .* the stacks of all threads are in (\S+)$", re.MULTILINE)
SOON = ("--stuck-after-s", 15)  # longer than a busy machine pauses in what is not stuck
STREAM = ("--allow-uri-prefix", "gs://", "/", "--shard-seconds", 2, *SOON)


def stuck_part(printed: str) -> str:
    """The part in the one line of error; its file has the stack of each thread."""
    part, path = STUCK.findall(printed)[-1]
    stacks = Path(path).read_text()
    Path(path).unlink()
    assert "Thread 0x" in stacks and "watchdog.py" in stacks
    return part


@pytest.fixture(scope="module")
def hanging_model(tmp_path_factory):
    """A SavedModel that never returns from a batch with a white image."""
    return export_bright_model(tmp_path_factory.mktemp("models") / "hangs" / "3", hangs_on_white=True)


def write_white(path: Path) -> None:
    assert cv2.imwrite(str(path), np.full((48, 64, 3), 255, np.uint8))


def rows_in_archive(job: StreamingJob) -> collections.Counter:
    """How many rows each image has, and each dead letter."""
    rows = [row for kind in ("detections", "dead_letters") for row in rows_in(str(job.archive), kind)]
    return collections.Counter(row["image"]["uri"] for row in rows)


@pytest.mark.matrix
def test_the_launcher_of_workers_serves_their_counts_and_a_stuck_worker_ends_with_its_stacks(
    tmp_path, run_job, hanging_model, bright_model
):
    """The runner loses the worker, and the next run does the rest."""
    write_images(tmp_path / "in", *(f"{n:03d}.png" for n in range(MANY)))
    write_white(tmp_path / "in" / "white.png")
    job = ["--input", tmp_path / "in", "--output", tmp_path / "out"]
    flags = ["--model", hanging_model, "--stuck-after-s", 10, "--metrics-port", 0, "--metrics-host", "127.0.0.1"]
    command = [sys.executable, "-m", "pipeline.run", *job, *flags, *TWO_PROCESSES]
    log = tmp_path / "log"
    with log.open("wb") as file, running([*map(str, command)], cwd=REPO, stdout=file, stderr=file) as process:

        def counted() -> float:
            return samples_of(port_of(log.read_text()))["detection_images_total", "detected", ""]

        wait_until(lambda: port_of(log.read_text()), log.read_text, process)
        wait_until(lambda: 0 < counted() <= MANY, log.read_text, process)
        assert wait_until(lambda: process.poll() is not None, log.read_text) and process.returncode == 1
    printed = log.read_text()
    assert "error: the job is stuck in its detector: " in printed and "Thread 0x" in printed
    assert "error: the job failed: " in printed
    code, _, err = run_job(*job, "--model", bright_model)
    assert code == 0, err
    assert len(set(rows_by_name(tmp_path / "out"))) == len(rows_by_name(tmp_path / "out")) == MANY + 1


def test_a_stuck_stream_acknowledges_nothing_and_the_next_run_does_all(pubsub_emulator, tmp_path, hanging_model, bright_model):
    """Each image has a row, and one only."""
    write_images(tmp_path / "in", *(f"{n}.png" for n in range(IMAGES)))
    write_white(tmp_path / "in" / "white.png")
    paths = sorted(map(str, (tmp_path / "in").iterdir()))
    with StreamingJob(pubsub_emulator, tmp_path, hanging_model, *STREAM, killed=True) as job:
        job.publish(*(json.dumps({"uri": path}).encode() for path in paths))
        assert (job.wait(), stuck_part(job.output())) == (1, "detector"), job.output()
        job.start(flags=("--model", bright_model, "--stuck-after-s", 600))  # a busy machine may take longer than SOON
        wait_until(lambda: set(rows_in_archive(job)) == set(paths), job.output)
        assert job.signal(signal.SIGTERM) == 0, job.output()
        assert rows_in_archive(job) == collections.Counter(paths)


def test_a_storage_that_accepts_connections_and_never_answers_ends_a_stream(pubsub_emulator, tmp_path, bright_model, monkeypatch):
    """No call has returned; storage that refuses or fails is waited for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{listener.getsockname()[1]}")
        with StreamingJob(pubsub_emulator, tmp_path, bright_model, *STREAM) as job:
            job.publish(json.dumps({"uri": "gs://bucket/a.png"}).encode())
            assert (job.wait(), stuck_part(job.output())) == (1, "read"), job.output()


@pytest.mark.parametrize(
    "at", [None, pytest.param(Moment("tempfile:mkstemp", when="fails"), marks=pytest.mark.matrix)], ids=["", "disk full"]
)
def test_a_webhook_and_prometheus_hear_of_a_stuck_job(tmp_path, hanging_model, at):
    """Nobody looks at a job of the night; a full disk, which has no room for the stacks, keeps none from its end."""
    (tmp_path / "in").mkdir()
    write_white(tmp_path / "in" / "white.png")
    log, metrics = tmp_path / "log", tmp_path / "metrics" / "nightly.prom"
    flags = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--model", hanging_model, "--stuck-after-s", 5]
    with Webhook(200) as webhook:
        assert run_forked([*flags, "--notify", webhook.url, "--metrics-file", metrics], log, at) == 1
        (told,) = webhook.got
    assert told["exit_code"] == 1 and told["error"].startswith("the job is stuck in its detector: ")
    assert ("stacks of all threads are in this log" in log.read_text()) == (at is not None)
    if at is None:
        stuck_part(log.read_text())
    assert 'detection_last_exit_code{schedule="nightly"} 1\n' in metrics.read_text()
    assert 'detection_last_success_timestamp_seconds{schedule="nightly"} 0\n' in metrics.read_text()
