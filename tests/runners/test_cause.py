"""What made a job fail: the error of a step, here or in a worker, and what its runner makes of it."""

import time

import pytest

from pipeline.errors import DeviceFailedError, GoesOnError, OutputError, RunnerError
from pipeline.process import PROCESS
from pipeline.results.run_folder import Run
from pipeline.runners.cause import naming_failures
from pipeline.stats.worker_reports import WorkerFailure, WorkerReports

AS_TEXT = "Traceback\npipeline.errors.OutputError: output gs://b/out: permission denied [while running 'WriteDetections']"


@pytest.fixture
def reports(tmp_path):
    """Of a run in whose folder workers leave records."""
    run = Run(f"{tmp_path}/out", "0a1b")
    with run.opened():
        yield (
            lambda age_s: (
                WorkerFailure("DeviceFailedError", "it died", "host7", time.time() - age_s).write(run) or WorkerReports(run)
            )
        )


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """No step has failed here."""
    monkeypatch.setattr(PROCESS, "failure", None)


@pytest.mark.parametrize(
    ("age_s", "error", "named"),
    [
        (20, RuntimeError("pipeline BeamApp failed in state FAILED"), DeviceFailedError),
        (20, RuntimeError(AS_TEXT), RuntimeError),
        (20, OutputError("permission denied"), OutputError),
        (20, RunnerError("Flink refuses the job"), RunnerError),
        (20, GoesOnError("out of reach"), GoesOnError),
        (7 * 86_400, RuntimeError("job 1f was cancelled"), RuntimeError),
    ],
    ids=str,
)
def test_the_record_of_a_worker_is_the_cause_of_an_error_that_has_no_other_one(reports, age_s, error, named):
    """A runner replaces a worker whose device failed, and goes on; what ends the job a week later is another thing."""
    with pytest.raises(Exception) as caught, naming_failures(reports(age_s).failure):
        raise error
    assert type(caught.value) is named
    assert "(the worker on host7)" in str(caught.value) or caught.value is error
