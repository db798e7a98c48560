"""`detect-objects compact`, `python -m pipeline.compact`: merges many small files of rows into few, one row an image version.

    detect-objects compact --output gs://bucket/detections [--until 2026-11-20]

It merges what jobs and streams have left in a results folder into sorted files of 100,000 rows (`results.single_rows` decides
which of several rows stays). All large files get their names before the first small one is deleted: after a kill rows may be
doubled until the next compaction, but none is lost. It holds the lease of the whole folder, so it waits for batch jobs and other
compactions, and they wait for it. It may run beside streams. It leaves alone the last hour of a running stream, unfinished files,
the files of a running job without a lease, and files of other programs.

Exit code 0: done, or nothing to do; 1: failed; 2: a wrong command or place; 3: another run works in the folder, or took it over;
130: stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import posixpath
import re
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from apache_beam.io.filesystems import FileSystems

from models.progress import bar, shown
from pipeline.config.dates import DatesError, days_of, resolve_dates
from pipeline.errors import ConfigError, exit_code_of
from pipeline.results.cancellation import confirm_commit, stop_from_thread
from pipeline.results.claims import EVERYTHING
from pipeline.results.layout import (
    DEAD_LETTERS,
    DETECTIONS,
    archive_name,
    check_output,
    index_name,
    results_folder,
    seconds_in_name,
    time_in_name,
)
from pipeline.results.lease import leased
from pipeline.results.ledger import RowsFile, list_files_of_rows, writing_entries
from pipeline.results.other_runs import finish_dead, mode_of, remove_dead, runs_at_work
from pipeline.results.run import Run, fence
from pipeline.results.run_state import State
from pipeline.results.single_rows import SingleRow, single_rows
from pipeline.results.write_policy import run_name
from pipeline.storage.files import create, delete_files, move_files, read_lines
from pipeline.storage.globs import escape_glob
from pipeline.write.formats import WRITERS
from pipeline.write.write_files import ROWS_PER_SHARD

MODE = "compact"  # beside the modes `batch` and `streaming` of jobs
_COMPACTED = re.compile(rf"-({MODE}[0-9a-f]{{12}})-")
_STREAM_KEEPS_SECONDS = 3600.0
_WAIT_SECONDS = 3600.0  # as a batch job


class Compacted(NamedTuple):
    """What a compaction did.

    Attributes:
      before: Number of files that were merged.
      files: Number of files that replace them.
      rows: Number of rows in these.
      dropped: Number of rows that were doubled, or replaced by better ones.
    """

    before: int
    files: int
    rows: int
    dropped: int


class _Source(NamedTuple):
    """A file to be merged.

    Attributes:
      written_at: Seconds since the epoch: the start in its name, else the file's own time. Its index may have one for each row.
      rows: The file.
      derived: The paths of files made from it: its index, Parquet, TFRecord.
      version: Changes when the file is overwritten.
    """

    written_at: float
    rows: RowsFile
    derived: tuple[str, ...]
    version: Any


def compact(
    output: str,
    before: float | None = None,
    now: float | None = None,
    wait_s: float = 0.0,
    rows_per_file: int = ROWS_PER_SHARD,
) -> Compacted:
    """Merges the files of rows in a results folder.

    Args:
      output: The folder, local or `gs://`.
      before: Merge only files written before this time, in seconds since the epoch.
      now: The current time, the same way.
      wait_s: The longest wait for another run that works there.
      rows_per_file: The most rows of a file that it writes.

    Raises:
      OutputError: The folder cannot be written.
      BusyError: Another run works there.
      TakenOverError: Another run has taken over.
    """
    check_output(output)
    run = Run.new(output)
    with (
        leased(run.folder, [EVERYTHING], wait_s=wait_s, lost=stop_from_thread, fence=fence),
        run.held({"settings": {"mode": MODE}}),
    ):
        at_work = runs_at_work(output, but=run)
        finish_dead(output)
        remove_dead(output, run, MODE)
        now = time.time() if now is None else now
        sources = [
            source
            for source in _sources(output)
            if (before is None or source.written_at < before) and not _is_at_work(source, at_work, now)
        ]
        makers = {found[1] if (found := _COMPACTED.search(source.rows.path)) else "" for source in sources}
        if not makers or (len(makers) == 1 and "" not in makers):
            return Compacted(0, 0, 0, 0)
        return _merge(sources, run, rows_per_file)


def _merge(sources: Sequence[_Source], run: Run, rows_per_file: int) -> Compacted:
    """Writes the large files, gives them their names, and only then deletes the small ones."""
    output = run.output
    kinds = {kind: _Shards(f"{run.folder}/{kind}", kind, rows_per_file) for kind in (DETECTIONS, DEAD_LETTERS)}
    lines = itertools.count()
    dated = [(source.written_at, source.rows) for source in sources]
    total_bytes = 2 * sum(source.version[0] for source in sources)  # what is read, and what is written
    with bar("merging", "B", total_bytes, unit_scale=True) as progress, contextlib.ExitStack() as stack:

        def count(line: bytes) -> None:
            next(lines)
            progress.update(len(line))

        for shards in kinds.values():
            stack.callback(shards.close)
        for row in single_rows(dated, f"{run.folder}/{MODE}", count):
            kinds[row.kind].add(row)
            progress.update(len(row.line))
    endings = {
        posixpath.basename(path).partition(".")[2]
        for source in sources
        for path in source.derived
        if f"{output}/{DETECTIONS}/" in path
    }
    when = time_in_name(max(shards.newest for shards in kinds.values()))
    made: dict[str, str] = {}
    for kind, shards in kinds.items():
        for number, staged in enumerate(shown(shards.files, f"finishing {kind}", "files")):
            name = archive_name(kind, when, MODE + run.name, number, len(shards.files))
            made[staged] = f"{output}/{name}"
            made[f"{staged}.index"] = f"{output}/{index_name(name)}"
            for ending in endings if kind == DETECTIONS else ():
                WRITERS[ending](read_lines(staged), f"{staged}.{ending}")
                made[f"{staged}.{ending}"] = f"{output}/{name.removesuffix('.jsonl')}.{ending}"
    confirm_commit()
    move_files({staged: final for staged, final in made.items() if final.endswith(".jsonl")})
    move_files(made)  # files made from rows come after the rows
    _remove(output, sources)
    rows = sum(shards.rows for shards in kinds.values())
    return Compacted(len(sources), sum(len(shards.files) for shards in kinds.values()), rows, next(lines) - rows)


def _remove(output: str, sources: Sequence[_Source]) -> None:
    """Deletes the merged files, rows last; a file that was overwritten meanwhile stays."""
    versions = _versions(output)
    gone = [source for source in sources if versions.get(source.rows.path) == source.version]
    delete_files(path for source in gone for path in source.derived)
    delete_files(source.rows.path for source in gone)


class _Shards:
    """Writes files of a kind, each with its index (`<path>.index`); complete once closed."""

    def __init__(self, folder: str, kind: str, rows_per_file: int):
        self._folder = folder
        self._rows_per_file = rows_per_file
        self._open = contextlib.ExitStack()
        self.close = self._open.close
        self._left = 0
        self.kind = kind
        self.files: list[str] = []
        self.rows = 0
        self.newest = 0.0  # age of a row

    def add(self, row: SingleRow) -> None:
        if not self._left:
            self.close()
            self._left = self._rows_per_file
            self.files.append(f"{self._folder}/{uuid.uuid4().hex}")
            self._file = self._open.enter_context(create(self.files[-1]))
            self._index = self._open.enter_context(writing_entries(f"{self.files[-1]}.index"))
        self._file.write(row.line)
        self._index(row.line, row.entry and row.entry._replace(made_at=row.age))
        self._left -= 1
        self.rows += 1
        self.newest = max(self.newest, row.age)


def _sources(output: str) -> Iterator[_Source]:
    """The files of rows, with the files made from them."""
    versions = _versions(output)
    for file in list_files_of_rows(output):
        if file.path not in versions:
            continue  # it was deleted meanwhile
        stem = file.path.removesuffix(".jsonl")
        derived = [f"{stem}.{ending}" for ending in WRITERS] if file.kind == DETECTIONS else []
        written_at = seconds_in_name(file.path) or versions[file.path][1]
        paths = [*filter(versions.__contains__, derived), *filter(None, [file.index_path])]
        yield _Source(written_at, file, tuple(paths), versions[file.path])


def _versions(output: str) -> dict[str, tuple[int, float]]:
    """Path -> size and time of each file of rows."""
    matches = FileSystems.match([f"{escape_glob(output)}/{kind}/*" for kind in (DETECTIONS, DEAD_LETTERS)])
    files = (entry for match in matches for entry in match.metadata_list)
    return {entry.path: (entry.size_in_bytes, entry.last_updated_in_seconds) for entry in files}


def _is_at_work(source: _Source, at_work: Mapping[str, State], now: float) -> bool:
    """Whether a file belongs to a running job that may still need it."""
    name = posixpath.basename(source.rows.path)
    of_job = [
        mode_of(about) for run, about in at_work.items() if any(f"-{each}" in name for each in (run, *_name_of_files(about)))
    ]
    return any(mode != "streaming" or source.written_at > now - _STREAM_KEEPS_SECONDS for mode in of_job)


def _name_of_files(about: State) -> Iterator[str]:
    """The part of file names that identifies a batch job."""
    if {"started_at", "settings"} <= about.keys():
        yield run_name(about["settings"], about["started_at"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        before = _end_of(flags.until) if flags.until else None
        done = compact(output := results_folder(flags.output), before, wait_s=flags.busy_wait_s)
    except KeyboardInterrupt:
        print("stopped; every row is still there, some may be twice until the next compaction", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as err:  # noqa: BLE001  whatever storage says, the user gets one line
        code, said = exit_code_of(err, "the compaction failed")
        print(f"error: {said}", file=sys.stderr)
        return code
    if not done.before:
        print(f"nothing to compact in {output}")
        return 0
    counts = f"{done.rows} rows; {done.dropped} dropped, doubled or mended by others"
    print(f"{done.before} files of rows became {done.files}: {counts}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="detect-objects compact",
        description="Merges the many small files of rows in a results folder into few large ones, one row an image generation "
        "and model version.",
        allow_abbrev=False,
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="the results folder or archive, local or gs://")
    parser.add_argument(
        "--until",
        default="",
        metavar="DAY",
        help="only windows that began, and files that were written, until this day's end (UTC)",
    )
    parser.add_argument(
        "--busy-wait-s",
        type=float,
        default=_WAIT_SECONDS,
        metavar="SECONDS",
        help="longest wait for another run that is at work in the folder (default: %(default)g)",
    )
    return parser


def _end_of(day: str) -> float:
    """The end of a day; of several that the user names, the last one's."""
    try:
        last = days_of(resolve_dates(day, datetime.datetime.now(datetime.timezone.utc).date()))[-1]
    except DatesError as err:
        raise ConfigError(f"--until: expected {err}, got {day}") from err
    midnight = datetime.datetime.combine(last, datetime.time(), datetime.timezone.utc)
    return (midnight + datetime.timedelta(days=1)).timestamp()


if __name__ == "__main__":
    sys.exit(main())
