"""`python -m pipeline.run`: parses, checks, launches, reports.

Exit code 0: done; 1: the job failed, or too many images did; 2: a wrong command.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import shlex
import signal
import sys
import time
import types
import typing
from collections.abc import Sequence
from typing import Any

import yaml

from pipeline.config import load_config, settings
from pipeline.errors import ConfigError, UserError

DONE, FAILED, WRONG = 0, 1, 2

_EPILOG = """\
examples:
  python -m pipeline.run --config configs/batch_local_direct.yaml --input 'photos/**/*.jpg' --output out/
  python -m pipeline.run --config configs/batch_gcs_direct.yaml --input 'gs://bucket/2026/**' --output gs://bucket/detections \\
      --model gs://bucket/models/yolov4 --score-threshold 0.4 --classes person,dog
  python -m pipeline.run --input photos/ --output out/ --dry-run

Every setting is a key of the config file and a flag; flags win. Lists are given with commas, or by repeating values: --input a b.
Flags that are none of these go to Beam, e.g. --runner DataflowRunner --region europe-west1; unknown ones are errors.
exit code: 0 done, also with some dead letters; 1 the job failed, or more than max_dead_share of its images; 2 wrong command,
config, model or place
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    started_at = time.time() - _process_age()
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    flags, beam_flags = parser.parse_known_args(argv)
    logging.basicConfig(level=logging.INFO if flags.verbose else logging.CRITICAL, format="%(levelname)s %(name)s: %(message)s")
    try:
        config = load_config(flags.config, _overrides(flags))
        if not config.output:
            raise ConfigError("no output: expected --output with a folder, local or gs://")
        launch = importlib.import_module("pipeline.launch.streaming" if config.mode == "streaming" else "pipeline.launch.batch")
        command = shlex.join(["python", "-m", "pipeline.run", *argv])
        job = launch.prepare(config, beam_flags, command, started_at)
        code: int = launch.show_plan(job) if flags.dry_run else launch.run(job)
        return code
    except UserError as err:
        print(f"error: {err}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("stopped; nothing was published", file=sys.stderr)
        return 128 + signal.SIGINT


def make_parser() -> argparse.ArgumentParser:
    """The parser: one flag for each setting, taken from the config's own declaration."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.run",
        usage="python -m pipeline.run [--config FILE] --input PATTERN [PATTERN ...] --output FOLDER [--model PATH] "
        "[--dry-run] [settings] [Beam flags]",
        description="Detects objects in many images: reads them, batches them through one shared model, writes detections.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with the job's settings; see configs/")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="load the model, look at the input, print the plan and what is wrong, write nothing",
    )
    parser.add_argument("--verbose", action="store_true", help="show Beam's and TensorFlow's logs, and tracebacks")
    groups: dict[str, Any] = {}
    for key, field, hint in settings():
        section, _, name = key.rpartition(".")
        if name == "beam_options":
            continue
        if section not in groups:
            groups[section] = parser.add_argument_group(f"{section or 'job'} settings")
        flag = "--model" if key == "model.path" else "--" + name.replace("_", "-")
        shown = "" if field.default in (None, "", (), False) else f" (default: {_show(field.default)})"
        groups[section].add_argument(
            flag, **_argument(hint), dest=key, default=argparse.SUPPRESS, help=(field.metadata["help"] + shown).replace("%", "%%")
        )
    return parser


def _argument(hint: Any) -> dict[str, Any]:
    """How argparse takes a setting of this type; values are checked by the config, not here."""
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if types.NoneType in typing.get_args(hint) and options:
        return _argument(options[0])
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+", "metavar": "VALUE"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is typing.Literal:
        return {"metavar": "{" + ",".join(typing.get_args(hint)) + "}"}
    return {"metavar": {int: "N", float: "X"}.get(hint, "TEXT")}


def _overrides(flags: argparse.Namespace) -> dict[str, Any]:
    """Dotted keys to values, as YAML would have read them."""
    types_of = {key: hint for key, _, hint in settings()}
    overrides = {key: _value(value, types_of[key]) for key, value in vars(flags).items() if key in types_of}
    if "input" in overrides:
        overrides["input"] = flags.input  # file names may hold commas
    return overrides


def _value(value: Any, hint: Any) -> Any:
    if isinstance(value, list):
        parts = [part.strip() for text in value for part in text.split(",") if part.strip()]
        return parts if "str" in str(hint) else [_scalar(part) for part in parts]
    wants_text = hint is str or str in typing.get_args(hint) or "Literal" in str(hint)
    return _scalar(value) if isinstance(value, str) and not wants_text else value


def _scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text  # the config says what it expected instead


def _show(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _process_age() -> float:
    """Seconds since this process started, so that start-up counts imports too."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = float(re.split(r"\) ", stat.read())[-1].split()[19])
            return float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


if __name__ == "__main__":
    sys.exit(main())
