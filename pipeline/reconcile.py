"""`detect-objects reconcile`, `python -m pipeline.reconcile`: which images have a result, and which have none.

    detect-objects reconcile --input 'gs://cams/raw/**' --output gs://cams/detections [--model …] [--write-missing FILE.jsonl]

Prints a table; `pipeline.read.reconciled` defines its words. Rows count whatever their settings were; with `--model` only those
of this model version do.

Exit code 0: complete, each listed image is done or permanently dead; 1: it is not; 2: a wrong command or place, or storage that
does not answer; 130: stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import posixpath
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.config import Config, load_config
from pipeline.config.paths import local_path
from pipeline.detect.saved_model import name_and_version
from pipeline.errors import WRONG, ConfigError, run_command
from pipeline.read.list_images import check_inputs
from pipeline.read.reconciled import LEFT_OUT, ORPHANED, STATUSES, Found, Reconciled, reconcile
from pipeline.records import row_bytes
from pipeline.results.layout import check_output, results_folder
from pipeline.results.shards import undisturbed
from pipeline.storage.files import UNFINISHED, create, delete_files, move_files

COMPLETE, INCOMPLETE = 0, 1
_WRITTEN = ("missing", "dead", "stale", ORPHANED)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = make_parser().parse_args(argv)
    return run_command(lambda: _reconcile(flags), "the reconciliation failed", failed_code=WRONG)


def _reconcile(flags: argparse.Namespace) -> int:
    config = _config(flags)
    of_model = load_config(flags.config, {"model.path": flags.model}) if flags.model else None
    model = name_and_version(of_model.model, of_model.detect.engine) if of_model else None
    outcome = _reconciled(config, model, _paths(flags))
    print("\n".join(_table(outcome)))
    return COMPLETE if outcome.is_complete else INCOMPLETE


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="detect-objects reconcile",
        description="Says which images have a result and which have none.",
        epilog="exit code: 0 complete; 1 images are missing, stale, or dead for a transient reason; 2 wrong command or place",
        allow_abbrev=False,
    )
    add = parser.add_argument
    text = "YAML file of a job: its input, output and dates count"
    add("--config", action="append", default=[], metavar="FILE", help=text)
    add("--input", nargs="+", action="extend", metavar="PATTERN", help="the images, as detect-objects run takes them")
    add("--output", metavar="FOLDER", help="the results folder or archive, local or gs://")
    add("--dates", help="days for which {date} in an input stands")
    add("--fps", help="the frames of a second of video that the job read; default: 1")
    add("--model", metavar="PATH", help="count only rows of this model version; default: of any")
    for name in _WRITTEN:
        text = f"write the {name} images to a manifest, which detect-objects run takes as --input"
        add(f"--write-{name}", metavar="FILE.jsonl", help=text)
    return parser


def _config(flags: argparse.Namespace) -> Config:
    given = {name: getattr(flags, name) for name in ("input", "output", "dates")} | {"read.fps": flags.fps}
    config = load_config(flags.config, {name: value for name, value in given.items() if value})
    if not config.output or "/topics/" in config.output:
        raise ConfigError("no output: expected --output with a results folder or archive, local or gs://")
    check_inputs(config.patterns(), allow_empty=True)
    check_output(config.output.rstrip("/"), write=False)
    return config


def _paths(flags: argparse.Namespace) -> dict[str, str]:
    """The manifest of each status that is written."""
    try:
        return {name: local_path(given) for name in _WRITTEN if (given := getattr(flags, f"write_{name}"))}
    except ValueError as err:
        raise ConfigError(f"--write-…: {err}") from err


def _reconciled(config: Config, model: tuple[str, str] | None, paths: dict[str, str]) -> Reconciled:
    """The outcome; manifests get their names when all is compared."""
    output, patterns = results_folder(config.output), [pattern for some in config.patterns().values() for pattern in some]
    paths = {status: path if "/" in path else f"./{path}" for status, path in paths.items()}
    staged = {status: f"{posixpath.dirname(path)}/{UNFINISHED}{uuid.uuid4().hex[:12]}" for status, path in paths.items()}

    def compare() -> Reconciled:
        with contextlib.ExitStack() as stack:
            files = {status: stack.enter_context(create(path)) for status, path in staged.items()}
            return reconcile(patterns, output, model, functools.partial(_write, files), read=config.read)

    try:
        outcome = undisturbed(compare)
        move_files({staged[status]: path for status, path in paths.items()})
        return outcome
    finally:
        delete_files(staged.values())


def _write(files: Mapping[str, Any], found: Found) -> None:
    if found.status in files:
        row = {"uri": found.uri, **({"generation": found.generation} if found.generation else {})}
        files[found.status].write(row_bytes(row) + b"\n")


def _table(outcome: Reconciled) -> Iterator[str]:
    """What there is, with a few examples of what is wrong."""
    yield f"{outcome.listed:>11,} listed"
    for status in (*STATUSES, ORPHANED):
        note = f" ({outcome.transient:,} of them for a transient reason)" if status == "dead" and outcome.transient else ""
        yield f"{outcome.counts[status]:>11,} {status}{note}"
        for found in outcome.examples.get(status, ()) if status != "done" else ():
            shown = found.uri.encode("utf-8", "backslashreplace").decode()
            yield f"            {shown}{f'  {found.reason}' if found.reason else ''}"
    if outcome.counts[LEFT_OUT]:
        yield f"{outcome.counts[LEFT_OUT]:>11,} TFRecord files left out: what is in them is not looked at"
    yield "complete" if outcome.is_complete else "not complete: the same detect-objects run does what is missing or stale"


if __name__ == "__main__":
    sys.exit(main())
