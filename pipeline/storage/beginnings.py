"""Splits a listing into ranges of names, by prefixes that it finds with a few requests each.

Cloud Storage lists names in order, page after page, so one listing cannot be sped up. But a listing can begin and end at any
name (`startOffset` and `endOffset` of https://cloud.google.com/storage/docs/json_api/v1/objects/list).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator

_MOST_REQUESTS = 2_000  # names with long common prefixes would take one for each character

FirstName = Callable[[str, str], str | None]


def beginnings(first: FirstName, prefix: str, wanted: int, can_cut: Callable[[str], bool] = lambda _beginning: True) -> list[str]:
    """Finds about as many prefixes of names as wanted, in order; all names from one prefix to the next begin with it.

    Args:
      first: (prefix, start) -> the first name with this prefix that is not before `start`; None where there is none.
      prefix: What all names begin with.
      wanted: The number of prefixes.
      can_cut: Whether the names with a prefix may be split further.
    """
    asked = 0

    def counted(beginning: str, start: str) -> str | None:
        nonlocal asked
        asked += 1
        return first(beginning, start)

    whole, rest = list[str](), deque([prefix])
    while rest and len(whole) + len(rest) < wanted and asked < _MOST_REQUESTS:
        beginning = rest.popleft()
        longer = list(_longer(counted, beginning)) if can_cut(beginning) else []
        rest.extend(longer)
        whole += [] if longer else [beginning]
    return sorted([*whole, *rest])


def _longer(first: FirstName, beginning: str) -> Iterator[str]:
    """The prefixes that are one character longer, in order; none where only one name has this prefix."""
    start: str | None = beginning
    while start is not None and (name := first(beginning, start)) is not None:
        if name < start:
            return  # a store that ignores the start: its listing cannot be split
        if name == beginning:
            start = f"{beginning}\0"
            continue
        yield name[: len(beginning) + 1]
        start = _after(name[: len(beginning) + 1])


def _after(beginning: str) -> str | None:
    r"""The first text after all texts with this prefix; None where only a shorter text comes after.

    >>> _after("img_8"), _after("a\ud7ff"), _after("\U0010ffff")
    ('img_9', 'a\ue000', None)
    """
    code = ord(beginning[-1]) + 1
    if code > sys.maxunicode:
        return None
    return beginning[:-1] + chr(0xE000 if code == 0xD800 else code)  # no name has halves of surrogate pairs
