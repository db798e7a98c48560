"""Compaction: merges small shards into large ones and drops rows that do not count; no reader loses a row, whenever it ends.

1. It deletes the sources that an earlier compaction has merged and, since it died, not deleted, and the views of 0.1.0.
2. It reads the key and the age of all rows and marks those that lost: 17 bytes of memory a row, 9 more while they are sorted.
3. It groups small shards of similar size, so that a new row costs a few files of its own size, and larger ones of which more than
   a fifth of the rows lost.
4. For each group it writes the merged shard, whose metadata names its sources, so that readers skip these. Then it deletes the
   sources, only in the generations that it read.

Of one key the newest row stays, a detection before any dead letter; of equal ones that in the shard of the highest level, then of
the last name. A merged shard has a higher level than its sources, so a row that stays only ever rises in one order that all
compactions share. So two at once, of which one was paused for a day, never each drop the other's copy of a row.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from models.progress import shown
from pipeline.results.completion import row_keys
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, kind_of_rows
from pipeline.results.lock import locked
from pipeline.results.newest import lost_rows
from pipeline.results.rows import SCHEMAS, uri_of
from pipeline.results.run import remove_abandoned
from pipeline.results.shards import COMPACTED, SOURCES, Shard, list_shards, read_columns, write_shard
from pipeline.storage.files import delete_generations, folders_of, generations_of, is_own_file, sync
from pipeline.storage.listing import files_of

_ROWS, _BYTES, _FILES = 100_000, 16 << 20, 500  # of a group of sources at most; each reader reads their names
_SMALL_BYTES = 64 << 10  # below it the number of files costs more than their bytes
_SHARE = 0.2  # of lost rows
_LEVEL = b"level"  # metadata of a merged shard: a character for each merge behind it


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
    """A shard, its level, and of each row the key, the age, the image (only with `keep_latest`), and whether it lost."""

    shard: Shard
    level: bytes
    keys: np.ndarray
    made_at: np.ndarray
    images: np.ndarray
    lost: np.ndarray

    @property
    def kept(self) -> int:
        return len(self.lost) - int(np.count_nonzero(self.lost))

    @property
    def kept_bytes(self) -> int:
        return self.shard.size_bytes * self.kept // max(1, len(self.lost))


def compact(output: str, until: str = "", *, keep_latest: bool = False, wait_s: float = 0.0) -> Compacted:
    """Merges the shards of a results folder.

    Args:
      output: The folder, local or `gs://`, which is there.
      until: Only shards written before this time, such as `20261121T000000Z`; empty: all.
      keep_latest: Of an image and a model only the newest detection stays, whatever its generation, version and settings.
      wait_s: The longest wait for another compaction.

    Raises:
      BusyError: Another compaction works there.
    """
    with locked(output, COMPACTED, wait_s=wait_s, what="compact"):
        remove_abandoned(output)
        shards = [shard for shard in _finish(output) if not until or shard.written_at < until]
        read = (_part(shard, keep_latest and shard.kind == DETECTIONS) for shard in shown(shards, "reading keys", "files"))
        parts = sorted(filter(None, read), key=lambda part: (part.level, posixpath.basename(part.shard.path)))
        _mark_lost(parts, [part.keys for part in parts])
        _mark_answered(parts)
        detected = [part for part in parts if len(part.images)]
        _mark_lost(detected, [part.images for part in detected])
        share = 0.0 if keep_latest else _SHARE
        groups = [group for kind in SCHEMAS for group in _groups([part for part in parts if part.shard.kind == kind], share)]
        done = [_merge(output, group, share) for group in shown(groups, "merging", "groups of files")]
        return Compacted(*map(sum, zip(Compacted(), *done, strict=True)))


def _finish(output: str) -> list[Shard]:
    """Deletes what earlier compactions and killed runs have left; returns the shards that readers see."""
    found = {file.path: file.generation for kind in SCHEMAS for file in files_of(f"{output}/{kind}") if is_own_file(file.path)}
    shards = list_shards(output)  # after `found`, so that a shard that is only there is a source of a merged one, or gone
    seen = {shard.path for shard in shards}
    left = {path: generation for path, generation in found.items() if kind_of_rows(path) and path not in seen}
    sync(folders_of(left))  # whoever died may not have done so after renaming the merged shard
    _delete(left)
    return shards


def _delete(generations: Mapping[str, str]) -> None:
    delete_generations(generations)
    sync(folders_of(generations))


def _part(shard: Shard, with_images: bool) -> _Part | None:
    table = _read(shard, ["key", "made_at", *(["uri", "uri_bytes", "model"] if with_images else [])])
    if table is None:
        return None
    images = row_keys((uri_of(row), "", row["model"], "", "") for row in (table.to_pylist() if with_images else ()))
    keys, made_at = table["key"].to_numpy(), table["made_at"].cast(pa.int64()).to_numpy()
    level = (table.schema.metadata or {}).get(_LEVEL, b"")
    return _Part(shard, level, keys, made_at, images, np.zeros(len(table), bool))


def _read(shard: Shard, columns: Sequence[str] | None = None) -> pa.Table | None:
    """Columns of a shard; None if it is damaged, which compaction leaves alone, or gone."""
    with contextlib.suppress(FileNotFoundError):
        return read_columns(shard, columns)
    return None


def _mark_lost(parts: Sequence[_Part], numbers: Sequence[np.ndarray]) -> None:
    """Marks all rows with the same number but the one that counts; of equal ones, the last in the order of `parts`."""
    lost = lost_rows(numbers, [part.made_at for part in parts], [part.shard.kind == DETECTIONS for part in parts])
    for part, mask in zip(parts, lost, strict=True):
        np.logical_or(part.lost, mask, out=part.lost)


def _mark_answered(parts: Sequence[_Part]) -> None:
    """Marks dead letters without a generation whose image has a detection of their version that is not older."""
    columns = ["uri", "model", "version"]
    letters = []
    for number, part in enumerate(parts):
        if part.shard.kind == DEAD_LETTERS and (table := _read(part.shard, [*columns, "generation", "made_at"])):
            table = table.append_column("part", [np.full(len(table), number)]).append_column("row", [np.arange(len(table))])
            letters.append(table.filter(pc.and_(pc.equal(table["generation"], ""), pc.not_equal(table["uri"], ""))))
    uris = pa.concat_tables(letters)["uri"].unique() if letters else []
    detected = (_read(part.shard, [*columns, "made_at"]) for part in parts if part.shard.kind == DETECTIONS and len(uris))
    found = [table.filter(pc.is_in(table["uri"], uris)) for table in detected if table]
    if not found:
        return
    newest = pa.concat_tables(found).group_by(columns).aggregate([("made_at", "max")])
    both = pa.concat_tables(letters).join(newest, columns, join_type="inner")
    answered = both.filter(pc.greater_equal(both["made_at_max"], both["made_at"]))
    for number, row in zip(answered["part"].to_pylist(), answered["row"].to_pylist(), strict=True):
        parts[number].lost[row] = True


def _groups(parts: Sequence[_Part], share: float) -> list[list[_Part]]:
    """The groups of one kind's shards that are worth merging."""
    groups: list[list[_Part]] = []
    rows = size = 0
    for part in sorted(parts, key=lambda part: part.kept_bytes):
        is_small = 2 * len(part.lost) < _ROWS and 2 * part.shard.size_bytes < _BYTES
        if not (is_small or _is_worth([part], share)):
            continue
        fits = rows + part.kept <= _ROWS and size + part.kept_bytes <= _BYTES and part.kept_bytes <= 2 * max(size, _SMALL_BYTES)
        if not (groups and fits and len(groups[-1]) < _FILES):
            groups.append([])
            rows = size = 0
        groups[-1].append(part)
        rows, size = rows + part.kept, size + part.kept_bytes
    return [group for group in groups if _is_worth(group, share)]


