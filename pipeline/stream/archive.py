"""A local stream's archive: rows are durable before their messages are acknowledged; each window becomes a file afterwards.

    .staging-<run>/archive/detections-20261121T020000Z-00000-of-00001-<provenance>-<id>.rows    the rows of a bundle, sorted
    detections/detections-20261121T020000Z-<run>-00000-of-00001.jsonl                           those of a window

A bundle's rows are written before the bundle ends, so before its messages are acknowledged. After a crash each message is
delivered again or has its row here. Memory holds the rows of one bundle only. A window that is over is merged into its file by
its own run or, after a kill, by the next run in this folder. A kill between two steps may duplicate rows, but loses none.

An archive holds its run's lease (see `results.lease`) as long as it works. Only the spills of a run whose lease has ended are
merged by another run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import posixpath
import re
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from apache_beam.io.filesystems import FileSystems
from google.api_core import retry

from pipeline.data_format import from_plain
from pipeline.read.fetch import is_transient_error
from pipeline.records import ImageRef, row_bytes
from pipeline.results.completion import UNKNOWN, Provenance
from pipeline.results.layout import ARCHIVE, STAGING, archive_name, is_run_name, shard_of, time_in_name
from pipeline.results.lease import alive, if_dead, remove_lock
from pipeline.results.ledger import write_index
from pipeline.results.run import Run
from pipeline.stats.process import PROCESS
from pipeline.storage.files import create, delete_files, list_files, move_files, read_lines, write_files
from pipeline.storage.globs import escape_glob
from pipeline.storage.spill_files import merge_lines
from pipeline.storage.state import is_own_file

_ENDING = ".rows"
_UNKNOWN = ""  # stands for windows of spills that this process did not write, or did not finish
_NAME = re.compile(
    r"(detections|dead_letters)-(\d{8}T\d{6}Z)-(\d{5})-of-(\d{5})-(?:([0-9a-f]*)-)?(?:m([0-9a-f]*)-)?[0-9a-f]+\.rows"
)
_MODEL_BYTES = 70  # of a model's name and version in a file's name; of a longer one that is not known which a killed run had
_log = logging.getLogger(__name__)


class ArchivedRow(NamedTuple):
    """A row on its way to the archive: `detections` or `dead_letters`, its image, and the row as JSON without an end of line."""

    kind: str
    ref: ImageRef
    row: bytes


class _Window(NamedTuple):
    """What becomes one file."""

    run: str
    kind: str
    start: str
    shard: int
    shards: int
    settings: str = ""
    model: str = ""

    @property
    def file_name(self) -> str:
        return archive_name(self.kind, self.start, self.run, self.shard, self.shards)


class Archive:
    """The archive of one run; thread-safe.

    Args:
      folder: Local or `gs://`.
      run: Names the run.
      window_s: Length of a window.
      shards: Files a window and kind.
      clock: Seconds since the epoch, by which windows are named. It may jump: one that steps back leaves rows in the last window
        until that has been open for the length of a window.
      monotonic: Seconds that have passed.
      stop: Ends the waiting for storage that fails.
      provenance: By what the rows are made; without its settings the ledger has no index of them.
    """

    def __init__(
        self,
        folder: str,
        run: str,
        *,
        window_s: float,
        shards: int = 1,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        stop: threading.Event | None = None,
        provenance: Provenance = UNKNOWN,
    ):
        self._folder = folder
        self._run = run
        self._window_s = window_s
        self._shards = shards
        self._clock = clock
        self._monotonic = monotonic
        self._stop = stop or threading.Event()
        self._provenance = provenance
        self._write = retry.Retry(is_transient_error, initial=0.5, maximum=10.0, timeout=None, on_error=self._say)(write_files)
        self._current = 0.0  # start of the window of now
        self._opened_at = -math.inf  # when that became the window of now, monotonic
        self._writing: Counter[str] = Counter()  # bundles that write to a window now
        self._unfinished = {_UNKNOWN}  # windows that have spills
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._alive = contextlib.ExitStack()
        self._alive.enter_context(alive(Run(folder, run).folder))

    def spill(self, rows: Iterable[ArchivedRow]) -> None:
        """Makes the rows of a bundle durable; waits for storage that fails transiently, and says so."""
        groups: defaultdict[tuple[str, int], list[bytes]] = defaultdict(list)
        for each in rows:
            groups[each.kind, shard_of(each.ref, self._shards)].append(each.row + b"\n")
        if not groups:
            return
        with PROCESS.parts["publish"].working(), self._in_window() as start:
            spills: dict[str, bytes] = {}
            for (kind, shard), lines in groups.items():
                by = f"{self._provenance.settings(kind)}-m{_packed_model(self._provenance)}"
                name = f"{kind}-{start}-{shard:05d}-of-{self._shards:05d}-{by}-{uuid.uuid4().hex}{_ENDING}"
                spills[f"{self._spills(self._run)}/{name}"] = b"".join(sorted(lines))
            self._write(spills)
            PROCESS.failing.pop("archive", None)

    def close_windows(self) -> None:
        """Makes files of this run's windows that are over."""
        with self._lock:
            kept = {self._start_now(), *self._writing}
            if self._unfinished <= kept:  # a listing of storage costs as much as a write
                return
            self._unfinished = self._unfinished & kept | {_UNKNOWN}  # until it is done
        self._finish(self._run, lambda start: start not in kept)
        self._unfinished.discard(_UNKNOWN)

    def finish(self) -> None:
        """Makes files of all that is left of this run; to be called when its last bundle has ended."""
        self._finish(self._run, lambda _start: True)
        self._alive.close()
        _remove(self._spills(self._run))

    def recover(self) -> None:
        """Makes files of what killed runs have left here."""
        runs = {_run_of(path) for path in list_files(f"{escape_glob(self._folder)}/{STAGING}*/{ARCHIVE}/*")} - {self._run}
        for run in sorted(filter(is_run_name, runs)):
            with if_dead(Run(self._folder, run).folder) as dead:
                if dead:
                    self._finish(run, lambda _start: True)
                    _remove(self._spills(run))

    def _say(self, err: Exception) -> None:
        if self._stop.is_set():
            raise err
        PROCESS.parts["publish"].progressed()  # it has returned, and is tried again
        PROCESS.failing["archive"] = str(err)[:300]
        _log.warning("the archive cannot be written (%s); waiting", " ".join(str(err).split())[:300])

    def _spills(self, run: str) -> str:
        return f"{Run(self._folder, run).folder}/{ARCHIVE}"

    @contextlib.contextmanager
    def _in_window(self) -> Iterator[str]:
        """Keeps the window of now open; gives its start."""
        with self._lock:
            start = self._start_now()
            self._writing[start] += 1
            self._unfinished.add(start)
        try:
            yield start
        finally:
            with self._lock:
                self._writing[start] -= 1
                self._writing += Counter()  # drops those that are done

    def _start_now(self) -> str:
        start, now = self._clock() // self._window_s * self._window_s, self._monotonic()
        if start > self._current or (start < self._current and now - self._opened_at >= self._window_s):
            self._current, self._opened_at = start, now
        return time_in_name(self._current)

    def _finish(self, run: str, is_over: Callable[[str], bool]) -> None:
        with PROCESS.parts["archive"].working(), self._closing:
            windows: defaultdict[_Window, list[str]] = defaultdict(list)
            for path in list_files(f"{escape_glob(self._spills(run))}/*"):
                match = _NAME.fullmatch(posixpath.basename(path))
                if match and is_over(match[2]) and is_own_file(path):
                    provenance = match[5] or "", match[6] or ""
                    windows[_Window(run, match[1], match[2], int(match[3]), int(match[4]), *provenance)].append(path)
            for window, paths in sorted(windows.items()):
                self._write_window(window, paths)
                PROCESS.parts["archive"].progressed()

    def _write_window(self, window: _Window, paths: list[str]) -> None:
        """Makes a file of a window's spills; where there is one, it was killed before they went, or more came since."""
        lines, name = merge_lines(paths, self._spills(window.run)), window.file_name
        if FileSystems.exists(f"{self._folder}/{name}"):
            there = {_digest(line) for line in read_lines(f"{self._folder}/{name}")}
            lines = (line for line in lines if _digest(line) not in there)
            self._index(window, name)  # a run that was killed may have left it without
            name = window._replace(run=f"{window.run}{uuid.uuid4().hex[:4]}").file_name
        merged, count = f"{self._spills(window.run)}/{uuid.uuid4().hex}", 0
        with create(merged) as file:
            for line in lines:
                file.write(line)
                count += 1
        if count:
            move_files({merged: f"{self._folder}/{name}"})
            self._index(window, name)
        else:
            delete_files([merged])
        delete_files(paths)

    def _index(self, window: _Window, name: str) -> None:
        """Writes the index of a file of a window; by what its rows were made, also a killed run's, the names of spills say."""
        if window.settings:
            provenance = Provenance(window.settings, window.settings, *_unpacked_model(window.model))
            write_index(name, self._folder, provenance, self._spills(window.run))


def _packed_model(provenance: Provenance) -> str:
    """A model's name and version as a part of a file's name."""
    packed = row_bytes([provenance.model, provenance.version])
    return packed.hex() if provenance.model and len(packed) <= _MODEL_BYTES else ""


def _unpacked_model(packed: str) -> tuple[str, str]:
    """Name and version; both empty where they are not known."""
    with contextlib.suppress(ValueError, RecursionError):
        model, version = from_plain(tuple[str, str], json.loads(bytes.fromhex(packed)))
        return model, version
    return "", ""


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=16).digest()


def _run_of(path: str) -> str:
    return Run.of_folder(posixpath.dirname(posixpath.dirname(path))).name


def _remove(spills: str) -> None:
    """Removes a local folder whose rows have all become files, if nothing else lies there, and its run's folder likewise."""
    if "://" not in spills:
        with contextlib.suppress(OSError):
            os.rmdir(spills)
        with contextlib.suppress(OSError):
            remove_lock(posixpath.dirname(spills))
