"""Many rows are merged by many workers: each a range of them, of about equal size, whoever spilled them how."""

import random

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that

from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.storage.spill_files import SpillWriter
from pipeline.write.spill_rows import BY_ROWS, Shard
from pipeline.write.spread_spills import SpreadSpills

ALL = Shard(DETECTIONS, 0, BY_ROWS)
ROWS = [f'{{"image": {{"uri": "gs://bucket/{number:05d}.jpg"}}}}\n'.encode() for number in range(5000)]
KEPT = []


def spilled(folder, shard, lines, at_once):
    """Lines in spills of so many."""
    spiller = SpillWriter(str(folder / "spill"))
    for start in range(0, len(lines), at_once):
        for line in lines[start : start + at_once]:
            list(spiller.add(shard, line))
        yield from spiller.flush()


def keep(elements):
    KEPT[:] = elements


def spread(folder, spills, rows_at_once):
    """The rows of each range, by the range's number, as many spills have them."""
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        ranges = pipeline | beam.Create(list(spills)) | SpreadSpills(str(folder), rows_at_once)
        assert_that(ranges, keep)
    found = {}
    for shard, spill in KEPT:
        lines = list(spill.read())
        assert lines == sorted(lines) and len(lines) == spill.lines
        found.setdefault(tuple(shard), []).append(lines)
    return found


@pytest.mark.parametrize("at_once", [7, 900])
def test_ranges_follow_each_other_and_are_about_equal(tmp_path, at_once):
    lines = random.Random(at_once).sample(ROWS, len(ROWS))
    found = spread(tmp_path, spilled(tmp_path, ALL, lines, at_once), 1000)
    assert sorted(found) == [(DETECTIONS, number, BY_ROWS) for number in range(5)]
    ranges = [sorted(line for spill in found[key] for line in spill) for key in sorted(found)]
    assert [line for lines in ranges for line in lines] == ROWS
    assert all(600 < len(lines) < 1400 for lines in ranges)
    assert max(len(spills) for spills in found.values()) <= 5  # however many there were


def test_the_same_rows_have_the_same_ranges_whoever_spilled_them(tmp_path):
    found = []
    for seed, at_once in ((1, 50), (2, 333)):
        lines = random.Random(seed).sample(ROWS, len(ROWS))
        ranges = spread(tmp_path, spilled(tmp_path, ALL, lines, at_once), 1000)
        found.append({key: sorted(line for spill in spills for line in spill) for key, spills in ranges.items()})
    assert found[0] == found[1]


def test_what_one_worker_merges_soon_stays_as_it_is(tmp_path):
    """Few rows; and shards whose number the user has set, which many workers merge in any case."""
    dead, third = Shard(DEAD_LETTERS, 0, BY_ROWS), Shard(DETECTIONS, 2, 3)
    spills = [*spilled(tmp_path, dead, ROWS[:900], 100), *spilled(tmp_path, third, ROWS, 1000)]
    spread(tmp_path, spills, 500_000)
    assert sorted((tuple(shard), tuple(spill)) for shard, spill in KEPT) == sorted((tuple(s), tuple(p)) for s, p in spills)


def test_each_kind_is_spread_by_its_own_rows(tmp_path):
    dead = Shard(DEAD_LETTERS, 0, BY_ROWS)
    spills = [*spilled(tmp_path, ALL, ROWS, 100), *spilled(tmp_path, dead, ROWS[:900], 100)]
    found = spread(tmp_path, spills, 1000)
    assert sorted(kind for kind, _, _ in found) == [DEAD_LETTERS, *[DETECTIONS] * 5]
