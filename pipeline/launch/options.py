"""Beam's side of a job: its options, each known and checked, and the pipeline that they make."""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import apache_beam as beam
from apache_beam.options.pipeline_options import (
    DebugOptions,
    DirectOptions,
    GoogleCloudOptions,
    PipelineOptions,
    PortableOptions,
    SetupOptions,
    WorkerOptions,
)
from apache_beam.runners.worker.statesampler import StateSampler

from pipeline.config import Config, WorkerConfig, settings
from pipeline.config.synonyms import near_names, synonym_of
from pipeline.errors import ConfigError, RunnerError
from pipeline.launch.flink_options import FlinkStreamOptions, server_options
from pipeline.launch.machines import check_machine, network_flags
from pipeline.launch.runners import RUNNERS, Runner, check_runner, runner_named
from pipeline.stats.process import ModelStats
from pipeline.stats.summary import RunFacts
from pipeline.storage.write_policy import RESOLVED_INPUT

_JOB_SERVER_TIMEOUT = ("--job_server_timeout", "--job-server-timeout")
_FLAGS = ("--config", "--dry-run", "--verbose", "--version", "--help", "--help-all")  # beside those of settings
_SAMPLING_MS = 20
_CANARY_SECONDS = 5.0  # that the end of a job waits for what a canary has in hand
_YEARS_SECONDS = 10 * 365 * 86_400  # Beam ends a portable job after this time (by default 300 s), though it says it doesn't


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked job, ready to run.

    Attributes:
      config: Its settings.
      runner: What its runner can do.
      options: Beam's options.
      command: The command line that made it.
      started_at: When the command started, seconds since the epoch.
      resolved_input: The inputs of a batch job as they are the same from wherever it is started.
    """

    config: Config
    runner: Runner
    options: PipelineOptions
    command: str
    started_at: float
    resolved_input: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, nested, as the results say them."""
        return self.config.as_dict() | ({RESOLVED_INPUT: list(self.resolved_input)} if self.resolved_input else {})

    @property
    def in_process(self) -> bool:
        """Whether the launcher's own process detects, and so needs the model."""
        return self.runner.in_process and self.options.view_as(DirectOptions).direct_running_mode != "multi_processing"

    @property
    def is_detached(self) -> bool:
        """Whether the launcher leaves the job to itself once it runs."""
        return bool(self.options.view_as(FlinkStreamOptions).detach)

    @property
    def attached(self) -> str:
        """The runner's name of a job that runs already, and which this launcher comes back to; "" where it is a new one."""
        return self.options.view_as(FlinkStreamOptions).attach or ""

    @property
    def template(self) -> str:
        """Where the job is to be written as a template, instead of being run; "" where it is to run."""
        return self.options.view_as(GoogleCloudOptions).template_location or ""

    def pipeline(self) -> beam.Pipeline:
        """An empty pipeline for this job.

        Raises:
          RunnerError: Beam refuses the options.
        """
        try:
            return beam.Pipeline(runner=self.runner.make(), options=self.options)
        except ValueError as err:  # what Beam's PipelineOptionsValidator finds, a line each
            found = str(err).removeprefix("Pipeline has validations errors:")
            raise RunnerError(f"runner {self.runner.name}: {' '.join(found.split())}") from err

    def done(self, ready_at: float, model: ModelStats) -> RunFacts:
        """What is to be told of this job, which ends now, but for what its canary has in hand."""
        config, canary = self.config, model.canary_stats(_CANARY_SECONDS)
        return RunFacts(
            self.started_at,
            ready_at,
            time.time(),
            self.command,
            self.settings,
            config.mode,
            config.model.path,
            model.batch_sizes,
            canary,
        )


def checked_job(config: Config, beam_flags: Sequence[str], command: str, started_at: float) -> Job:
    """A job whose runner and options are checked; places are for the mode to check.

    Raises:
      UserError: Something is wrong; the message says what.
    """
    runner = runner_named(config.runner)
    options = beam_options(config, beam_flags)
    check_runner(runner, options)
    if config.mode == "streaming":
        runner.check_stream(options)
    _check_workers(config, runner, options)
    _set_unless_asked(options, runner, config.mode)
    end_bundles_promptly()
    return Job(config, runner, options, command, started_at)


def beam_options(config: Config, beam_flags: Sequence[str]) -> PipelineOptions:
    """Beam's options: the config's, then the flags'.

    Raises:
      ConfigError: One is unknown; Beam itself would only warn.
      RunnerError: Nobody listens at the job server's endpoint.
    """
    of_config = [flag for name, value in config.beam_options.items() for flag in _as_flags(name, value)]
    flags = [*network_flags(config.worker), *of_config, *beam_flags]
    options = PipelineOptions([f"--runner={config.runner}", *flags])
    portable = options.view_as(PortableOptions)
    if not any(flag.startswith(_JOB_SERVER_TIMEOUT) for flag in flags):
        portable.job_server_timeout = _YEARS_SECONDS
    endpoint = portable.job_endpoint if portable.job_endpoint != "embed" else None
    _check_known(flags, endpoint)
    if endpoint:
        _check_reachable(endpoint)
    return options


