"""Compaction: merges small shards into large ones and drops rows that do not count; no reader loses a row, whenever it ends.

1. It reads the key and the age of all rows, and marks those that lost to another one: 17 bytes of memory a row, 9 more while they
   are sorted.
2. It groups small shards of similar size, so that a new row costs a few files of its own size, and larger ones of which more than
   a fifth of the rows lost.
3. It reads the shards whole to which rows of a group lost. One that is damaged wins nothing.
4. It writes the rows of a group that did not lose as a merged shard, and reads that back.
5. It deletes the sources of the group, whose rows are all in the merged shard that was read back, or lost to rows of shards that
   were read whole; only in the generations that it read.

Nothing but the rows says what a merged shard replaces. So one that somebody else put there, or that lost rows, hides nothing; and
where a compaction died before it deleted its sources, their rows lose to the equal ones of the merged shard the next time.

Of one key the newest detection stays, and the newest dead letter if it is newer still: it may choose the key that counts (see
`row_rule`). Of equal rows the one in the shard of the highest level stays, then that of the last name. A merged shard has a
higher level than its sources, so a row that stays only ever rises in one order that all compactions share. So two at once, of
which one was paused for a day, never each drop the other's copy of a row.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from models.base.progress import shown
from pipeline.errors import UnreadableError
from pipeline.results.completion import contains, row_keys
from pipeline.results.contents import merge_contents
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.lock import locked
from pipeline.results.reader import BATCH_ROWS, KINDS, ResultsFolder, batches_in, parquet_file
from pipeline.results.row_rule import COLUMNS, RULE, Ranked, superseded
from pipeline.results.rows import exact_uris
from pipeline.results.run_folder import remove_abandoned
from pipeline.results.shards import COMPACTED, KEYS, Shard, digest, shard_of_name, write_shard
from pipeline.storage.files import delete_files, delete_generations, folders_of, sync, warn_unreadable
from pipeline.storage.listing import files_of
from pipeline.storage.stores import look_up

_ROWS, _BYTES, _FILES = 100_000, 16 << 20, 500  # of a group of sources at most
_RAW_BYTES = 64 << 20  # of rows in memory, after which a merged shard is written
_MOST_RAW_BYTES = 256 << 20  # of a source's rows; a larger one stays as it is
_SMALL_BYTES = 64 << 10  # below it the number of files costs more than their bytes
_SHARE = 0.2  # of lost rows
_IMAGES = (*COLUMNS, "version", "settings")  # the columns of detections that tell which dead letters they answer
_LEVEL = b"level"  # metadata of a merged shard: a character for each merge behind it
_RULE, _THIS_RULE = b"rule", b"%d" % RULE  # metadata of a merged shard: the version of the rule by which rows were dropped


class Compacted(NamedTuple):
    """What a compaction did.

    Attributes:
      before: Number of shards that were merged.
      files: Number of shards that replace them.
      rows: Number of rows in these.
      dropped: Number of rows that were duplicates, or superseded by better ones.
    """

    before: int = 0
    files: int = 0
    rows: int = 0
    dropped: int = 0


class _Part(NamedTuple):
    """A shard, its bytes without compression, its level, the ranks of its rows, and of each row whether it lost."""

    shard: Shard
    raw_bytes: int
    level: bytes
    ranked: Ranked
    lost: np.ndarray
    loose_keys: np.ndarray  # those that its rows would have without a generation; empty where they are not needed

    @property
    def kept(self) -> int:
        return len(self.lost) - int(np.count_nonzero(self.lost))

    @property
    def kept_bytes(self) -> int:
        return self.shard.size_bytes * self.kept // max(1, len(self.lost))

    @property
    def is_small(self) -> bool:
        return 2 * len(self.lost) < _ROWS and 2 * self.shard.size_bytes < _BYTES and 2 * self.raw_bytes < _RAW_BYTES


def compact(output: str, until: float = 0.0, *, keep_latest: bool = False, run: str = "", wait_s: float = 0.0) -> Compacted:
    """Merges the shards of a results folder.

    Args:
      output: The folder, which is there.
      until: Only shards all of whose rows were made before this moment, in seconds since the epoch; 0: all.
      keep_latest: Of an image and a model only the current row, or the newest detection, stays of all detections, whatever its
        generation, version and settings.
      run: Only the shards that this run wrote; empty: those of all.
      wait_s: The longest wait for another compaction.

    Raises:
      BusyError: Another compaction works there.
      UnreadableError: A shard cannot be read now, or what was written is not read back.
    """
    with locked(output, COMPACTED, wait_s=wait_s, what="compact"):
        remove_abandoned(output)
        _remove_views(output)
        merge_contents(output)
        results = ResultsFolder(output, may_hold=lambda shard: run in ("", shard.run))
        share, before_us = 0.0 if keep_latest else _SHARE, until * 1e6 if until else math.inf
        parts = [part for part in _parts(results, keep_latest) if part.ranked.made_at.max(initial=0) < before_us]
        groups = _decided(results, parts, keep_latest, share)
        done = [_merge(results, group, share) for group in shown(groups, "merging", "groups of files")]
        return Compacted(*map(sum, zip(Compacted(), *done, strict=True)))


def _remove_views(output: str) -> None:
    """Removes the JSON Lines beside shards, which earlier releases wrote for people."""
    files = (file.path for kind in KINDS for file in files_of(f"{output}/{kind}", "*.jsonl"))
    delete_files(path for path in files if shard_of_name(f"{path.removesuffix('.jsonl')}.parquet"))


def _parts(results: ResultsFolder, keep_latest: bool) -> list[_Part]:
    """The shards in the order in which the last of equal rows counts; the images of rows are read where they are needed."""
    letters = [*_read(results, DEAD_LETTERS, COLUMNS)]
    by_image = keep_latest or not all(part.ranked.chooses.all() for part in letters)
    detections = [*_read(results, DETECTIONS, _IMAGES if by_image else COLUMNS[:2])]
    if not by_image:
        letters = [part._replace(ranked=Ranked.by_key(*part.ranked[1:3], False)) for part in letters]
    return sorted([*letters, *detections], key=lambda part: (part.level, posixpath.basename(part.shard.path)))


def _read(results: ResultsFolder, kind: str, columns: Sequence[str]) -> Iterator[_Part]:
    def project(shard: Shard, source: Any) -> tuple[bytes, _Part]:
        ranks, loose_keys = list[Ranked](), [np.zeros(0, np.uint64)]
        with parquet_file(shard, source) as file:
            metadata = file.schema_arrow.metadata or {}
            raw_bytes = sum(file.metadata.row_group(number).total_byte_size for number in range(file.metadata.num_row_groups))
            for batch in batches_in(shard, file, columns, BATCH_ROWS):
                ranks.append(Ranked.of(batch, kind == DETECTIONS))
                if columns is _IMAGES:
                    loose_keys.append(_loose_keys(batch))
        ranked = Ranked.joined(ranks, kind == DETECTIONS)
        lost = np.zeros(len(ranked.keys), bool)
        part = _Part(shard, raw_bytes, metadata.get(_LEVEL, b""), ranked, lost, np.concatenate(loose_keys))
        return metadata.get(_RULE, _THIS_RULE), part

    shards = shown([shard for shard in results.shards if shard.kind == kind], "reading keys", "files")
    for shard, (rule, part) in results.read(project, shards, begin_anew=False):
        if rule == _THIS_RULE:
            yield part
        else:
            warn_unreadable(shard.path, "another release merged it by another rule, so it stays as it is")


def _loose_keys(rows: pa.RecordBatch) -> np.ndarray:
    named = (rows[name].to_pylist() for name in ("model", "version", "settings"))
    return row_keys((uri, "", *each) for uri, *each in zip(exact_uris(rows), *named, strict=True))


def _decided(results: ResultsFolder, parts: Sequence[_Part], keep_latest: bool, share: float) -> list[list[_Part]]:
    """The groups to merge, in which no row lost to one of a damaged shard: those shards are read whole to which rows lost."""
    whole: set[str] = set()
    while True:
        _mark_lost(parts, keep_latest)
        groups = [group for kind in KINDS for group in _groups([part for part in parts if part.shard.kind == kind], share)]
        lost = np.unique(np.concatenate([np.zeros(0, np.uint64), *(p.ranked.groups[p.lost] for group in groups for p in group)]))
        winners = [
            part.shard
            for part in parts
            if part.shard.path not in whole and len(lost) and contains(lost, part.ranked.groups[~part.lost]).any()
        ]
        read = {shard.path for shard, _ in results.read(_read_whole, winners, begin_anew=False)}
        whole |= read
        if len(read) == len(winners):
            return groups
        not_read = {shard.path for shard in winners} - read
        parts = [part for part in parts if part.shard.path not in not_read]


def _mark_lost(parts: Sequence[_Part], keep_latest: bool) -> None:
    """Marks the rows that a newer one of their kind and key beats, and dead letters of images that were detected since."""
    detected = [part for part in parts if part.ranked.detected]
    letters = [part for part in parts if not part.ranked.detected]
    for of_kind in (detected, letters):
        ranked = [Ranked.by_key(*part.ranked[1:3], part.ranked.detected) for part in of_kind]
        for part, mask in zip(of_kind, superseded(ranked), strict=True):
            part.lost[:] = mask
    if keep_latest:
        current = dict(zip((part.shard for part in parts), superseded([part.ranked for part in parts]), strict=True))
        for part, mask in zip(detected, superseded([part.ranked for part in detected]), strict=True):
            part.lost[:] |= mask & current[part.shard]
    asked = np.unique(np.concatenate([np.zeros(0, np.uint64), *(part.ranked.keys for part in letters)]))
    answers = [
        (keys[is_asked], part.ranked.made_at[is_asked])
        for part in detected
        for keys in (part.ranked.keys, part.loose_keys)
        if (is_asked := contains(asked, keys)).any()
    ]
    if not answers:
        return
    keys, made_at = map(np.concatenate, zip(*answers, strict=True))
    order = np.lexsort((made_at, keys))
    keys, made_at = keys[order], made_at[order]
    for part in letters:
        newest = np.searchsorted(keys, part.ranked.keys, "right") - 1  # -1: the last one, of another key
        part.lost[:] |= (keys[newest] == part.ranked.keys) & (made_at[newest] >= part.ranked.made_at)


def _groups(parts: Sequence[_Part], share: float) -> list[list[_Part]]:
    """The groups of one kind's shards that are worth merging."""
    groups: list[list[_Part]] = []
    rows = size = raw = 0
    for part in sorted(parts, key=lambda part: part.kept_bytes):
        if not (part.is_small or _is_worth([part], share)):
            continue
        fits = rows + part.kept <= _ROWS and size + part.kept_bytes <= _BYTES and part.kept_bytes <= 2 * max(size, _SMALL_BYTES)
        if not (groups and fits and raw + part.raw_bytes <= _RAW_BYTES and len(groups[-1]) < _FILES):
            groups.append([])
            rows = size = raw = 0
        groups[-1].append(part)
        rows, size, raw = rows + part.kept, size + part.kept_bytes, raw + part.raw_bytes
    return [group for group in groups if _is_worth(group, share)]


