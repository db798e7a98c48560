"""`python -m pipeline.run`: parses the command line, checks the config, launches the job.

`pipeline.errors.EXIT_CODES` has its exit codes.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from models.base.project import PROJECT
from models.base.quiet import gc_paused
from pipeline.config import Config, MonitoringConfig, check_applies, check_model_is_named, load_config, load_monitoring, settings
from pipeline.config.flags import add_setting_flags, overrides
from pipeline.config.setting import is_own_engine
from pipeline.errors import DONE, EXIT_CODES, CommandParser, ConfigError, run_command
from pipeline.log_lines import log_lines, open_closed_streams
from pipeline.secrets import masked_arguments
from pipeline.software import version_of

_STOPPED = "stopped; rows that were written stay, and the same command does the rest"
_EXAMPLE = "--input photos/ --model models/yolov4 --output out/"
_EPILOG = (
    """\
what most people use:
  --input PATTERN ...        images: files, folders, globs with **, gs://, s3://, abfs://, manifests, archives, videos
  --output FOLDER            the results, local, gs://, s3:// or abfs://; of a stream its topic
  --model PATH               SavedModel, folder of versions, or grpc://; 'digits' is the bundled detector
  --mode streaming           Pub/Sub in, Pub/Sub out; --archive FOLDER keeps the rows
  --runner RUNNER            DirectRunner (default), PrismRunner, FlinkRunner, SparkRunner, DataflowRunner
  --dates DAYS               fills {date} in the input: 2026-11-20, yesterday, 'last 7 days'
  --again                    detect images that are done again, too
  --retry-dead [FOLDER]      detect in the images that failed, there or in the output
  --when-busy skip           if another run is processing the same images: wait (default), skip or stop
  --score-threshold 0.25     least confidence; --iou-threshold 0.45 for boxes that are one object
  --classes NAME ...         keep only these classes
  --export FORMAT ...        write the results as csv, coco, yolo or in another format, too
  --samples N                write N annotated images
  --precision bfloat16       faster on some CPUs, float16 on GPUs; --device cpu, gpu or gpu:0
  --allow-uri-prefix URI     folders whose images may be named by messages and by manifests found by a glob

  python -m pipeline.run --input 'photos/**/*.jpg' --output out/ --model models/yolov4 --dry-run
  python -m pipeline.run --config configs/batch_gcs_direct.yaml --input 'gs://bucket/2026/**' --output gs://bucket/detections \\
      --model gs://bucket/models/yolov4 --score-threshold 0.4 --classes person,dog

Each flag is a key of the config file, too; flags win. Lists take commas or several values; file names may hold commas, so
--input takes several values only. Other flags go to Apache Beam, e.g. --region europe-west1; unknown flags are rejected.
exit code:
"""
    + "".join(f"  {code:<4} {each.meaning.replace('`', '')}\n" for code, each in EXIT_CODES.items())
    + """\
