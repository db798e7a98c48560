"""Divides a long listing of names into ranges that are listed side by side, by probing: which is the first name behind a text?"""

from __future__ import annotations

import os.path
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

_LAST = "\U0010fffd"  # sorts behind all that names mostly have
_PLACES = 8  # characters behind what two names share that decide what lies in their middle
_TRIES = 50  # probes for one point: five halve the letters of one place
_shared = os.path.commonprefix  # of characters, as object storage has no folders


class NameRange(NamedTuple):
    """The paths behind `after`, up to `until`, by the order of their UTF-8 bytes, which is Python's; an empty one is no bound.

    >>> [NameRange("b", "d").holds(path) for path in "abcde"]
    [False, False, True, True, False]
    """

    after: str = ""
    until: str = ""

    def holds(self, path: str) -> bool:
        """Whether a path lies in the range."""
        return self.after < path and (not self.until or path <= self.until)


class _Part(NamedTuple):
    """A part of the names: those behind `after`, of which `first` is the first one; none lies behind `end`."""

    after: str
    first: str
    end: str


def split_points(names: Sequence[str], first_behind: Callable[[str], str | None], parts: int, shared: int = 0) -> list[str]:
    """Texts that divide a listing into parts, as even as halving between the names that probes find makes them.

    Args:
      names: The first names of the listing, at least one, sorted.
      first_behind: The first name of the listing behind a text; None if there is none.
      parts: How many are wanted; fewer come where the names are too few, or share too much.
      shared: The length of the beginning that all names have.

    >>> names = [f"{number:04}" for number in range(10_000)]
    >>> split_points(names[:20], lambda text: next((name for name in names if name > text), None), 4)
    ['25555', '5', '75555']
    """
    beginning, letters = _shared([names[0], names[-1]]), {*"".join(name[shared:] for name in names)}
    while (found := first_behind(beginning + _LAST)) and not found.startswith(beginning):
        beginning = _shared([beginning, found])
        letters |= {*found[shared:]}
    halve = partial(_halves, first_behind, sorted(letters))
    divided = [_Part("", names[0], beginning + _LAST)]
    with ThreadPoolExecutor(parts, "probe") as pool:
        while len(divided) < parts:
            room = parts - len(divided)
            halves = [half for both in pool.map(halve, divided[:room]) for half in both] + divided[room:]
            if len(halves) == len(divided):
                break
            divided = halves
    return [part.after for part in divided[1:]]


def _halves(first_behind: Callable[[str], str | None], letters: Sequence[str], part: _Part) -> list[_Part]:
    """Two parts with names in both; the part itself if no point is found."""
    after, first, end = part
    for _ in range(_TRIES):
        middle = _middle(first, end, letters)
        if not middle:
            break
        found = first_behind(middle)
        if found and found <= end:
            return [_Part(after, first, middle), _Part(middle, found, end)]
        end = middle
    return [part]


def _middle(low: str, high: str, letters: Sequence[str]) -> str:
    """A text between two others, of these letters behind what they share; empty if there is none of a few letters."""
    both = _shared([low, high])
    base = len(letters) + 2  # 0 ends a text, and the last digit is of what sorts behind all letters

    def number(text: str) -> int:
        value = 0
        for place in range(len(both), len(both) + _PLACES):
            value = value * base + (bisect_left(letters, text[place]) + 1 if place < len(text) else 0)
        return value

    left, text = (number(low) + number(high)) // 2, ""
    for place in reversed(range(_PLACES)):
        digit, left = divmod(left, base**place)
        if not digit:
            break
        text += letters[min(digit, len(letters)) - 1]
    middle = both + text
    return middle if low < middle < high else ""
