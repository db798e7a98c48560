"""Runs the graph of a job, batch or stream: here, in this process, or elsewhere, in workers that outlive this process.

A job elsewhere needs its launcher only until it is submitted. From then on the launcher watches it, as `attach.py` does: it shows
what workers report, and at the end prints the outcome that the job's last step has written. Where that step never ran, since the
job failed or is a stream, whoever watches writes the outcome.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import apache_beam as beam
import grpc
from apache_beam.options.pipeline_options import GoogleCloudOptions

from pipeline import graph
from pipeline.detect.load_detector import detector_in_use
from pipeline.errors import DONE, STOPPED, GoesOnError, RunnerError, UserError
from pipeline.launch.options import Job
from pipeline.launch.signals import finished_by_signals, signals_noted
from pipeline.log_lines import console, say
from pipeline.monitoring.monitor import monitored
from pipeline.outcome.conclude import CANARY_SECONDS, Conclusion
from pipeline.outcome.outcome import Launched, Outcome, outcome_of
from pipeline.results.run_folder import Run
from pipeline.runners.cause import last_line, naming_failures, raise_cause, refusals_named
from pipeline.runners.table import Runner
from pipeline.stats.counted import COUNTED
from pipeline.stats.job_stats import JobStats
from pipeline.stats.worker_reports import WorkerReports
from pipeline.worker import WorkerContext

_Block: TypeAlias = Callable[[], AbstractContextManager[object]]


class Here:
    """Steps in this process: they end with it.

    Attributes:
      job: The job.
      run: The run.
      context: What workers must reach; None: there are none.
      facts: What is known when the graph is made.
      running: Beam's result.
    """

    def __init__(self, job: Job, run: Run):
        self.job, self.run = job, run
        self.context: WorkerContext | None = None
        self.facts = job.facts(time.time())
        self.running: Any = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[], JobStats]]:
        """Makes the run's folder for the length of a block; gives what is counted meanwhile."""
        with self.run.opened(), COUNTED.counting() as counted:
            yield functools.partial(COUNTED.stats_of, counted)

    def failure(self) -> UserError | None:
        """Why a worker has ended its process: there is none."""
        return None

    def begin(self, pipeline: beam.Pipeline) -> None:
        """Starts the graph."""
        self.running = pipeline.run()

    def wait(self) -> None:
        """Waits for its end."""
        self.job.runner.wait(self.running)

    def outcome_of_stream(self, end: Conclusion, stats: JobStats) -> Outcome:
        """Ends a stream whose rows are all there, given what has been counted."""
        if detector := detector_in_use(graph.detector_spec(self.job.config)):
            stats.take_model(detector.model_stats(CANARY_SECONDS))
        return self._ready(end).reported(stats)

    def renewing(self, end: Conclusion, stats: Callable[[], JobStats]) -> Callable[[], None]:
        """What renews the reports of a stream that goes on, given what is counted."""
        return lambda: self._ready(end).renew(stats)

    def _ready(self, end: Conclusion) -> Conclusion:
        detector = detector_in_use(graph.detector_spec(self.job.config))
        return dataclasses.replace(end, facts=end.facts.ready(detector.ready_at)) if detector else end


