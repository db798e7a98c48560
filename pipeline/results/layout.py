"""The layout of the results folder: which file lies where, and which names are this program's.

    detections/20261121T020000Z-<run>-<hash>.parquet      rows of detected images (see `shards`)
    dead_letters/20261121T020000Z-<run>-<hash>.parquet    rows of images and messages that failed
    containers/20261121T020000Z-<run>-<uuid>.contents     what archives, videos and TFRecord files hold (see `contents`)
    runs/<run>/                                           reports of a run: summary.json, report.html, samples/, outcome.json;
                                                          job.json, by which a run elsewhere is found
    summary.json  samples/                                copies of the newest run's
    report.html                                           the page of all current rows, with the newest run
    exports/                                              rows in other formats (see `detect-objects export`)
    .staging-<run>/  .lock-<name>                         unfinished files; locks

Results are only ever added: a shard is never overwritten, and only compaction deletes shards. All other files are not this
program's: it reads them like any input, and never counts, replaces or deletes them.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import posixpath
import re
import uuid
from collections.abc import Callable, Iterable
from typing import Any, TypedDict

import msgspec

from pipeline.config.paths import local_path
from pipeline.errors import ConfigError, FullError, InputError, OutputError, UserError, is_full
from pipeline.storage.cloud import GS
from pipeline.storage.files import (
    UNFINISHED,
    create,
    delete_files,
    exists,
    is_of_others,
    is_own_file,
    make_folder,
    read_checked,
    write_file,
)
from pipeline.storage.listing import files_of
from pipeline.storage.store import ChangedError, StoreError, kind_of_error, retried
from pipeline.storage.stores import store_of
from pipeline.storage.waiting import waiting_for

DETECTIONS, DEAD_LETTERS = "detections", "dead_letters"
SUMMARY, REPORT, SAMPLES = "summary.json", "report.html", "samples"
OUTCOME, JOB = "outcome.json", "job.json"
RUNS, EXPORTS, CONTENTS = "runs", "exports", "containers"
MADE_BY = b"made by detect-objects"  # marks pages and pictures of this program

# 0.1.0 wrote each shard as JSON Lines, too, which nobody reads
ROWS = re.compile(r"(detections|dead_letters)/(\d{8}T\d{6}Z)-([\w-]+)-[0-9a-f]{32}\.(parquet|jsonl)")
_OTHERS = re.compile(
    r"(runs/[\w-]+/)?(summary\.json|report\.html|samples/\d{3,}-[\w.-]*\.jpg)|runs/[\w-]+/(outcome|job)\.json|exports/.*"
    r"|containers/\d{8}T\d{6}Z-[\w-]+-[0-9a-f]{32}\.contents"
    r"|((detections|dead_letters|containers|samples|runs/[^/]+(/samples)?)/)?\.staging-[^/]+(/.*)?|\.lock-[\w-]+"
    r"|(detections|dead_letters)/\.damaged-[\w-]+",
    re.DOTALL,
)
_OLDER = re.compile(r"/(detections|dead_letters)-([\w-]+-)?\d{5,}-of-\d{5,}\.jsonl$")
_TIME = "%Y%m%dT%H%M%SZ"
_STEM_BYTES = 120  # file systems bound a name's bytes, not its characters

_FOLDERS_KNOWN = 4096
# the slash before a name of this program; most paths have none
_MAY_BE_OURS = re.compile(
    r"/(?=(?:detections|dead_letters|containers|exports|samples|runs)/|\.staging-|\.lock-|summary\.json$|report\.html$)"
)


class _Summary(TypedDict):
    samples: list[str]


def time_in_name(seconds: float) -> str:
    """A moment, in seconds since the epoch, as file names have it.

    >>> time_in_name(1795226400.5)
    '20261121T020000Z'
    """
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime(_TIME)


def sample_name(number: int, uri: str) -> str:
    """The name of an annotated image.

    >>> sample_name(1, "gs://bucket/some/photo one.png")
    'samples/001-photo_one.jpg'
    """
    stem = re.sub(r"[^\w.-]+", "_", posixpath.splitext(posixpath.basename(uri))[0])
    return f"{SAMPLES}/{number:03d}-{stem.encode()[:_STEM_BYTES].decode('utf-8', 'ignore')}.jpg"


def is_sample_name(name: str) -> bool:
    """Whether an annotated image may have this name, which a summary that somebody planted may name too."""
    return re.fullmatch(r"samples/\d{3,}-[\w.-]*\.jpg", name) is not None


def is_result_name(name: str) -> bool:
    """Whether this program gives this name, relative to the results folder, to files, finished or not."""
    return any(pattern.fullmatch(name) for pattern in (ROWS, _OTHERS))


def kind_of_rows(path: str) -> str:
    """Which rows a file has, by its name, in any folder: `detections`, `dead_letters`, or empty for other files."""
    if not path.endswith((".parquet", ".jsonl")):  # of most files
        return ""
    found = ROWS.fullmatch("/".join(path.rsplit("/", 2)[-2:]))
    return found[1] if found else ""


def own_files(output: str, inputs: Iterable[str]) -> Callable[[str], bool]:
    """A function that tells this program's own files from images, by their paths as a listing has them.

    Files in the job's own output count by their names. Other results folders may lie below an input; their rows identify them.
    Their files count, unless the input names a part of such a folder.

    Args:
      output: The job's results folder; empty: none.
      inputs: The folders that are listed, with slashes at their ends; local ones absolute and free of links.
    """
    ours = None if not output else (output if "://" in output else os.path.realpath(output)).rstrip("/")
    listed = sorted(inputs, key=len, reverse=True)
    holds_results = functools.lru_cache(_FOLDERS_KNOWN)(_holds_results)

    def is_own(path: str) -> bool:
        for slash in _MAY_BE_OURS.finditer(path):
            folder, name = path[: slash.start()], path[slash.end() :]
            if is_result_name(name):
                nearest = next(filter(path.startswith, listed), "")
                if folder == ours or (f"{folder}/".startswith(nearest) and holds_results(folder)):
                    return True
        return False

    return is_own


def _holds_results(folder: str) -> bool:
    """Whether a folder has rows; looked up once for all its files."""
    return any(kind_of_rows(file.path) for kind in (DETECTIONS, DEAD_LETTERS) for file in files_of(f"{folder}/{kind}"))


def read_summary(output: str) -> dict[str, Any]:
    """What later runs need of the summary in a folder of results or reports; empty if there is none of this program."""
    found: dict[str, Any] | None = read_summary_as(_Summary, f"{output}/{SUMMARY}")
    return found or {}


def read_summary_as(kind: Any, path: str) -> Any:
    """What the type `kind` has of a summary; None if there is none of this program.

    A path in it may be no UTF-8; of the readers of JSON only `json` takes it.
    """
    return read_checked(path, lambda content: msgspec.convert(json.loads(content), kind))


def check_reports(output: str) -> None:
    """Makes sure that summary and report at the top replace no file that is not this program's.

    Raises:
      OutputError: They would.
    """
    for name, mark in ((SUMMARY, b'"images"'), (REPORT, MADE_BY)):
        path = f"{output}/{name}"
        if is_own_file(path) and is_of_others(path, mark):
            raise OutputError(
                f"output {output}: {name} there is not of this program and would be replaced; move it, or give another folder"
            )


def check_output(output: str, write: bool = True) -> None:
    """Makes sure that results can be written; without `write`, as far as possible without writing.

    Raises:
      OutputError: They cannot, or rows of a preview lie there.
      AwayError: Its store does not answer.
    """
    try:
        with waiting_for(f"output {output}"):
            _write_probe(output) if write else _look_at(output)
            refuse_older_rows(output)
    except UserError:
        raise
    except Exception as err:
        if is_full(err):
            raise FullError.of(err, f"output {output}") from err
        kind = kind_of_error(err, OutputError)
        raise kind(f"output {output}: expected a folder that can be written, but: {' '.join(str(err).split())[:300]}") from err


def refuse_older_rows(output: str) -> None:
    """Makes sure that a folder has no rows of previews of 0.1.0, which were JSON Lines with an index: no command would see them.

    Raises:
      OutputError: It has.
    """
    for kind in (DETECTIONS, DEAD_LETTERS):
        if older := [file.path for file in files_of(f"{output}/{kind}", f"{kind}-*.jsonl") if _OLDER.search(file.path)]:
            raise OutputError(
                f"output {output}: {older[0]} was written before 0.1.0, which does not read its rows; choose another folder"
            )


def _write_probe(output: str) -> None:
    make_folder(output)
    probe = f"{output}/{UNFINISHED}{uuid.uuid4().hex[:12]}"  # two jobs may check at the same time
    try:
        if "://" in output:
            write_file(probe, b"probe")
            _check_conditions(output, probe)
        else:
            with create(probe) as file:
                file.write(b"probe")
    finally:  # a full disk takes the file, but not its content
        with contextlib.suppress(OSError, StoreError):
            delete_files([probe])
    for name in (DETECTIONS, DEAD_LETTERS, SAMPLES, RUNS):
        if os.path.islink(f"{output}/{name}"):
            raise OutputError(f"output {output}: expected {name} to be a folder of its own, it is a link to another one")


def _check_conditions(output: str, probe: str) -> None:
    """Makes sure that a store honours conditions: many servers speak the protocol of S3, and some ignore them.

    Raises:
      OutputError: It writes over the probe.
    """
    if output.startswith(GS):  # which only Google serves
        return
    write = retried(store_of(probe).write)
    for header, over in (("If-None-Match", ""), ("If-Match", "0" * 32)):
        try:
            write(probe, b"another", over)
        except ChangedError:
            continue
        raise OutputError(
            f"output {output}: its store ignores `{header}` when an object is written, so two jobs would overwrite each other's "
            f"rows; choose a server that knows it, or a folder on a disk"
        )


def _look_at(output: str) -> None:
    if "://" in output:
        next(files_of(output), None)
        return
    existing = os.path.abspath(output)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if not (os.path.isdir(existing) and os.access(existing, os.W_OK)):
        raise OutputError(f"output {output}: expected a folder that can be written, {existing} is none")


def check_results(output: str) -> None:
    """Makes sure that a folder is a results folder.

    Raises:
      InputError: It holds no results.
    """
    rows = (file for kind in (DEAD_LETTERS, DETECTIONS) for file in files_of(f"{output}/{kind}"))
    if not (any(rows) or exists(f"{output}/{SUMMARY}")):
        raise InputError(f"output {output}: expected the results folder of an earlier run, found no results in it")


def results_folder(given: str) -> str:
    """The existing results folder that a flag names; a mistyped one is not made.

    Raises:
      ConfigError: It is no path.
      OutputError: A local one is not there.
    """
    try:
        output = local_path(given.strip())
    except ValueError as err:
        raise ConfigError(f"--output: {err}") from err
    if "://" not in output and not os.path.isdir(output):
        raise OutputError(f"output {output!r}: expected a results folder, found none there; check --output")
    return output.rstrip("/") or "/"
