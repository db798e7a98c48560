"""What a worker checks before it works: one line says what it cannot reach."""

import os
from pathlib import Path

import pytest

from pipeline import worker
from pipeline.errors import ModelError, OutputError, RunnerError
from pipeline.outcome.outcome import Outcome
from pipeline.process import ProcessState
from pipeline.results.run_folder import Run
from pipeline.software import here
from pipeline.worker import WorkerContext


@pytest.fixture
def staging(tmp_path, monkeypatch):
    """A run that has begun, in a process of its own."""
    monkeypatch.setattr(worker, "PROCESS", ProcessState())
    run = Run(f"{tmp_path}/out", "0a1b")
    with run.opened():
        yield run


def reached():
    """The check of a model that can be reached."""


def closed():
    raise OSError("the bucket\nis closed")


@pytest.mark.parametrize(
    ("folder", "run", "check_model", "error"),
    [
        pytest.param("out", "ffff", reached, "out: expected a folder that launcher and workers share, .* but {}", id="disk"),
        pytest.param("out", "0a1b", closed, r"the bucket is closed \({}\)", id="no model"),
    ],
)
def test_what_a_worker_cannot_reach_is_one_line_each_time(staging, tmp_path, folder, run, check_model, error):
    context = WorkerContext(Run(f"{tmp_path}/{folder}", run), check_model)
    for _ in range(2):
        with pytest.raises((OutputError, ModelError), match=error.format(r"the worker on \S+")):
            context.check_worker()


def test_what_a_worker_cannot_write_is_one_line(staging, tmp_path):
    os.symlink(tmp_path, f"{staging.output}/detections")
    with pytest.raises(OutputError, match=r"out: expected detections to be a folder of its own, .* \(the worker on \S+\)"):
        WorkerContext(staging, reached).check_worker()


def test_a_worker_that_starts_when_its_run_has_ended_is_no_error(staging):
    """A runner may start one more while the last step works, in place of one that was lost."""
    Outcome(0).keep(ended := staging._replace(name="ffff"))
    WorkerContext(ended, reached).check_worker()
    assert not Path(ended.folder).exists()


def test_a_worker_of_another_release_ends_its_job_with_one_line(tmp_path):
    """Else its steps would be pickled by other code than they run in."""
    run = Run(str(tmp_path), "0a")
    with run.opened():
        other = here()._replace(project="9.9.9")
        context = WorkerContext(run, lambda: None, software=other)
        with pytest.raises(
            RunnerError, match=r"^the launcher has .*detect-objects 9\.9\.9, and the worker on .*: expected the same"
        ):
            context.check_worker()