class Elsewhere:
    """Steps in workers: they go on without this process, unless the runner itself is in it. Attributes as those of `Here`."""

    def __init__(self, job: Job, run: Run):
        self.job, self.run = job, run
        self.context = graph.worker_context(job.config, run)
        facts = job.facts(time.time())
        self.facts = dataclasses.replace(facts, submitted_at=facts.ready_at)
        self.running: Any = None
        self._outlives = not job.runner.in_process
        self._reports: WorkerReports | None = None
        self._is_submitted = self._has_ended = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[], JobStats]]:
        """Makes the run's folder, which goes when the job has ended; gives what workers report meanwhile."""
        with self._left_to_workers() if self._outlives else self.run.opened():
            self._reports = WorkerReports(self.run, graph.samples_kept(self.job.config), streaming=self.facts.streams)
            yield self._reports.now

    @contextlib.contextmanager
    def _left_to_workers(self) -> Iterator[None]:
        self.run.open(outlives=True)
        try:
            with ended_by(self.run):
                yield
        finally:
            if self._has_ended or not self._is_submitted:
                self.run.remove_if_possible()

    def failure(self) -> UserError | None:
        """Why a worker has ended its process; None if none has."""
        return self._reports.failure() if self._reports else None

    def begin(self, pipeline: beam.Pipeline) -> None:
        """Submits the graph; a signal meanwhile is acted on when the job's id is there."""
        if not self._outlives:
            self.running = pipeline.run()
            return
        launched = Launched(self.job.runner.name, "", "", self.run, self.facts)
        with (
            self._cancelled_if_stopped(),
            signals_noted("the job is being submitted, and is ended once its id is there"),
            refusals_named(self.job.runner.name),
        ):
            launched.write()
            self._is_submitted = True
            self.running = pipeline.run()
            place, job = self.job.runner.job_of(self.running, self.job.options)
            dataclasses.replace(launched, place=place, job=job).write()

    def wait(self) -> None:
        """Waits for the job's end; cancels it if the launcher is stopped."""
        with self._cancelled_if_stopped():
            wait_for_end(self.job.runner, self.running)
        self._has_ended = True

    @contextlib.contextmanager
    def _cancelled_if_stopped(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            if self.running:
                self.running.cancel()
                Outcome(STOPPED).keep(self.run)
                self._has_ended = True
            raise

    def outcome_of_stream(self, end: Conclusion, _stats: JobStats) -> Outcome:
        """Ends a stream, given what its workers have reported."""
        return end.of_reports()


def place_of(job: Job, run: Run) -> Here | Elsewhere:
    """Where the steps of a run are."""
    return Here(job, run) if job.in_process else Elsewhere(job, run)


def execute(
    place: Here | Elsewhere,
    end: Conclusion,
    build: Callable[[beam.Pipeline], object],
    *,
    around: Callable[[Callable[[], JobStats]], AbstractContextManager[object]] = nullcontext,
    loading: _Block = nullcontext,
    stop: Callable[[], object] | None = None,
    begun: str = "",
) -> int:
    """Runs a graph and shows how the run ended; returns the exit code.

    Args:
      place: Where the steps are.
      end: What the end of the run takes.
      build: Adds the steps to an empty pipeline.
      around: What surrounds the graph and ends before the reports are made; takes what gives the statistics.
      loading: Loads the model.
      stop: Of a stream, what the first signal calls, before the runner is told to end it; None: a signal stops the job.
      begun: What to say once it runs.
    """
    job = place.job
    wait = job.wait and not job.options.view_as(GoogleCloudOptions).template_location

    def end_stream() -> None:
        if stop:
            stop()
        if place.running:
            job.runner.end_stream(place.running)

    with place.opened() as stats:
        with (
            around(stats),
            job.runner.served(job.options),
            monitored(job.config, stats),
            loading(),
            naming_failures(place.failure),
        ):
            pipeline = job.pipeline()
            build(pipeline)
            with finished_by_signals(end_stream) if stop else nullcontext():
                place.begin(pipeline)
                if not wait:
                    say([f"submitted run {place.run.name}; --attach {place.run.name} --output {place.run.output} shows it"])
                    return DONE
                if begun:
                    console.info(begun)
                place.wait()
        if stop:
            with finished_by_signals(lambda: None):  # the summary will be there in a moment
                place.outcome_of_stream(end, stats()).keep(place.run)
        return show_outcome(place.run)


def wait_for_end(runner: Runner, running: Any) -> None:
    """Waits for the end of a job elsewhere.

    Raises:
      GoesOnError: Its runner does not answer.
      Exception: The job failed.
    """
    try:
        runner.wait(running)
    except (RunnerError, grpc.RpcError) as err:
        raise GoesOnError(f"{runner.name} does not answer, and the job may go on: {last_line(err)}") from err


@contextlib.contextmanager
def ended_by(run: Run) -> Iterator[None]:
    """Keeps the error that ends a job as the outcome of its run, unless the job may go on."""
    try:
        yield
    except GoesOnError:
        raise
    except Exception as err:  # noqa: BLE001  whatever a runner raises
        try:
            raise_cause(err, run.output)
        except Exception as why:
            Outcome.of(why).keep(run)
            run.remove_if_possible()
            raise


def show_outcome(run: Run) -> int:
    """Prints how a run has ended; returns its exit code.

    Raises:
      RuntimeError: Its last step has not run, although its runner says that it is done.
    """
    outcome = outcome_of(run)
    if outcome is None:
        raise RuntimeError(f"run {run.name} is over, and its last step has written no outcome to {run.reports}")
    return outcome.show(run)
