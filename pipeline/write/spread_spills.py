"""`SpreadSpills`: a sample sort. Rows that one worker would merge too slowly are cut into ranges, which many workers merge.

Each worker merges a group of spill files into one and samples a few of its rows, always the same ones. The sampled rows of all
groups give the bounds of the ranges, and each merged file is cut there. So rows stay sorted over all files, and equal rows give
equal files, however they were spilled. No two workers read the same spill file.
"""

from __future__ import annotations

import dataclasses
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from zlib import crc32

import apache_beam as beam
from apache_beam.pvalue import AsDict, TaggedOutput

from pipeline.storage.files import create
from pipeline.storage.spill_files import SpillFile, merge_spills
from pipeline.write.spill_rows import BY_ROWS, Shard

ROWS_AT_ONCE = 1_000_000  # takes half a minute
MOST_RANGES = 256  # the worker of a range reads a part of as many files
_NOTED = 100  # sampled rows for each range: ranges are equal to within a third
_NOTED_BYTES = 1000  # of a row: its image's name and more

KeyedSpill = tuple[Shard, SpillFile]


def count_lines(spills: beam.PCollection[KeyedSpill]) -> AsDict:
    """The number of rows of each shard, for the steps that come after."""
    lines = spills | "LinesOfSpills" >> beam.MapTuple(lambda shard, spill: (shard, spill.lines))
    return AsDict(lines | "CountLines" >> beam.CombinePerKey(sum))


@dataclasses.dataclass
class SpreadSpills(beam.PTransform):
    """Cuts a shard that stands for all files of a kind into shards of about equal size, if it has many rows.

    Element in: a spill with its shard; out: the same, with the `number` of its range as the shard's.
    Bounded. A retried bundle leaves only an unused file.

    Args:
      staging: The run's folder of unfinished files.
      rows_at_once: The least number of rows of a range.
    """

    staging: str
    rows_at_once: int = ROWS_AT_ONCE

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, spills: beam.PCollection[KeyedSpill]) -> beam.PCollection[KeyedSpill]:
        """Wires two shuffles: of the names of spill files, and of the sampled rows."""
        rows = count_lines(spills)
        groups = spills | "KeyByGroup" >> beam.Map(self._by_group, rows) | "GatherGroups" >> beam.GroupByKey()
        merged = groups | "MergeGroups" >> beam.FlatMap(self._merge, rows).with_outputs("noted", main="spills")
        noted = AsDict(merged.noted | "GatherNoted" >> beam.GroupByKey())
        return merged.spills | "CutSpills" >> beam.FlatMap(self._cut, rows, noted)

    def _ranges(self, shard: Shard, rows: Mapping[Shard, int]) -> int:
        by_rows = Shard(*shard).shards == BY_ROWS
        return max(1, min(MOST_RANGES, rows[shard] // self.rows_at_once)) if by_rows else 1

    def _by_group(self, keyed: KeyedSpill, rows: Mapping[Shard, int]) -> tuple[tuple[Shard, int], SpillFile]:
        shard, spill = keyed
        return (shard, crc32(spill.path.encode()) % self._ranges(shard, rows)), spill

    def _merge(
        self, group_and_spills: tuple[tuple[Shard, int], Iterable[SpillFile]], rows: Mapping[Shard, int]
    ) -> Iterator[KeyedSpill | TaggedOutput]:
        (shard, _), spills = group_and_spills
        ranges = self._ranges(shard, rows)
        if ranges == 1:
            yield from ((shard, spill) for spill in spills)
            return
        noted_of = max(1, rows[shard] // (ranges * _NOTED))
        path, lines, size_bytes = f"{self.staging}/merge/{uuid.uuid4().hex}", 0, 0
        with create(path) as file:
            for line in merge_spills(spills, f"{self.staging}/merge"):
                file.write(line)
                lines, size_bytes = lines + 1, size_bytes + len(line)
                if crc32(line) % noted_of == 0:
                    yield TaggedOutput("noted", (shard, line[:_NOTED_BYTES]))
        yield shard, SpillFile(path, lines, 0, size_bytes)

    def _cut(self, keyed: KeyedSpill, rows: Mapping[Shard, int], noted: Mapping[Shard, Iterable[bytes]]) -> Iterator[KeyedSpill]:
        shard, spill = keyed
        ranges = self._ranges(shard, rows)
        if ranges == 1:
            yield keyed
            return
        in_order, start = sorted(noted.get(shard, ())), spill.start
        begins = [in_order[len(in_order) * number // ranges] for number in range(1, ranges)] if in_order else []
        for number, lines in groupby(spill.read(), lambda line: bisect_right(begins, line)):
            sizes = list(map(len, lines))
            yield Shard(*shard)._replace(number=number), SpillFile(spill.path, len(sizes), start, sum(sizes))
            start += sum(sizes)
