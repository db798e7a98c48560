"""A device that dies amid a job: no image is blamed, the job ends with exit code 5, and the next one does the rest."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.conftest import REPO
from tests.detect.versioned_models import DIES_AFTER, TOY, write_version
from tests.forked_jobs import run_forked
from tests.launch.jobs import images_of, rows_by_name, write_images
from tests.launch.test_elsewhere import TWO_PROCESSES
from tests.processes import wait_until
from tests.shard_rows import rows_in
from tests.streaming_job import StreamingJob

NAMES = [f"{n:03d}.png" for n in range(216)]
SAID = "the device failed, and no image is to blame: the model runs on no blank image either: CUDA_ERROR_ILLEGAL_ADDRESS; "


@pytest.fixture
def toy(tmp_path):
    """A folder with a version of the engine that loads at once; and images beside it."""
    write_images(tmp_path / "in", *NAMES)
    write_version(tmp_path / "detector", 7)
    return ["--input", tmp_path / "in", "--output", tmp_path / "out", "--model", tmp_path / "detector", "--engine", TOY]


def test_a_device_that_dies_amid_a_job_blames_no_image_and_the_same_command_on_a_sound_one_detects_all(toy, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    assert run_forked([*toy, "--shard-seconds", 0.05], log, environment={DIES_AFTER: "150"}) == 5, log.read_text()
    assert f"error: {SAID}" in log.read_text()
    assert rows_in(str(out), "dead_letters") == [] and 0 < len(rows_by_name(out)) <= 150
    assert run_forked(toy, log) == 0, log.read_text()
    assert rows_by_name(out) == NAMES


@pytest.mark.parametrize("workers", [(), pytest.param(TWO_PROCESSES, marks=pytest.mark.matrix)], ids=["here", "in workers"])
def test_a_gpu_that_is_sick_when_a_job_starts_ends_it_with_the_code_that_a_supervisor_repeats(toy, tmp_path, workers):
    write_version(tmp_path / "detector", 7, gpu=True)
    log = tmp_path / "log"
    assert run_forked([*toy, *workers], log, environment={DIES_AFTER: "0"}) == 5, log.read_text()
    assert "fails on a blank image: CUDA_ERROR_ILLEGAL_ADDRESS" in log.read_text().splitlines()[-1]
    assert run_forked(toy, log) == 0, log.read_text()
    assert rows_by_name(tmp_path / "out") == NAMES


@pytest.mark.matrix
def test_the_launcher_of_workers_knows_that_a_device_failed_by_a_record(toy, tmp_path):
    command = [sys.executable, "-m", "pipeline.run", *map(str, toy), *TWO_PROCESSES]
    sick = {**os.environ, DIES_AFTER: "100"}
    done = subprocess.run(command, cwd=REPO, env=sick, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 5, done.stderr
    assert f"error: {SAID}" in done.stderr.splitlines()[-1] and "(the worker on " in done.stderr.splitlines()[-1]
    assert rows_in(str(tmp_path / "out"), "dead_letters") == []
    assert run_forked(toy, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert images_of(tmp_path / "out")["dead"] == 0 and rows_by_name(tmp_path / "out") == NAMES


def test_a_stream_whose_device_dies_acknowledges_nothing_of_it_and_the_next_run_answers_all(
    pubsub_emulator, tmp_path, toy, monkeypatch
):
    paths = sorted(map(str, (tmp_path / "in").iterdir()))[:100]
    flags = ("--engine", TOY, "--allow-uri-prefix", "gs://", "/", "--shard-seconds", 1)
    monkeypatch.setenv(DIES_AFTER, "60")
    with StreamingJob(pubsub_emulator, tmp_path, str(tmp_path / "detector"), *flags, killed=True) as job:
        job.publish(*(json.dumps({"uri": path}).encode() for path in paths))
        assert job.wait() == 5, job.output()
        assert f"error: {SAID}" in job.output()
        monkeypatch.delenv(DIES_AFTER)
        job.start()
        rows = wait_until(lambda: (found := rows_in(str(job.archive), "detections")) and len(found) >= len(paths) and found)
        assert job.signal(signal.SIGTERM) == 0, job.output()
        assert {row["image"]["uri"] for row in rows} == {*paths}
        assert rows_in(str(job.archive), "dead_letters") == []
