"""A run that was submitted and left: it holds its command's lock, and whoever attaches to it ends as it ends.

The service of these tests runs nothing; tests/flink has jobs that work.
"""

import json

import pytest

from pipeline import run
from pipeline.outcome.outcome import Outcome
from pipeline.results.run_folder import Run
from tests.launch.jobs import write_images


@pytest.fixture
def left(gcs_bucket, dataflow, capfd):
    """Submits the job of a command and leaves it; its run and its job at the service."""

    def submit(arguments: list[str]) -> tuple[Run, dict]:
        assert run.main([*arguments, "--no-wait"]) == 0
        printed, error = capfd.readouterr()
        assert "error" not in error
        name, output = printed.removeprefix("submitted run ").split("; --attach ")[0], printed.split()[-3]
        return Run(output, name), dataflow.jobs["job-0"]

    return submit


def attach(to: Run) -> int:
    return run.main(["--attach", to.name, "--output", to.output])


@pytest.mark.parametrize("code", [0, 4])
def test_a_batch_job_that_is_done_ends_with_the_outcome_of_its_last_step(code, batch, left, capfd):
    """Also a second time, when nothing of it runs any more."""
    submitted, job = left(batch)
    Outcome(code, "some failed" if code else "", ("3 images read",)).keep(submitted)
    job["currentState"] = "JOB_STATE_DONE"
    for _ in range(2):
        assert attach(submitted) == code
        assert capfd.readouterr() == ("3 images read\n", "error: some failed\n" if code else "")


@pytest.mark.parametrize(
    ("state", "code"), [("FAILED", 1), *(pytest.param(each, 1, marks=pytest.mark.matrix) for each in ("CANCELLED", "DONE"))]
)
def test_a_batch_job_that_never_comes_to_its_last_step_has_failed_and_its_command_is_free(
    state, code, batch, left, gcs_bucket, capfd
):
    submitted, job = left(batch)
    assert run.main([*batch, "--when-busy=stop"]) == 3
    assert f"another run is processing the same (run {submitted.name}, " in capfd.readouterr().err
    job["currentState"] = f"JOB_STATE_{state}"
    assert attach(submitted) == code
    said = capfd.readouterr().err
    assert said.startswith("error: the job failed: ")
    assert attach(submitted) == code and capfd.readouterr().err == said
    for blob in gcs_bucket.list_blobs(prefix="out/.lock-"):
        blob.delete()  # no heartbeats come, and it expires
    assert run.main([*batch, "--no-wait", "--when-busy=stop"]) == 0


@pytest.mark.parametrize(("state", "code"), [("DRAINED", 0), pytest.param("UPDATED", 0, marks=pytest.mark.matrix), ("FAILED", 1)])
def test_a_stream_that_ends_has_the_outcome_that_its_runner_knows(state, code, stream, left):
    submitted, job = left(stream)
    job["currentState"] = f"JOB_STATE_{state}"
    assert attach(submitted) == code
    assert attach(submitted) == code


def test_a_run_that_is_none_is_one_line(tmp_path, error_of):
    assert "expected a run 0a1b that goes on without its launcher" in error_of("--attach", "0a1b", "--output", tmp_path)
    assert "no output: expected --output, or --archive" in error_of("--attach", "0a1b")


def test_a_job_that_would_end_with_its_launcher_is_not_left(arguments, tmp_path, error_of):
    write_images(tmp_path / "in", "a.png")
    assert "--no-wait: expected --runner FlinkRunner, " in error_of(*arguments, "--no-wait")
    assert not (tmp_path / "out").exists(), "it has locked nothing"


def test_a_flex_template_is_made_by_its_launcher_and_left(batch, gcs_bucket, dataflow, monkeypatch, error_of, capfd):
    """Its container writes the job to this place, and the service starts that; the console needs nothing else."""
    flags = [*batch, f"--template_location=gs://{gcs_bucket.name}/templates/job"]
    assert "template_location: a classic template would start the same run each time" in error_of(*flags)
    monkeypatch.setenv("FLEX_TEMPLATE_PYTHON_PY_FILE", "pipeline/run.py")
    assert run.main(flags) == 0
    assert json.loads(gcs_bucket.blob("templates/job").download_as_bytes())["type"] == "JOB_TYPE_BATCH"
    assert not dataflow.jobs
    assert run.main([*flags, "--when-busy=stop"]) == 3, "its job may start at any moment"