def _is_worth(group: Sequence[_Part], share: float) -> bool:
    """Whether a merge saves a file, or drops a large share of rows; of a small file any row."""
    rows = sum(len(part.lost) for part in group)
    lost = rows - sum(part.kept for part in group)
    return len(group) > 1 or lost > share * rows or (lost > 0 and group[0].shard.size_bytes < _SMALL_BYTES)


def _merge(results: ResultsFolder, group: Sequence[_Part], share: float) -> Compacted:
    """Writes merged shards and deletes their sources; one that is damaged, gone, or too large to merge, stays."""
    metadata = {_LEVEL: max(part.level for part in group) + b"+", _RULE: _THIS_RULE}
    taken, held, files = list[_Part](), list[pa.Table](), 0
    for part in group:
        table = _kept_rows(results, part)
        if table is None:
            continue
        if held and sum(each.nbytes for each in (*held, table)) > _RAW_BYTES:
            files += _write(results, group[0].shard.kind, held, metadata)
            held = []
        taken.append(part)
        held.append(table)
    if not (files or _is_worth(taken, share)):
        return Compacted()
    files += _write(results, group[0].shard.kind, held, metadata)
    delete_generations({part.shard.path: part.shard.generation for part in taken})
    sync(folders_of(part.shard.path for part in taken))
    kept, rows = sum(part.kept for part in taken), sum(len(part.lost) for part in taken)
    return Compacted(len(taken), files, kept, rows - kept)


