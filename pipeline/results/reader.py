"""The reader of a results folder: lists its shards, and reads them side by side, sixteen at a time.

A shard that is listed has one of three outcomes besides its rows:

- It is gone, since a compaction has merged it: whoever reads begins anew, see `undisturbed`.
- It cannot be read now: the disk or the store fails, or permissions lack. That is an `UnreadableError`, never an empty folder.
- It is damaged: standard error names it, its rows do not count, and its images are not done. A command that leaves rows out for
  it fails, see `ResultsFolder.check_whole`.

Readers see a merged shard beside its sources until these are deleted. They need not tell them apart: by the rule of the current
row, copies of a row are one.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import UnreadableError, UserError
from pipeline.failures import FOR_GOOD, one_line
from pipeline.results.completion import RowVersion
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.rows import FORMATS, parquet_text
from pipeline.results.shards import Shard, is_mark, mark_of, shard_of_name
from pipeline.storage.files import warn_unreadable
from pipeline.storage.listing import MAX_PARALLEL, files_of
from pipeline.storage.store import ChangedError, FoundFile, StoreError, open_object, retried
from pipeline.storage.stores import store_of

KINDS = (DETECTIONS, DEAD_LETTERS)
BATCH_ROWS = 1000  # each is a few kB as Python objects
_BATCH_BYTES = 16 << 20  # dead letters may carry messages of 10 MB
_WHOLE_BYTES = 1 << 20  # an object of this size is fetched by one request; larger ones in parts of it
_DISK_BYTES = 256 << 10  # of shards of a disk, unless it is one: what is read of them takes twenty times as much memory
_TRIES = 10  # compactions that delete what a reader has listed
_KEY_BYTES = 8  # a row takes at least its key, which is a hash
_FEW_ROWS = 100_000  # as many as this program writes into a shard, whose keys may repeat
_DAMAGE = (pa.ArrowException, ValueError, TypeError, KeyError, RecursionError)
_Answer = TypeVar("_Answer")
_Item = TypeVar("_Item")


class DamagedError(Exception):
    """A shard is damaged; the message says how. Functions that `ResultsFolder.read` calls may raise it, too."""


class ResultsFolder:
    """The shards of a results folder, as one listing has them.

    Args:
      output: The folder, local or on object storage.
      kinds: Only shards of these kinds.
      may_hold: Leaves shards out by their names.

      trust_marks: Whether shards that are marked as damaged are read whole first, and left out if they are.

    Attributes:
      shards: By kind and name.
      marks: The marks of a check (see `check`) in the folder.
      damaged: The paths of shards that turned out to be damaged, with what is wrong.

    Raises:
      UnreadableError: The folder cannot be listed now.
    """

    def __init__(
        self,
        output: str,
        kinds: Sequence[str] = KINDS,
        may_hold: Callable[[Shard], bool] = lambda _shard: True,
        *,
        trust_marks: bool = True,
    ):
        self.output = output
        shards, self.marks = _listing(output, kinds)
        self.shards = list(filter(may_hold, shards))
        self.damaged: dict[str, str] = {}
        if marked := [shard for shard in self.shards if trust_marks and mark_of(shard.path) in self.marks]:
            for _ in self.read(_read_whole, marked, begin_anew=False):
                pass
            self.shards = [shard for shard in self.shards if shard.path not in self.damaged]

    def read(
        self, project: Callable[[Shard, Any], _Answer], shards: Iterable[Shard] | None = None, *, begin_anew: bool = True
    ) -> Iterator[tuple[Shard, _Answer]]:
        """What a function makes of each shard's open file, shard by shard; it runs side by side on several threads.

        Args:
          project: Gets a shard and its file, which `parquet_file` opens; what else it raises is no damage.
          shards: Default: all.
          begin_anew: Whether a shard that is gone is an error; else it is left out.

        Raises:
          FileNotFoundError: A shard is gone.
          UnreadableError: A shard cannot be read now.
        """

        def outcome(shard: Shard) -> _Answer | DamagedError | FileNotFoundError:
            try:
                with _source(shard) as source:
                    return project(shard, source)
            except (DamagedError, FileNotFoundError) as err:
                return err

        def size(shard: Shard) -> int:
            return 0 if "://" in self.output else shard.size_bytes

        for shard, found in side_by_side(outcome, self.shards if shards is None else shards, size):
            if isinstance(found, DamagedError):
                self._name_damaged(shard, found)
            elif not isinstance(found, FileNotFoundError):
                yield shard, found
            elif begin_anew:
                raise found

    def tables(self, columns: Sequence[str], shards: Iterable[Shard] | None = None) -> Iterator[tuple[Shard, pa.Table]]:
        """Some columns of each shard, as `read` gives them."""

        def project(shard: Shard, source: Any) -> pa.Table:
            schema = pa.schema([field for field in FORMATS[shard.kind].schema if field.name in columns])
            with parquet_file(shard, source) as file:
                return pa.Table.from_batches(batches_in(shard, file, columns), schema)

        return self.read(project, shards)

    def batches(
        self,
        shards: Iterable[Shard] | None = None,
        columns: Sequence[str] | None = None,
        rows: int = BATCH_ROWS,
        *,
        begin_anew: bool = True,
    ) -> Iterator[tuple[Shard, pa.RecordBatch]]:
        """The rows of each shard in parts, shard by shard. One part is in memory, besides small objects that are fetched ahead.

        Args:
          shards: Default: all.
          columns: Only these; default: all.
          rows: At most so many in a part.
          begin_anew: Whether a shard that is gone is an error; else it is left out.

        Raises:
          FileNotFoundError: A shard is gone.
          UnreadableError: A shard cannot be read now.
        """
        for shard, content in side_by_side(_fetched_ahead, self.shards if shards is None else shards):
            try:
                for batch in batches_of(shard, columns, rows, content):
                    yield shard, batch
            except DamagedError as err:
                self._name_damaged(shard, err)
            except FileNotFoundError:
                if begin_anew:
                    raise

    def _name_damaged(self, shard: Shard, err: DamagedError) -> None:
        warn_unreadable(shard.path, str(err))
        self.damaged[shard.path] = str(err)

    def check_whole(self) -> None:
        """Makes sure that nothing that was read is damaged.

        Raises:
          UnreadableError: Rows of damaged shards are left out.
        """
        if self.damaged:
            first, files = min(self.damaged), "1 file" if len(self.damaged) == 1 else f"{len(self.damaged)} files"
            raise UnreadableError(
                f"output {self.output}: {files} of rows damaged, such as {first}; "
                f"run detect-objects check, the job, which detects their images anew, and delete them then"
            )


def list_shards(output: str, kinds: Sequence[str] = KINDS) -> list[Shard]:
    """The shards of a results folder, by kind and name.

    A listing is no snapshot: it may miss a merged shard that appears and a source that goes meanwhile. A second one finds the
    merged shard, so this is their union.

    Raises:
      UnreadableError: The folder cannot be listed now.
    """
    return _listing(output, kinds)[0]


def _listing(output: str, kinds: Sequence[str]) -> tuple[list[Shard], set[str]]:
    """The shards, and the marks of damaged ones."""
    found = [file for _, files in side_by_side(lambda kind: _listed(f"{output}/{kind}"), [*kinds, *kinds]) for file in files]
    shards = (shard_of_name(file.path, file.size_bytes, file.generation) for file in found)
    return sorted({shard.path: shard for shard in shards if shard}.values()), {file.path for file in found if is_mark(file.path)}


def _read_whole(shard: Shard, source: Any) -> None:
    with parquet_file(shard, source) as file:
        for _ in batches_in(shard, file):
            pass


def _listed(folder: str) -> list[FoundFile]:
    """The files of a folder of shards; none if it is not there. Links, folders and pipes are nobody's shards."""
    try:
        if "://" in folder:
            return list(files_of(folder))
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            return [file for entry in entries if entry.is_file(follow_symlinks=False) for file in _found(entry)]
        return []
    except (OSError, StoreError) as err:
        raise UnreadableError(f"output {folder}: cannot be listed now: {one_line(err)}; try again once it can be") from err