Rows that a job has written stay; the same command does the rest.
"""
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    started_at = time.time()
    open_closed_streams()
    argv = list(sys.argv[1:] if argv is None else argv)
    monitoring = _monitoring(argv)

    def work() -> int:
        watches = any(flag.startswith("--attach") for flag in argv)
        return run_command(lambda: _run(argv, started_at), "the job failed", "left; the run goes on" if watches else _STOPPED)

    with log_lines(log_format=monitoring.log_format, log_level=monitoring.log_level, stamped=True) as log:
        if not (monitoring.notify or monitoring.metrics_file) or {"--dry-run", "--dry_run"} & {*argv}:
            return work()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the import takes seconds, and nobody can be notified yet
        notify = importlib.import_module("pipeline.monitoring.notify")
        return int(notify.notifying(monitoring, log, work))


def _monitoring(argv: Sequence[str]) -> MonitoringConfig:
    """How to log and whom to notify, also where the rest of the command is wrong; the defaults if these settings are."""
    try:
        flags, _ = make_parser().parse_known_args(argv)
        return load_monitoring(flags.config, _overrides(flags))
    except ConfigError:
        return MonitoringConfig()


def _run(argv: Sequence[str], started_at: float) -> int:
    flags, beam_flags = make_parser().parse_known_args(argv)
    if flags.version or flags.help_all:
        print(_versions() if flags.version else make_parser(every=True).format_help())
        return DONE
    config = load_config(flags.config, _overrides(flags))
    if config.monitoring.metrics_file:
        from pipeline.storage.files import file_to_write  # with NumPy, which no other check needs

        file_to_write("--metrics-file", config.monitoring.metrics_file)
    if flags.attach:
        return _attach(flags.attach, config, beam_flags)
    check_applies(config)
    if argv[:1] and not argv[0].startswith("-"):
        raise ConfigError(f"unexpected argument {argv[0]!r}: expected flags; --input {shlex.quote(argv[0])} names images")
    _check_is_complete(config)
    with gc_paused():
        launch = importlib.import_module(f"pipeline.launch.{'streaming' if config.mode == 'streaming' else 'batch'}")
    command = shlex.join(
        ["python", "-m", "pipeline.run", *masked_arguments(argv, [each.flag for each in settings() if each.is_secret])]
    )
    job = launch.prepare(config, beam_flags, command, started_at, wait=flags.wait)
    check_model_is_named(config.model, config.detect)
    return int(launch.show_plan(job) if flags.dry_run else launch.run(job))


def _attach(run: str, config: Config, beam_flags: Sequence[str]) -> int:
    if beam_flags:
        raise ConfigError(f"unknown flag {beam_flags[0]}; --attach takes --output or --archive, and how to show the run")
    if not (config.stream.archive or config.output.strip()):
        raise ConfigError("no output: expected --output, or --archive of a stream, with the folder of the run's results")
    return int(importlib.import_module("pipeline.launch.attach").attach(run, config))


def _check_is_complete(config: Config) -> None:
    """Refuses a job that lacks what each job needs, in the order in which a person gives it.

    Raises:
      ConfigError: Something is missing.
    """
    given = {
        "input": config.input or config.retry_dead,
        "model": config.model.path or is_own_engine(config.detect.engine),
        "output": config.output.strip(),
    }
    missing = [name for name, value in given.items() if not value]
    if len(missing) > 1:
        flags = ", ".join(f"--{name}" for name in missing)
        raise ConfigError(f"no {' and no '.join(missing)}: expected {flags}; such as {_EXAMPLE}")
    if missing == ["output"]:
        raise ConfigError("no output: expected --output with a folder, local, gs://, s3:// or abfs://")


class _Parser(CommandParser):
    """A parser whose errors are those of a config."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")


def _versions() -> str:
    programs = {"detect-objects": PROJECT, "Beam": "apache-beam", "TensorFlow": "tensorflow"}
    versions = [f"{program} {version_of(package) or '(not installed)'}" for program, package in programs.items()]
    return f"{', '.join(versions)}, Python {sys.version.split()[0]}"


def make_parser(*, every: bool = False) -> argparse.ArgumentParser:
    """The parser, with a flag for each setting that has one; the help shows every flag, or only those that most people use."""
    parser = _Parser(
        prog="python -m pipeline.run",
        usage="python -m pipeline.run [--config FILE] --input PATTERN [PATTERN ...] --output FOLDER --model PATH "
        "[--dry-run] [settings] [Beam flags]",
        description="Detects objects in many images: reads them, batches them through one shared model, writes detections.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file with the job's settings; see configs/. Of several (--config A --config B) the last one wins",
    )
    parser.add_argument(
        "--dry-run",
        "--dry_run",  # Beam accepts it and ignores it
        action="store_true",
        help="load the model, list the input, print the plan and what looks wrong, write nothing",
    )
    parser.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="watch the job until it ends; --no-wait returns once it is submitted, where workers do without this process",
    )
    parser.add_argument(
        "--attach",
        default="",
        metavar="RUN",
        help="show a submitted run, of this --output or --archive, and end with its exit code",
    )
    parser.add_argument("--help-all", action="store_true", help="show every flag, by its section of the config")
    parser.add_argument("--version", action="store_true", help="show the versions of this program, Beam, TensorFlow and Python")
    parser.add_argument(
        "--verbose", action="store_true", help="--log-level info: show Beam's and TensorFlow's logs, and tracebacks"
    )
    add_setting_flags(parser, every=every)
    return parser


def _overrides(flags: argparse.Namespace) -> dict[str, Any]:
    """The given flags by dotted key."""
    return ({"monitoring.log_level": "info"} if flags.verbose else {}) | overrides(flags)


if __name__ == "__main__":
    sys.exit(main())
