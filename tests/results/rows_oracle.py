"""Which rows of a results folder count, written once more, without anything of the pipeline."""

from collections import defaultdict
from typing import NamedTuple


class Row(NamedTuple):
    """A row: its number, what its key is made of, when it was made, and whether it is a detection."""

    number: int
    uri: str
    generation: str
    model: str
    version: str
    settings: str
    detected: bool

    @property
    def key(self):
        return self[1:6]


def by_key(rows):
    """Of each key the row that counts."""
    best = {}
    for row in rows:
        best[row.key] = max(row, best.get(row.key, row), key=lambda each: (each.detected, each.number))
    return {*best.values()}


def stored(rows):
    """What is left of rows that are merged: of each key the row that counts, and the newest, which may choose the key."""
    return by_key(rows) | {*{row.key: row for row in sorted(rows)}.values()}


def current(rows):
    """Of each image and model the row that counts: the newest one chooses the key."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.uri, row.model].append(row)
    chosen = set()
    for group in groups.values():
        choosers = [row for row in group if row.detected or row.generation] or group
        newest = max(choosers, key=lambda row: row.number)
        chosen |= by_key(row for row in group if row.key == newest.key)
    return chosen
