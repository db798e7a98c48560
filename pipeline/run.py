"""`detect-objects run`, `python -m pipeline.run`: parses the command line, checks the config, launches the job.

Exit code 0: done; 1: the job failed, or too many of its images did; 2: a wrong command; 3: another run of the same command works;
130: stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import logging
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from models.quiet import uncollected
from pipeline.config import MonitoringConfig, check_model_is_named, load_config, load_monitoring, settings
from pipeline.errors import BusyError, ConfigError, FullError, StorageAwayError, UserError
from pipeline.log_lines import log_lines
from pipeline.secrets import masked_arguments, masked_text

DONE, FAILED, WRONG, BUSY = 0, 1, 2, 3
_CODES = {FullError: FAILED, StorageAwayError: FAILED, BusyError: BUSY}  # of errors of users; others: WRONG

_PURPOSES = {  # of --help; --help-all shows every flag, by its section of the config
    "what to do": ("input", "output", "model.path", "mode", "runner"),
    "which images": ("dates", "again", "retry_dead", "when_busy"),
    "what counts as a detection": ("detect.score_threshold", "detect.iou_threshold", "detect.classes"),
    "results": ("write.samples", "write.export"),
    "speed": ("detect.precision", "detect.device"),
    "streams": ("stream.archive", "stream.allow_uri_prefix"),
}
_EPILOG = """\
examples:
  detect-objects run --config configs/batch_local_direct.yaml --input 'photos/**/*.jpg' --output out/ \\
      --model models/yolov4
  detect-objects run --config configs/batch_gcs_direct.yaml --input 'gs://bucket/2026/**' --output gs://bucket/detections \\
      --model gs://bucket/models/yolov4 --score-threshold 0.4 --classes person,dog
  detect-objects run --input photos/ --output out/ --model models/yolov4 --dry-run

--help-all lists all flags. Each is a key of the config file, too; flags win. Lists are given with commas or
by repeating values, --classes a,b or --classes a b; file names may hold commas, so for --input only as --input a b.
Other flags go to Apache Beam, e.g. --runner DataflowRunner --region europe-west1; unknown flags are rejected.
exit code: 0 done, also with some dead letters; 1 the job failed, or more than max_dead_share of its images; 2 wrong command,
config, model or place; 3 another run of this command is at work; 130 stopped by Ctrl-C or SIGTERM before a batch job was done.
Rows that a job has written stay; the same command does the rest.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    started_at = time.time()
    argv = list(sys.argv[1:] if argv is None else argv)
    told = _monitoring(argv)
    with log_lines(log_format=told.log_format, log_level=told.log_level, quiet=told.quiet) as lines:
        if not told.notify or {"--dry-run", "--dry_run"} & {*argv}:
            return _run(argv, started_at)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the import takes seconds, and nobody can be notified yet
        notify = importlib.import_module("pipeline.launch.notify")
        with notify.notifying(told.notify, lines) as outcome:
            outcome["exit_code"] = _run(argv, started_at)
        return int(outcome["exit_code"])


def _monitoring(argv: Sequence[str]) -> MonitoringConfig:
    """How to log and whom to notify, also where the rest of the command is wrong; the defaults if these settings are."""
    try:
        flags, _ = make_parser().parse_known_args(argv)
        return load_monitoring(flags.config, _overrides(flags))
    except ConfigError:
        return MonitoringConfig()


def _run(argv: Sequence[str], started_at: float) -> int:
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the job itself handles signals
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        flags, beam_flags = make_parser().parse_known_args(argv)
        if flags.version or flags.help_all:
            print(_versions() if flags.version else make_parser(every=True).format_help())
            return DONE
        overrides = _overrides(flags)
        config = load_config(flags.config, overrides)
        if not config.output.strip():
            raise ConfigError("no output: expected --output with a folder, local or gs://")
        with uncollected():
            launch = importlib.import_module(f"pipeline.launch.{'streaming' if config.mode == 'streaming' else 'batch'}")
        command = shlex.join(["python", "-m", "pipeline.run", *masked_arguments(argv)])
        job = launch.prepare(config, beam_flags, command, started_at)
        check_model_is_named(config)
        code: int = launch.show_plan(job) if flags.dry_run else launch.run(job)
        return code
    except UserError as err:
        print(f"error: {masked_text(str(err))}", file=sys.stderr)
        return _CODES.get(type(err), WRONG)
    except Exception as err:  # users get one line for any failure, such as of storage while a job is planned
        logging.getLogger(__name__).info("the job failed", exc_info=err)
        print(f"error: the job failed: {masked_text(' '.join(str(err).split()))}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("stopped; rows that were written stay", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: set by another language than Python


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")


def _versions() -> str:
    programs = {"detect-objects": "hybrid-detection-pipeline", "Beam": "apache-beam", "TensorFlow": "tensorflow"}
    versions = [f"{program} {_version_of(package)}" for program, package in programs.items()]
    return f"{', '.join(versions)}, Python {sys.version.split()[0]}"


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def make_parser(*, every: bool = False) -> argparse.ArgumentParser:
    """The parser, with a flag for each setting that has one.

    Args:
      every: Whether the help shows every flag, or only those that most people use.
    """
    parser = _Parser(
        prog="detect-objects run",
        usage="detect-objects run [--config FILE] --input PATTERN [PATTERN ...] --output FOLDER --model PATH "
        "[--dry-run] [settings] [Beam flags]",
        description="Detects objects in many images: reads them, batches them through one shared model, writes detections.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
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
    parser.add_argument("--help-all", action="store_true", help="show every flag, by its section of the config")
    parser.add_argument("--version", action="store_true", help="show the versions of this program, Beam, TensorFlow and Python")
    parser.add_argument(
        "--verbose", action="store_true", help="--log-level info: show Beam's and TensorFlow's logs, and tracebacks"
    )
    purpose_of = {key: purpose for purpose, keys in _PURPOSES.items() for key in keys}
    titles = list(_PURPOSES) if not every else [_section(setting.key) for setting in settings()]
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(titles)}
    for setting in settings():
        if not setting.flag:
            continue
        title = _section(setting.key) if every else purpose_of.get(setting.key, "")
        shown = "" if setting.default in (None, "", [], False) else f" (default: {setting.default})"
        help_text = (setting.help + shown).replace("%", "%%") if title else argparse.SUPPRESS
        group = groups.get(title, parser)
        group.add_argument(setting.flag, **_argument(setting.schema), dest=setting.key, default=argparse.SUPPRESS, help=help_text)
    return parser


def _section(key: str) -> str:
    return f"{key.rpartition('.')[0] or 'job'} settings"


def _argument(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `add_argument` for a setting; the config checks its value."""
    kind = schema.get("type")
    if kind == "boolean":
        return {"action": argparse.BooleanOptionalAction}
    if kind == "array":
        return {"action": "extend", "nargs": "+", "metavar": _options(schema.get("items", {})) or "VALUE"}
    return {"metavar": _options(schema) or _METAVARS.get(str(kind), "TEXT")}


def _options(schema: Mapping[str, Any]) -> str:
    return "{" + ",".join(schema["enum"]) + "}" if "enum" in schema else ""


_METAVARS = {"integer": "N", "number": "X"}


def _overrides(flags: argparse.Namespace) -> dict[str, Any]:
    """The given flags by dotted key; splits lists at commas, except file names."""
    given = ({"monitoring.log_level": "info"} if flags.verbose else {}) | vars(flags)
    return {
        setting.key: _parts(value) if isinstance(value, list) and setting.key != "input" else value
        for setting in settings()
        if (value := given.get(setting.key)) is not None
    }


def _parts(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main())
