"""A job's options for Beam: known, checked, and made into a pipeline."""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
from collections.abc import Sequence
from typing import Any, NoReturn

import apache_beam as beam
from apache_beam.options.pipeline_options import DebugOptions, DirectOptions, PipelineOptions, PortableOptions, SetupOptions

from pipeline.beam_internals import end_bundles_promptly
from pipeline.config import BUNDLED, Config, settings
from pipeline.config.mistakes import near_flag
from pipeline.errors import AwayError, ConfigError, RunnerError
from pipeline.runners.table import RUNNERS, Runner, runner_named
from pipeline.secrets import without_secrets
from pipeline.stats.summary import RunFacts

_JOB_SERVER_TIMEOUT = ("--job_server_timeout", "--job-server-timeout")
_MODELS = "/models/"  # in the image of workers
_FLAGS = (
    "--config",
    "--dry-run",
    "--no-wait",
    "--attach",
    "--verbose",
    "--version",
    "--help",
    "--help-all",
)  # besides those of settings
_YEARS_SECONDS = 10 * 365 * 86_400  # Beam ends a portable job after this time, 300 s by default, against its documentation


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked job, ready to run.

    The resolved inputs of a batch job are absolute paths and URIs. A job that is not to `wait` is left once it is submitted.
    """

    config: Config
    runner: Runner
    options: PipelineOptions
    command: str
    started_at: float
    resolved_input: tuple[str, ...] = ()
    wait: bool = True

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, nested, as the results name them."""
        return self.config.as_dict() | (
            {"resolved_input": without_secrets(list(self.resolved_input))} if self.resolved_input else {}
        )

    @property
    def in_process(self) -> bool:
        """Whether the launcher's process detects, and so needs the model."""
        return self.runner.in_process and self.options.view_as(DirectOptions).direct_running_mode != "multi_processing"

    def pipeline(self) -> beam.Pipeline:
        """An empty pipeline for this job.

        Raises:
          RunnerError: Beam refuses the options.
        """
        try:
            return beam.Pipeline(runner=self.runner.make(), options=self.options)
        except ValueError as err:  # Beam's PipelineOptionsValidator: one line for each mistake
            found = str(err).removeprefix("Pipeline has validations errors:")
            raise RunnerError(f"runner {self.runner.name}: {' '.join(found.split())}") from err

    def facts(self, launched_at: float) -> RunFacts:
        """The facts of this job, whose graph runs from now on."""
        return RunFacts(self.started_at, launched_at, 0.0, self.command, self.settings)


def checked_job(config: Config, beam_flags: Sequence[str], command: str, started_at: float, *, wait: bool = True) -> Job:
    """A job with a checked runner and options; batch and streaming check its input and output themselves.

    Raises:
      UserError: A setting or option is wrong.
    """
    runner = runner_named(config.runner)
    if runner.in_process and not wait:
        able = ", ".join(other.name for other in RUNNERS if not other.in_process)
        raise ConfigError(f"--no-wait: expected --runner {able}; jobs of {runner.name} end with this process")
    options = beam_options(config, beam_flags)
    given = options.get_all_options()
    if missing := [flags for flags in runner.needs if not any(given[flag[2:]] for flag in flags.split(" or "))]:
        raise ConfigError(f"runner {runner.name}: expected {' and '.join(missing)}")
    _check_taken(runner, beam_flags)
    runner.check(options)
    if config.mode == "streaming":
        runner.check_stream(options)
    _check_workers(config, runner, options)
    _set_unless_asked(options, runner, config.mode)
    end_bundles_promptly()
    return Job(config, runner, options, command, started_at, wait=wait)


def beam_options(config: Config, beam_flags: Sequence[str]) -> PipelineOptions:
    """Beam's options: the config's, then the flags'.

    Raises:
      ConfigError: An option is unknown; Beam itself would only warn.
      RunnerError: The job server's endpoint is none.
      AwayError: Nothing answers there.
    """
    if "runner" in config.beam_options:
        raise ConfigError("beam_options.runner: expected runner as a key of its own, outside of beam_options")
    of_config = [flag for name, value in config.beam_options.items() for flag in _as_flags(name, value)]
    flags = [*of_config, *beam_flags]
    options = PipelineOptions([f"--runner={config.runner}", *flags])
    portable = options.view_as(PortableOptions)
    if not any(flag.startswith(_JOB_SERVER_TIMEOUT) for flag in flags):
        portable.job_server_timeout = _YEARS_SECONDS
    _check_known(flags)
    if portable.job_endpoint:
        _check_reachable(portable.job_endpoint)
    return options


