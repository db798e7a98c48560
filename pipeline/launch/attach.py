"""`--attach`: shows a job that goes on without its launcher, from any machine that reaches its results folder."""

from __future__ import annotations

import dataclasses
import time

from pipeline import graph
from pipeline.config import Config
from pipeline.errors import GoesOnError, InputError
from pipeline.launch.execute import ended_by, show_outcome, wait_for_end
from pipeline.launch.signals import stopped_by_signals
from pipeline.log_lines import bind_run_id
from pipeline.monitoring.monitor import monitored
from pipeline.outcome.conclude import Conclusion
from pipeline.outcome.outcome import Launched, launched_of
from pipeline.results.run_folder import Run
from pipeline.runners.cause import naming_failures
from pipeline.runners.table import runner_named
from pipeline.stats.worker_reports import WorkerReports

_LOOK_SECONDS = 2.0


def attach(name: str, config: Config) -> int:
    """Shows a run that was submitted until it ends, and how; returns its exit code.

    Args:
      name: The run's name.
      config: Its results folder, as `output` or `archive`; and how to show it.

    Raises:
      InputError: There is no such run.
      GoesOnError: It may go on, but cannot be watched any more.
    """
    output = (config.stream.archive or config.output).rstrip("/")
    run = Run(output, name)
    launched = launched_of(run)
    if not (launched or run.has_outcome()):
        raise InputError(f"output {output}: expected a run {name} that goes on without its launcher, or has ended; found none")
    bind_run_id(name)
    with stopped_by_signals(output):
        if launched and not run.has_outcome():
            _watch(launched, dataclasses.replace(config, mode=launched.facts.config["mode"]))
        return show_outcome(run)


def _watch(launched: Launched, config: Config) -> None:
    run, runner, streams = launched.run, runner_named(launched.runner), launched.facts.streams
    reports = WorkerReports(run, graph.samples_kept(config), streaming=streams)
    running = runner.attached(launched.place, launched.job, streams=streams) if launched.job else None
    with monitored(config, reports.now), ended_by(run), naming_failures(reports.failure):
        if running is None:
            _wait_for_outcome(run)
        else:
            wait_for_end(runner, running)
    if streams and not run.has_outcome():
        Conclusion(run, launched.facts).of_reports().keep(run)
    run.remove_if_possible()


def _wait_for_outcome(run: Run) -> None:
    """Waits until a run has one, as long as it is alive.

    Raises:
      GoesOnError: It does not seem to be.
    """
    while not run.has_outcome():
        if not run.goes_on() and not run.has_outcome():
            raise GoesOnError(f"no worker of run {run.name} gives a sign of life; ask its runner what became of it")
        time.sleep(_LOOK_SECONDS)
