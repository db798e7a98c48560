"""The last step of a job: runners may repeat it, and whoever attaches reads what it left."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from pipeline.config import load_config
from pipeline.detect.load_detector import DetectorSpec
from pipeline.errors import WRONG
from pipeline.outcome.conclude import Conclusion, conclude
from pipeline.outcome.outcome import Outcome, outcome_of
from pipeline.results.run_folder import Run
from pipeline.stats.job_stats import JobStats
from pipeline.stats.summary import RunFacts
from pipeline.stats.worker_reports import StatsReporter

SPEC = DetectorSpec("a model that nobody loads")


@pytest.fixture
def end(tmp_path):
    """The end of a job whose workers are elsewhere; two of them report, the model of one is loaded."""
    facts = RunFacts(1000.0, 1002.0, 0.0, "a command", load_config([], {"input": ["photos"]}).as_dict(), submitted_at=1002.0)
    run = Run(str(tmp_path), "0a1b")
    run.open(outlives=True)
    for stats in (JobStats(), JobStats(batch_sizes=(1, 2), class_names=("cat",))):
        StatsReporter(run, stats.copy).flush()
    return Conclusion(run, facts)


def summary_of(end: Conclusion) -> dict:
    found = json.loads(Path(end.run.reports, "summary.json").read_text())
    return {name: value for name, value in found.items() if name not in ("finished_at", "wall_seconds", "images_per_second")}


def test_a_repeat_of_the_last_step_changes_nothing_and_one_of_half_of_it_writes_the_same(end):
    """The first attempt died before its outcome was there; the second one's answer was lost."""
    end.reported(JobStats(read=3, skipped=3, batch_sizes=(1, 2), class_names=("cat",)))
    before = summary_of(end)
    conclude(JobStats(read=3, skipped=3), end, SPEC)
    assert summary_of(end) == before and before["model"]["class_names"] == ["cat"]
    first = {path: path.read_bytes() for path in Path(end.run.reports).iterdir()}
    conclude(JobStats(read=7), end, SPEC)
    assert {path: path.read_bytes() for path in Path(end.run.reports).iterdir()} == first
    assert not Path(end.run.folder).exists() and not end.run.goes_on()


def test_the_commonest_reason_is_that_of_all_stages_together(end):
    dead = Counter({("read", "not_allowed"): 2, ("message", "not_allowed"): 2, ("decode", "corrupt"): 3})
    assert "; 4 of them not_allowed, such as: " in end.reported(JobStats(read=7, dead=dead)).error


def test_an_input_that_names_nothing_is_an_outcome_and_no_repeat_of_the_step_changes_it(end):
    conclude(JobStats(), end, SPEC)
    assert outcome_of(end.run) == Outcome(WRONG, "input photos: names no image")
    assert not Path(end.run.reports, "summary.json").exists()


def test_the_first_outcome_of_a_run_stays(end):
    """Its last step, and two who are attached, may write one at the same time."""
    Outcome(0, lines=("done",)).keep(end.run)
    Outcome(1, "the job failed: its runner says so").keep(end.run)
    assert outcome_of(end.run) == Outcome(0, lines=("done",))


def test_the_reports_of_a_stream_are_renewed_while_it_goes_on_and_not_afterwards(end):
    config = load_config([], {"mode": "streaming"}).as_dict()
    stream = dataclasses.replace(end, facts=dataclasses.replace(end.facts, config=config))
    StatsReporter(end.run, lambda: JobStats(read=9, skipped=4)).flush()
    stream.renew()
    assert summary_of(end)["images"] == {"read": 4, "detected": 0, "dead": 0, "skipped": 4}, "the others come again"
    assert Path(end.run.reports, "report.html").exists() and not Path(end.run.output, "summary.json").exists()
    StatsReporter(end.run, lambda: JobStats(skipped=5)).flush()
    stream.renew()
    assert summary_of(end)["images"]["skipped"] == 4, "a minute has not passed"
    stream.renew_now()
    assert summary_of(end)["images"]["skipped"] == 9
    end.run.remove()
    stream.renew_now()
    assert not Path(end.run.folder).exists()
