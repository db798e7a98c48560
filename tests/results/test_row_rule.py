"""The rule of the current row, of more rows than memory is to hold."""

import numpy as np

from pipeline.results.row_rule import Ranked, superseded, superseded_rows
from tests.memory import less_memory_than


def parts_of(rows, of_part, groups):
    """The ranks of random rows of so many images, part by part, with their numbers."""
    random = np.random.default_rng(0)
    for start in range(0, rows, of_part):
        keys, made_at = random.integers(0, groups, of_part).astype(np.uint64), random.integers(0, 5, of_part)
        yield Ranked(keys // 3, keys, made_at, random.random(of_part) < 0.9, bool(random.integers(2))), start + np.arange(of_part)


def test_rows_on_the_disk_count_as_those_in_memory_do():
    parts = [*parts_of(120_000, 5_000, 60_000)]
    expected = [rows[lost] for (_, rows), lost in zip(parts, superseded([ranked for ranked, _ in parts]), strict=True)]
    found = np.concatenate([*superseded_rows(parts)])
    assert len(found) > 30_000 and np.sort(found).tolist() == np.concatenate(expected).tolist()


def test_memory_does_not_grow_with_the_rows():
    with less_memory_than(8 << 20):
        assert sum(map(len, superseded_rows(parts_of(400_000, 10_000, 10**12)))) < 10
