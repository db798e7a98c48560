"""Fixtures of tests that run whole jobs."""

import json
import time
import types

import apache_beam.runners.dataflow.dataflow_runner
import pytest
from apache_beam.utils import retry

import pipeline.runners.dataflow
from pipeline import run
from tests.dataflow_service import BATCH, CLOUD, STREAMING, running_dataflow_service


@pytest.fixture
def job(tmp_path, monkeypatch, bright_model, capfd):
    """Runs a job with output `out` in the current folder, and returns its counts of images, which add up."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir(exist_ok=True)

    def start(*arguments):
        code = run.main(["--output", "out", "--model", bright_model, "--max-dead-share", "1", *map(str, arguments)])
        assert code == 0, capfd.readouterr().err
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert summary["startup_seconds"] >= 0, "also where an earlier job of the process has loaded the model"
        images = summary["images"]
        assert images["read"] == images["detected"] + images["dead"] + images["skipped"]
        return images

    return start


@pytest.fixture
def error_of(capfd):
    """Runs a command that is refused: exit code 2 and one line, which it returns."""

    def start(*arguments: object) -> str:
        assert run.main([*map(str, arguments)]) == 2
        printed, error = capfd.readouterr()
        assert printed == "" and error.startswith("error: ") and error.count("\n") == 1
        return error

    return start


@pytest.fixture
def dataflow(monkeypatch):
    """The service; launchers look at their jobs there each tenth of a second, where Beam and this project wait for five."""
    quick = types.SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(seconds / 50))
    monkeypatch.setattr(apache_beam.runners.dataflow.dataflow_runner, "time", quick)
    monkeypatch.setattr(retry.Clock, "sleep", lambda _self, seconds: quick.sleep(seconds))
    monkeypatch.setattr(pipeline.runners.dataflow, "_LOOK_SECONDS", 0.1)
    with running_dataflow_service() as service:
        yield service


@pytest.fixture
def batch(gcs_bucket, dataflow):
    """A command line that submits the batch job to the service."""
    gcs_bucket.blob("in/a.jpg").upload_from_string(b"not read by the launcher")
    bucket = f"gs://{gcs_bucket.name}"
    places = ["--input", f"{bucket}/in/*", "--output", f"{bucket}/out", f"--temp_location={bucket}/tmp"]
    return ["--config", BATCH, *places, f"--dataflow_endpoint={dataflow.endpoint}", *CLOUD, "--model=digits"]


@pytest.fixture
def stream(gcs_bucket, pubsub_emulator, dataflow):
    """A command line that submits the streaming job to the service."""
    (output, _), (_, subscription) = pubsub_emulator.create(), pubsub_emulator.create()
    bucket = f"gs://{gcs_bucket.name}"
    places = ["--input", subscription, "--output", output, "--archive", f"{bucket}/archive", f"--temp_location={bucket}/tmp"]
    flags = [f"--dataflow_endpoint={dataflow.endpoint}", *CLOUD, "--model=digits", "--job_name=detect"]
    return ["--config", STREAMING, *places, *flags]
