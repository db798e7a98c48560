"""`detect-objects reconcile`, `python -m pipeline.reconcile`: which images have a result, and which have none.

    detect-objects reconcile --input 'gs://cams/raw/**' --output gs://cams/detections [--model …] [--write-missing FILE.jsonl]

Prints a table, and writes `reconcile.html` into the results folder (`--no-page`: does not). `pipeline.read.reconciled` says what
the words mean. Rows count whatever their settings were; with `--model` only those of this model version do.

Exit code 0: complete, each listed image is done or permanently dead; 1: it is not; 2: a wrong command or place, or storage that
does not answer; 130: stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import posixpath
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.config import Config, load_config
from pipeline.config.paths import local_path
from pipeline.detect.saved_model import name_and_version
from pipeline.errors import ConfigError, OutputError, UserError
from pipeline.read.list_images import check_inputs
from pipeline.read.reconciled import FINDINGS, STATUSES, Found, Reconciled, reconcile
from pipeline.records import row_bytes
from pipeline.report.reconciliation import render_reconciliation
from pipeline.results.layout import RECONCILIATION, check_exists, check_output
from pipeline.results.reports import is_own_report
from pipeline.storage.files import UNFINISHED, create, delete_files, exists, move_files, write_file

COMPLETE, INCOMPLETE, WRONG = 0, 1, 2
_WRITTEN = ("missing", "dead", "stale", "doubled", "orphaned")
_ATTEMPTS = 3  # a compaction may take files away while they are read


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        config = _config(flags)
        model = _model(flags)
        check_exists(config.output)
        outcome = _reconciled(config, model, {name: _manifest(flags, name) for name in _WRITTEN})
        print("\n".join(_table(outcome)))
        if flags.page:
            print(f"page in {_write_page(outcome, config)}")
        return COMPLETE if outcome.is_complete else INCOMPLETE
    except UserError as err:
        print(f"error: {err}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as err:  # noqa: BLE001  whatever storage says, the user gets one line
        print(f"error: the reconciliation failed: {' '.join(str(err).split())[:500]}", file=sys.stderr)
        return WRONG


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="detect-objects reconcile",
        description="Says which images have a result and which have none.",
        epilog="exit code: 0 complete; 1 images are missing, stale, or dead for a transient reason; 2 wrong command or place",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file of a job: its input, output, dates and time zone count",
    )
    parser.add_argument(
        "--input", nargs="+", action="extend", metavar="PATTERN", help="the images, as detect-objects run takes them"
    )
    parser.add_argument("--output", metavar="FOLDER", help="the results folder or archive, local or gs://")
    parser.add_argument("--dates", help="days for which {date} in an input stands")
    parser.add_argument("--time-zone", help="where days begin and end")
    parser.add_argument("--fps", help="the frames of a second of video that the job read; default: 1")
    parser.add_argument("--model", metavar="PATH", help="count only rows of this model version; default: of any")
    parser.add_argument(
        "--page", action=argparse.BooleanOptionalAction, default=True, help="write reconcile.html into the output"
    )
    for name in _WRITTEN:
        said = f"write the {name} images to a manifest, which detect-objects run takes as --input"
        parser.add_argument(f"--write-{name}", metavar="FILE.jsonl", help=said)
    return parser


def _config(flags: argparse.Namespace) -> Config:
    given = {name: getattr(flags, name) for name in ("input", "output", "dates", "time_zone")}
    given["read.fps"] = flags.fps
    config = load_config(flags.config, {name: value for name, value in given.items() if value})
    if not config.output or "/topics/" in config.output:
        raise ConfigError("no output: expected --output with a results folder or archive, local or gs://")
    check_inputs(config.patterns(), allow_empty=True)
    output = config.output.rstrip("/")
    check_output(output, write=False)
    if flags.page and exists(f"{output}/{RECONCILIATION}") and not is_own_report(RECONCILIATION, output):
        raise OutputError(f"output {output}: {RECONCILIATION} there is not of this program; move it, or give --no-page")
    return config


def _model(flags: argparse.Namespace) -> tuple[str, str] | None:
    if not flags.model:
        return None
    config = load_config(flags.config, {"model.path": flags.model})
    return name_and_version(config.model, config.detect.engine)


def _manifest(flags: argparse.Namespace, status: str) -> str | None:
    given = getattr(flags, f"write_{status}")
    try:
        return given and local_path(given)
    except ValueError as err:
        raise ConfigError(f"--write-{status}: {err}") from err


def _reconciled(config: Config, model: tuple[str, str] | None, manifests: Mapping[str, str | None]) -> Reconciled:
    patterns = [pattern for patterns in config.patterns().values() for pattern in patterns]
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with _manifests({status: path for status, path in manifests.items() if path}) as write:
                return reconcile(patterns, config.output.rstrip("/"), model, write, read=config.read)
        except OSError:
            if attempt == _ATTEMPTS:
                raise
    raise AssertionError


@contextlib.contextmanager
def _manifests(paths: Mapping[str, str]) -> Iterator[Callable[[Found], None]]:
    """Writes images of some statuses to manifests, which get their names when all are written."""
    paths = {status: path if "/" in path else f"./{path}" for status, path in paths.items()}
    staged = {
        status: posixpath.join(posixpath.dirname(path), UNFINISHED + uuid.uuid4().hex[:12]) for status, path in paths.items()
    }
    try:
        with contextlib.ExitStack() as stack:
            files = {status: stack.enter_context(create(path)) for status, path in staged.items()}

            def write(found: Found) -> None:
                if found.status in files:
                    row = {"uri": found.uri, "generation": found.generation}
                    files[found.status].write(row_bytes({name: value for name, value in row.items() if value}) + b"\n")

            yield write
        move_files({staged[status]: path for status, path in paths.items()})
    except BaseException:
        delete_files(staged.values())
        raise


def _table(outcome: Reconciled) -> Iterator[str]:
    """What there is, with a few examples of what is wrong."""
    yield f"{outcome.listed:>11,} listed"
    for status in (*STATUSES, *FINDINGS):
        note = f" ({outcome.is_transient:,} of them for a transient reason)" if status == "dead" and outcome.is_transient else ""
        yield f"{outcome.counts[status]:>11,} {status}{note}"
        for found in outcome.examples.get(status, ()) if status != "done" else ():
            yield f"            {_readable(found.uri)}{f'  {found.reason}' if found.reason else ''}"
    if outcome.left_out:
        yield f"{outcome.left_out:>11,} TFRecord files left out: what is in them is not looked at"
    yield "complete" if outcome.is_complete else "not complete: python -m pipeline.run … --only-new does what is missing or stale"


def _write_page(outcome: Reconciled, config: Config) -> str:
    output = config.output.rstrip("/")
    page = render_reconciliation(
        output,
        config.input,
        counts=outcome.counts,
        days=outcome.days,
        examples={status: [(found.uri, found.reason) for found in some] for status, some in outcome.examples.items()},
        when=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
    write_file(f"{output}/{RECONCILIATION}", page.encode("utf-8", "backslashreplace"))
    return f"{output}/{RECONCILIATION}"


def _readable(uri: Any) -> str:
    return str(uri).encode("utf-8", "backslashreplace").decode()


if __name__ == "__main__":
    sys.exit(main())