def _found(entry: os.DirEntry[str]) -> Iterator[FoundFile]:
    with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
        status = entry.stat(follow_symlinks=False)
        yield FoundFile(entry.path, status.st_size, f"{status.st_size}-{status.st_mtime_ns}")


def undisturbed(read: Callable[[], _Answer]) -> _Answer:
    """What a function makes of all rows; it begins anew if a compaction has deleted a shard meanwhile."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            return read()
    return read()


def side_by_side(
    call: Callable[[_Item], _Answer], items: Iterable[_Item], size: Callable[[_Item], int] = lambda _item: 0
) -> Iterator[tuple[_Item, _Answer]]:
    """Each item with what `call` makes of it, in order; a few calls run on threads, and a few results wait, as `size` allows."""
    ahead: deque[tuple[_Item, Future[_Answer]]] = deque()
    pool = ThreadPoolExecutor(MAX_PARALLEL, "read-results")
    try:
        for each in items:
            while ahead and (
                len(ahead) >= 2 * MAX_PARALLEL or sum(map(size, (each, *(item for item, _ in ahead)))) > _DISK_BYTES
            ):
                item, future = ahead.popleft()
                yield item, future.result()
            ahead.append((each, pool.submit(call, each)))
        while ahead:
            item, future = ahead.popleft()
            yield item, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _reading(shard: Shard) -> Iterator[None]:
    """Tells the outcomes of reading a shard apart.

    Raises:
      FileNotFoundError: The shard is gone.
      UnreadableError: It cannot be read now.
      DamagedError: It is damaged.
    """
    try:
        yield
    except (FileNotFoundError, UserError, MemoryError):
        raise
    except ChangedError as err:
        raise FileNotFoundError(f"{shard.path} does not exist any more") from err
    except (OSError, StoreError, *_DAMAGE) as err:
        # what Parquet's reader finds wrong is an OSError without a number; those of a disk have one, those of a network a class
        if (type(err) is OSError and err.errno is None) or (isinstance(err, _DAMAGE) and not isinstance(err, OSError)):
            raise DamagedError(one_line(err)) from err
        raise UnreadableError(f"{shard.path} cannot be read now: {one_line(err)}; try again once it can be") from err


def _fetched(shard: Shard) -> bytes | None:
    """The content of a small object."""
    if "://" not in shard.path or shard.size_bytes > _WHOLE_BYTES:
        return None
    if not shard.size_bytes:
        return b""
    content: bytes = retried(store_of(shard.path).read_range)(shard.path, 0, shard.size_bytes, shard.generation)
    return content


def _fetched_ahead(shard: Shard) -> bytes | None:
    """The same before its turn; what fails is tried again then, and tells the outcome."""
    with contextlib.suppress(Exception):
        return _fetched(shard)
    return None


def batches_of(
    shard: Shard, columns: Sequence[str] | None = None, rows: int = BATCH_ROWS, content: bytes | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a shard in parts, of which one is in memory, as `ResultsFolder.batches` gives them.

    Args:
      shard: The shard.
      columns: Only these; default: all.
      rows: At most so many in a part.
      content: Its bytes, where they are known.

    Raises:
      FileNotFoundError: It is gone.
      UnreadableError: It cannot be read now.
      DamagedError: It is damaged.
    """
    with _source(shard, content) as source, parquet_file(shard, source) as file:
        yield from batches_in(shard, file, columns, rows)