def _kept_rows(results: ResultsFolder, part: _Part) -> pa.Table | None:
    """The rows of a source that did not lose, which is read whole; None if it is gone, damaged, or too large to merge."""
    kept, at, size_bytes = [], 0, 0
    for _, batch in results.batches([part.shard], begin_anew=False):
        chosen = batch.filter(pa.array(~part.lost[at : at + len(batch)]))
        at, size_bytes = at + len(batch), size_bytes + chosen.nbytes
        if size_bytes > _MOST_RAW_BYTES:
            return None
        kept.append(chosen)
    is_whole = at == len(part.lost) and part.shard.path not in results.damaged
    return pa.Table.from_batches(kept) if is_whole and kept else None


def _write(results: ResultsFolder, kind: str, tables: Sequence[pa.Table], metadata: dict[bytes, bytes]) -> int:
    """Writes a merged shard, and reads it back; returns how many there are.

    Raises:
      UnreadableError: It is not what was written.
    """
    merged = pa.concat_tables(tables).sort_by("uri")
    if not len(merged):
        return 0
    merged = merged.replace_schema_metadata({**metadata, KEYS: digest(merged["key"].to_numpy())})
    path = write_shard(results.output, kind, merged, COMPACTED)
    written = look_up(path)
    shard = shard_of_name(written.path, written.size_bytes, written.generation) if written else None
    read = [rows for _, rows in results.read(_read_whole, [shard], begin_anew=False)] if shard else []
    wanted = (merged["key"].to_numpy(), merged["made_at"].cast(pa.int64()).to_numpy())
    if not (read and all(map(np.array_equal, read[0], wanted))):
        raise UnreadableError(f"{path} was written and is not read back as it was; nothing was deleted: check the disk")
    return 1


def _read_whole(shard: Shard, source: Any) -> tuple[np.ndarray, np.ndarray]:
    """The keys and times of a shard, of which every page is read."""
    keys, made_at = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    with parquet_file(shard, source) as file:
        for batch in batches_in(shard, file):
            keys.append(batch["key"].to_numpy())
            made_at.append(batch["made_at"].cast(pa.int64()).to_numpy())
    return np.concatenate(keys), np.concatenate(made_at)