def _check_taken(runner: Runner, beam_flags: Sequence[str]) -> None:
    """Refuses flags that another runner takes; what a config file has for its own runner may stay when a flag chooses another.

    Raises:
      ConfigError: There is one.
    """
    for options in {kind for other in RUNNERS for kind in other.takes}.difference(runner.takes):
        if unused := options([*beam_flags]).get_all_options(drop_default=True, current_only=True):
            able = " or ".join(other.name for other in RUNNERS if options in other.takes)
            raise ConfigError(f"--{min(unused)}: expected --runner {able}; {runner.name} does not use it")


def _check_workers(config: Config, runner: Runner, options: PipelineOptions) -> None:
    """Checks that a runner can start the workers that the config describes, and that they can write the results."""
    if config.worker.accelerator and not runner.has_own_machines:
        able = " or ".join(other.name for other in RUNNERS if other.has_own_machines)
        raise ConfigError(f"worker.accelerator: expected {able}, which fits machines; got {runner.name}")
    are_processes = options.view_as(PortableOptions).environment_type == "PROCESS"
    for key, path in _places_of_workers(config):
        if runner.has_own_machines and "://" not in path:
            raise ConfigError(f"{key}: expected gs://<bucket>/…, which the workers of {runner.name} reach; got {path!r}")
        if are_processes and not ("://" in path or os.path.isabs(path)):
            raise ConfigError(
                f"{key}: expected gs:// or an absolute path, since workers begin in folders of their own; got {path!r}"
            )
    model = config.model.path
    if runner.has_own_machines and not ("://" in model or model in ("", BUNDLED) or is_in_image(config)):
        raise ConfigError(
            f"model: expected gs://<bucket>/…, or {_MODELS}<name> in the image of {runner.name}'s workers; got {model!r}"
        )


def _places_of_workers(config: Config) -> list[tuple[str, str]]:
    """What workers read and write, by the setting that names it."""
    if config.mode == "streaming":
        return [("archive", config.stream.archive)]
    return [("output", config.output), *(("input", path) for path in config.input)]


def is_in_image(config: Config) -> bool:
    """Whether the model lies where deploy/Dockerfile puts models into the image of workers."""
    return config.model.path.startswith(_MODELS)


def _set_unless_asked(options: PipelineOptions, runner: Runner, mode: str) -> None:
    """Sets the options that all jobs on a runner have, unless the user sets others."""
    setup, debug = options.view_as(SetupOptions), options.view_as(DebugOptions)
    if setup.save_main_session is None:
        setup.save_main_session = False  # steps import what they need; none needs a pickle of `__main__`
    for experiment in (*runner.experiments, *(runner.stream_experiments if mode == "streaming" else ())):
        if not debug.lookup_experiment(experiment.removeprefix("no_")):
            debug.add_experiment(experiment)


def _check_known(flags: Sequence[str]) -> None:
    known = _parser_of_beam()
    unknown = known.parse_known_args(flags)[1]
    if not unknown:
        return
    name, given, _value = unknown[0].partition("=")
    is_flag = name.startswith("-")
    names = [*_FLAGS, *(setting.flag for setting in settings()), *(f"--{option}" for option in vars(known.parse_args([])))]
    hint = near_flag(name, names) if is_flag or given else ""
    if name.lstrip("-").replace("-", "_") in {setting.name for setting in settings() if not setting.flag}:
        hint = "it is a key of the file in --description, or of the config's section model"
    what = f"unknown flag {name}" if is_flag else f"unexpected argument {unknown[0]!r}"
    raise ConfigError(f"{what}; {hint or 'see --help'}")


def _parser_of_beam() -> argparse.ArgumentParser:
    """Beam's own parser of all its options, whose errors are a `ConfigError`."""
    parsers: list[argparse.ArgumentParser] = []
    PipelineOptions([]).get_all_options(add_extra_args_fn=parsers.append)
    parsers[0].error = _refuse  # type: ignore[method-assign]
    return parsers[0]


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}; see --help")


def _as_flags(name: str, value: Any) -> list[str]:
    flag = "--" + name.lstrip("-")
    if value is False:  # the flag that switches it off; what is off anyway needs none; Beam's parser refuses the others
        parser, off = _parser_of_beam(), f"--no_{name}"
        given, unknown = parser.parse_known_args([off])
        if not unknown and vars(given).get(name) is False:
            return [off]
        return [] if vars(parser.parse_args([])).get(name, True) in (None, False) else [f"{flag}=false"]
    if value is True:
        return [flag]
    return [f"{flag}={element}" for element in (value if isinstance(value, list) else [value])]


def _check_reachable(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as err:
        kind = AwayError if isinstance(err, OSError) else RunnerError
        raise kind(f"job_endpoint {endpoint}: expected <host>:<port> where a job server listens, but: {err}") from err
