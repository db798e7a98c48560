"""The archive of a stream: the rows of a few seconds become one shard of each kind; then their messages are acknowledged.

The rows of a window are records in memory. The messages that asked for them are not acknowledged until the window's shards are
durable. A process that dies loses the rows of its last window, and Pub/Sub delivers their messages again: what was published is
published a second time, under the same `detection_id`. A death between shard and acknowledgement also adds a second row, and of
two rows with the same key the newer one counts.

While storage fails, the window waits, no message is acknowledged, and the job logs why. The next window fills meanwhile; once it
is full, `add` waits. Then no bundle ends, and the subscriber pulls no more than it pulls ahead. So two windows and the bundles in
progress bound the memory. A held message costs its ids only, since its bytes go when a bundle takes it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import apache_beam as beam
import pyarrow as pa
from apache_beam.coders import VarIntCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec, TimerSpec, on_timer
from apache_beam.utils.timestamp import Timestamp
from msgspec.structs import replace

from pipeline.codec import RecordCoder
from pipeline.outcome.conclude import Conclusion
from pipeline.process import PROCESS
from pipeline.records import DeadLetter, DetectedImage
from pipeline.results.compact import compact
from pipeline.results.completion import UNKNOWN, RowVersion
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.rows import record_bytes, rows_by_kind
from pipeline.results.run_folder import Run
from pipeline.results.shards import add_rows
from pipeline.storage.store import is_transient_error
from pipeline.stream.clients import one_line
from pipeline.stream.subscriber import Subscriber
from pipeline.stream.threads import RunThreads

WINDOW_ROWS = 20_000
COMPACTED_SHARDS = 360  # an hour of windows: the stream merges them, 34,560 files of a day otherwise
_WINDOW_BYTES = 48_000_000
_LOOK_SECONDS = 0.1
_AGAIN_SECONDS = 2.0  # while storage fails
_log = logging.getLogger(__name__)

_Record: TypeAlias = DetectedImage | DeadLetter


class RowWriter(NamedTuple):
    """Writes the rows of a run, made by a version of model and settings, as shards."""

    run: Run
    version: RowVersion = UNKNOWN

    def tables(self, records: Sequence[_Record]) -> list[tuple[str, pa.Table]]:
        """The rows of records, one table of each kind that there is."""
        return [*rows_by_kind(records, self.version, self.run.name)]

    def write(self, records: Sequence[_Record], kind: str, table: pa.Table) -> str:
        """Adds a table of records as a shard, once however often it is tried; returns its path."""
        return add_rows(self.run, kind, table, [record.ref.message_id for record in records])


def no_reports() -> None:
    """Renews nothing."""


@dataclasses.dataclass
class _Window:
    opened_at: float = 0.0
    records: list[_Record] = dataclasses.field(default_factory=list)
    size_bytes: int = 0
    unwritten: list[tuple[str, pa.Table]] | None = None  # its tables, once it is over

    @property
    def is_full(self) -> bool:
        return len(self.records) >= WINDOW_ROWS or self.size_bytes >= _WINDOW_BYTES


class Archive:
    """The archive of one run; thread-safe.

    Args:
      writer: Writes its rows.
      window_s: Longest time from a window's first row to its end.
      threads: The run's threads: `stop` ends all waiting, and the failure of a thread ends the waiting for room.
      subscriber: Holds the messages.
      renew: Called after each window, whose messages are then acknowledged.
      clock: Seconds, monotonic.
    """

    def __init__(
        self,
        writer: RowWriter,
        window_s: float,
        threads: RunThreads,
        subscriber: Subscriber,
        *,
        renew: Callable[[], object] = no_reports,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._writer, self._window_s = writer, window_s
        self._threads, self._subscriber, self._renew, self._clock = threads, subscriber, renew, clock
        self._changed = threading.Condition()
        self._filling, self._closed = _Window(), _Window()
        self._writing = threading.Lock()
        self._written = 0  # shards

    def add(self, records: Sequence[_Record]) -> None:
        """Adds the records of a bundle whose results are published; waits only while two windows are full."""
        if not records:
            return
        self._subscriber.hold([record.ref.message_id for record in records])
        with self._changed:
            while self._filling.is_full and not self._threads.stop.is_set():
                self._threads.raise_failure()
                self._changed.wait(_LOOK_SECONDS)
            window = self._filling
            if not window.records:
                window.opened_at = self._clock()
            window.records += records
            window.size_bytes += sum(map(record_bytes, records))

    def keep_writing(self) -> None:
        """Writes each window that is over, until the run stops; the work of a thread. While storage fails, it tries again."""
        while not self._threads.stop.wait(_LOOK_SECONDS):
            try:
                self.write_if_over()
            except Exception as err:
                if not is_transient_error(err):
                    raise
                if "archive" not in PROCESS.failing:
                    _log.warning("the archive cannot be written (%s); waiting", one_line(err))
                PROCESS.failing.add("archive")
                self._threads.stop.wait(_AGAIN_SECONDS)

    def keep_compacting(self) -> None:
        """Merges the shards that this run has written, whenever there are many, until the run stops; the work of a thread.

        It reads no shard of other runs, and none that is merged, so that its memory does not grow with the archive.
        """
        merged = 0
        while not self._threads.stop.wait(_LOOK_SECONDS):
            if self._written - merged < COMPACTED_SHARDS:
                continue
            merged = self._written
            _compact(self._writer.run)

    def write_if_over(self) -> None:
        """Writes the window if it is over, or if an earlier one is not written yet."""
        with self._changed:
            window = self._filling
            is_over = window.is_full or (bool(window.records) and self._clock() - window.opened_at >= self._window_s)
        if is_over or self._closed.records:
            self._write_window()
            self._renew()

    def finish(self) -> None:
        """Writes all that is left, without waiting for storage that fails; to be called when the last bundle has ended."""
        while self._closed.records or self._filling.records:
            self._write_window()

    def _write_window(self) -> None:
        """Writes a window, then ends the holds of its messages; after a failure the next call writes what is left of it."""
        with PROCESS.parts["archive"].working(), self._writing:
            if not self._closed.records:
                with self._changed:
                    self._closed, self._filling = self._filling, _Window()
                    self._changed.notify_all()
            window = self._closed
            if window.unwritten is None:
                window.unwritten = self._writer.tables(window.records)
            while window.unwritten:
                self._writer.write(window.records, *window.unwritten[0])
                self._written += 1
                del window.unwritten[0]
            PROCESS.failing.discard("archive")
            self._subscriber.end_hold([record.ref.message_id for record in window.records])
            self._closed = _Window()


def _compact(run: Run) -> None:
    """Merges the shards of a run; after a failure the next time merges these, too, and no row depends on it."""
    try:
        compact(run.output, run=run.name)
    except Exception as err:  # noqa: BLE001
        _log.warning("the archive is not compacted (%s); the stream goes on", one_line(err))


@dataclasses.dataclass
class ArchiveRows(beam.PTransform):
    """The archive of a stream on remote workers, whose runner keeps the rows of a window durably.

    Elements in: `DetectedImage` and `DeadLetter`, in several collections, which become a shard of each kind and worker process
    every few seconds, 20,000 rows or 48 MB. A worker that has written many merges the run's. Nothing comes out.
    Unbounded. At least once: a bundle that the runner repeats finds its shard, or adds rows of the same keys, of which the newest
    count.

    Args:
      writer: Writes the rows.
      window_s: Longest time from a shard's first row to its last.
      end: What the reports of the run take, which are renewed after a shard; None: there are none.
    """

    writer: RowWriter
    window_s: float
    end: Conclusion | None = None

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, records: tuple[beam.PCollection[DetectedImage | DeadLetter], ...]) -> beam.PCollection[None]:
        """Wires records, gathering by kind and worker, and writing."""
        parts = tuple(
            part | f"ByKind{n}" >> beam.Map(_with_kind).with_output_types(tuple[bytes, DetectedImage | DeadLetter])
            for n, part in enumerate(records)
        )
        return parts | "FlattenRecords" >> beam.Flatten() | "WriteRows" >> beam.ParDo(_WriteGathered(self))


_WORKER = uuid.uuid4().bytes  # names this process; its records are gathered apart from those of others


def _with_kind(record: DetectedImage | DeadLetter) -> tuple[bytes, DetectedImage | DeadLetter]:
    kind = DETECTIONS if isinstance(record, DetectedImage) else DEAD_LETTERS
    return kind.encode() + _WORKER, replace(record, thumbnail=b"")


class _WriteGathered(beam.DoFn):
    """Gathers records by key in the runner's state, and writes them; Beam's `GroupIntoBatches` has no bound of bytes.

    Args:
      archive: How.
    """

    _RECORDS = BagStateSpec("records", RecordCoder())
    _COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())
    _BYTES = ReadModifyWriteStateSpec("bytes", VarIntCoder())
    _OVER = TimerSpec("over", TimeDomain.REAL_TIME)
    _DRAINED = TimerSpec("drained", TimeDomain.WATERMARK)

    def __init__(self, archive: ArchiveRows):
        self._writer, self._window_s, self._end = archive.writer, archive.window_s, archive.end

    def setup(self) -> None:
        if self._end:
            self._end.renew_at_end()

    def process(  # noqa: PLR0917  Beam's parameters
        self,
        keyed: tuple[bytes, _Record],
        window: Any = beam.DoFn.WindowParam,
        records: Any = beam.DoFn.StateParam(_RECORDS),  # noqa: B008  how Beam's parameters are declared
        count: Any = beam.DoFn.StateParam(_COUNT),  # noqa: B008
        size_bytes: Any = beam.DoFn.StateParam(_BYTES),  # noqa: B008
        over: Any = beam.DoFn.TimerParam(_OVER),  # noqa: B008
        drained: Any = beam.DoFn.TimerParam(_DRAINED),  # noqa: B008
    ) -> None:
        record = keyed[1]
        records.add(record)
        gathered, gathered_bytes = (count.read() or 0) + 1, (size_bytes.read() or 0) + record_bytes(record)
        count.write(gathered)
        size_bytes.write(gathered_bytes)
        if gathered >= WINDOW_ROWS or gathered_bytes >= _WINDOW_BYTES:
            self._write(records, count, size_bytes)
        elif gathered == 1:
            over.set(Timestamp.now() + self._window_s)
            drained.set(window.end)

    @on_timer(_OVER)
    @on_timer(_DRAINED)
    def end(
        self,
        records: Any = beam.DoFn.StateParam(_RECORDS),  # noqa: B008
        count: Any = beam.DoFn.StateParam(_COUNT),  # noqa: B008
        size_bytes: Any = beam.DoFn.StateParam(_BYTES),  # noqa: B008
    ) -> None:
        self._write(records, count, size_bytes)

    def _write(self, *states: Any) -> None:
        """Writes what a key has gathered, which its state then holds no more."""
        gathered = list(states[0].read())
        for kind, table in self._writer.tables(gathered):
            self._writer.write(gathered, kind, table)
            _compact_if_many(self._writer.run)
        for state in states:
            state.clear()
        if self._end:
            self._end.renew()


_counting = threading.Lock()
_written_by_run = Counter[Run]()  # shards of this process


def _compact_if_many(run: Run) -> None:
    """Counts a shard that this process has written, and merges the run's on a thread whenever there are many.

    Of several workers one does: others find its lock, and try again when they have written as many more.
    """
    with _counting:
        _written_by_run[run] += 1
        are_many = _written_by_run[run] % COMPACTED_SHARDS == 0
    if are_many:
        threading.Thread(target=_compact, args=(run,), name="compacting", daemon=True).start()