def _is_worth(group: Sequence[_Part], share: float) -> bool:
    """Whether a merge saves a file, or drops a large share of rows; of a small file any row."""
    rows = sum(len(part.lost) for part in group)
    lost = rows - sum(part.kept for part in group)
    return len(group) > 1 or lost > share * rows or (lost > 0 and group[0].shard.size_bytes < _SMALL_BYTES)


def _merge(output: str, group: Sequence[_Part], share: float) -> Compacted:
    """Writes a merged shard and deletes its sources; one that is damaged, or no longer what was decided on, stays."""
    tables = [_kept_rows(part) for part in group]
    group = [part for part, table in zip(group, tables, strict=True) if table is not None]
    found = generations_of(part.shard.path for part in group)
    # some have gone if this compaction was paused for long, and another one has merged them
    if not (_is_worth(group, share) and all(found.get(part.shard.path) == part.shard.generation for part in group)):
        return Compacted()
    kind, sources = group[0].shard.kind, json.dumps(sorted(posixpath.basename(part.shard.path) for part in group))
    metadata = {SOURCES: sources, _LEVEL: max(part.level for part in group) + b"+"}
    merged = pa.concat_tables(table for table in tables if table is not None).sort_by("uri").replace_schema_metadata(metadata)
    if len(merged):
        write_shard(output, kind, merged, COMPACTED)
    _delete(found)
    return Compacted(len(group), int(len(merged) > 0), len(merged), sum(len(part.lost) for part in group) - len(merged))


def _kept_rows(part: _Part) -> pa.Table | None:
    table = _read(part.shard)
    return table.filter(~part.lost) if table is not None and np.array_equal(table["key"], part.keys) else None