def end_bundles_promptly() -> None:
    """Makes local workers end their bundles up to 0.2 s sooner.

    Beam ends a bundle by joining the thread that samples which step is busy. That thread sleeps for 200 ms at a time, and no
    option sets it.
    """
    StateSampler.__init__.__defaults__ = (_SAMPLING_MS,)


def _check_workers(config: Config, runner: Runner, options: PipelineOptions) -> None:
    """Makes sure that a runner's workers can be what is asked for, and can write where they shall.

    Raises:
      ConfigError: They cannot.
    """
    if config.worker != WorkerConfig() and not runner.fits_machines:
        able = " or ".join(other.name for other in RUNNERS if other.fits_machines)
        *others, last = (f"worker.{field.name}" for field in dataclasses.fields(WorkerConfig))
        raise ConfigError(f"{', '.join(others)} and {last}: expected {able}, which fits machines; got {runner.name}")
    if config.worker.accelerator:
        check_machine(config.worker.accelerator, options.view_as(WorkerOptions).machine_type)
    name, place = ("archive", config.stream.archive) if config.mode == "streaming" else ("output", config.output)
    if not runner.local_files and "://" not in place:
        raise ConfigError(f"{name}: expected a folder that the workers of {runner.name} reach, gs://<bucket>/…; got {place!r}")
    if options.view_as(PortableOptions).environment_type == "PROCESS":
        for key, path in [(name, place), *(("input", path) for path in config.input if config.mode == "batch")]:
            if not ("://" in path or os.path.isabs(path)):
                raise ConfigError(
                    f"{key}: expected gs:// or an absolute path, since workers begin in folders of their own; got {path!r}"
                )


def _set_unless_asked(options: PipelineOptions, runner: Runner, mode: str) -> None:
    """Sets what each job on a runner wants, where the user does not say otherwise."""
    setup, debug = options.view_as(SetupOptions), options.view_as(DebugOptions)
    if setup.save_main_session is None:
        setup.save_main_session = False  # what steps need of this project is imported; a pickle of `__main__` helps nobody
    for experiment in (*runner.experiments, *(runner.stream_experiments if mode == "streaming" else ())):
        if not debug.lookup_experiment(experiment.removeprefix("no_")):
            debug.add_experiment(experiment)


class _OneLine(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")


def _check_known(flags: Sequence[str], endpoint: str | None = None) -> None:
    """Makes sure that Beam or the job server knows each flag; the server is asked only for what Beam does not know."""
    known = _OneLine(add_help=False, allow_abbrev=False, conflict_handler="resolve")
    for options in _all_subclasses(PipelineOptions):
        if "_add_argparse_args" in vars(options):
            options._add_argparse_args(known)
    unknown = known.parse_known_args(flags)[1]
    if unknown and endpoint:
        _check_reachable(endpoint)
        for name, action in server_options(endpoint).items():
            if name not in known._option_string_actions:
                known.add_argument(name, action=action)
        unknown = known.parse_known_args(flags)[1]
    if unknown and unknown[0].startswith("-"):
        flag = unknown[0].split("=")[0]
        raise ConfigError(f"unknown flag {flag}; {_hint(flag, [name for name in known._option_string_actions if name])}")
    if unknown:
        name, given, value = unknown[0].partition("=")
        hint = _hint(name, [], f" {value}") if given else "see --help"
        raise ConfigError(f"unexpected argument {unknown[0]!r}; {hint}")


def _hint(flag: str, of_beam: Sequence[str], value: str = "") -> str:
    """What somebody may have meant by a flag, or by a word before `=` and a value."""
    if synonym := synonym_of(flag):
        return f"here it is {synonym}"
    near = near_names(flag, [*_FLAGS, *(setting.flag for setting in settings()), *of_beam], most=1)
    return f"did you mean {near[0]}{value}?" if near else "see --help"


def _all_subclasses(cls: Any) -> list[Any]:
    return [found for child in cls.__subclasses__() for found in (child, *_all_subclasses(child))]


def _as_flags(name: str, value: Any) -> list[str]:
    flag = "--" + name.lstrip("-")
    if isinstance(value, bool):
        return [flag] if value else []
    return [f"{flag}={element}" for element in (value if isinstance(value, list) else [value])]


def _check_reachable(endpoint: str) -> None:
    """Makes sure that a job server listens.

    Raises:
      RunnerError: None does.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as err:
        raise RunnerError(f"job_endpoint {endpoint}: expected <host>:<port> where a job server listens, but: {err}") from err