@contextlib.contextmanager
def _source(shard: Shard, content: bytes | None = None) -> Iterator[Any]:
    """Opens the file of a shard; of a large object only the parts that are read are fetched."""
    with contextlib.ExitStack() as opened:
        with _reading(shard):
            source = opened.enter_context(_opened(shard, content))
        yield source


def _opened(shard: Shard, content: bytes | None) -> Any:
    if "://" not in shard.path:
        return pa.OSFile(os.fsencode(shard.path))  # as text it takes only Unicode
    if (content := _fetched(shard) if content is None else content) is not None:
        return pa.BufferReader(content)
    found = FoundFile(shard.path, shard.size_bytes, shard.generation)
    return open_object(found, retried(store_of(shard.path).read_range), _WHOLE_BYTES)


@contextlib.contextmanager
def parquet_file(shard: Shard, source: Any) -> Iterator[pq.ParquetFile]:
    """Opens the Parquet file of a shard, whose checksums are checked, for a function that `ResultsFolder.read` calls."""
    with contextlib.ExitStack() as opened:
        with _reading(shard):
            file = opened.enter_context(pq.ParquetFile(source, page_checksum_verification=True))
            _check_rows(shard, file.metadata.num_rows)
        yield file


def batches_in(
    shard: Shard, file: pq.ParquetFile, columns: Sequence[str] | None = None, rows: int = _FEW_ROWS
) -> Iterator[pa.RecordBatch]:
    """The rows of an open shard in parts of bounded bytes, with the columns of this release."""
    of = FORMATS[shard.kind]
    with _reading(shard):
        there = [name for name in file.schema_arrow.names if name in of.schema.names and (columns is None or name in columns)]
        for group in range(file.metadata.num_row_groups):
            facts = file.metadata.row_group(group)
            at_once = max(1, min(rows, _BATCH_BYTES * facts.num_rows // max(1, facts.total_byte_size)))
            for batch in file.iter_batches(at_once, row_groups=[group], columns=there, use_threads=False):
                yield of.conform(batch, columns)


def _check_rows(shard: Shard, rows: int) -> None:
    """Refuses a planted file that holds far more rows than bytes: their keys would take any amount of memory.

    Raises:
      ValueError: It does.
    """
    if rows > max(_FEW_ROWS, shard.size_bytes // _KEY_BYTES):
        raise ValueError(f"expected a key of {_KEY_BYTES} bytes for each row, got {rows} rows in {shard.size_bytes} bytes")


def done_keys(output: str, version: RowVersion, kind: str, prefixes: Sequence[str] = ("",)) -> np.ndarray:
    """The keys of the rows of a kind that count as done, sorted, `(N,) uint64`: 8 bytes of memory a row, 16 while they are read.

    Args:
      output: The results folder.
      version: Only rows of this model, version and settings.
      kind: `detections`, or `dead_letters`, of which transient ones never count.
      prefixes: Only images whose URIs may begin with one of these; shards whose statistics exclude all of them are not read.

    Raises:
      UnreadableError: The folder cannot be read now.
    """

    def read() -> np.ndarray:
        parts = ResultsFolder(output, (kind,)).read(functools.partial(_done_keys, version, tuple(prefixes)))
        keys = np.concatenate([np.zeros(0, np.uint64), *(part for _, part in parts)])
        keys.sort()  # in place: a copy would take as much again
        return keys

    return undisturbed(read)


def _done_keys(version: RowVersion, prefixes: Sequence[str], shard: Shard, source: Any) -> np.ndarray:
    import pyarrow.dataset as ds  # it imports pandas

    wanted = {"model": version.model, "version": version.version, "settings": version.settings_of(shard.kind)}
    is_done = functools.reduce(operator.and_, (ds.field(name) == value for name, value in wanted.items()))
    if shard.kind == DEAD_LETTERS:
        is_done &= ds.field("reason").isin(sorted(FOR_GOOD))
    uri = ds.field("uri")
    begins = ((uri >= prefix) & (uri <= f"{prefix}\U0010ffff") for prefix in map(parquet_text, prefixes))
    may_match = is_done & functools.reduce(operator.or_, begins, ds.scalar(False))
    schema = FORMATS[shard.kind].schema
    checked = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    with _reading(shard):
        fragment = ds.ParquetFileFormat(default_fragment_scan_options=checked).make_fragment(source)
        _check_rows(shard, fragment.metadata.num_rows)
        groups = fragment.subset(may_match, schema=schema)  # by their statistics
        keys = groups.to_table(schema, columns=["key"], filter=is_done)["key"]
        if keys.null_count:
            raise ValueError("expected a value of key in each row")
        return np.asarray(keys.to_numpy())
