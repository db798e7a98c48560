"""Shows how far a loop is: a bar on a terminal, a line every ten seconds elsewhere, and nothing within two seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tqdm import tqdm

_DELAY_SECONDS = 2.0
_LINE_SECONDS = 10.0

_Each = TypeVar("_Each")


class _Lines:
    """A stream on which each refresh of a bar is a line, where a terminal would overwrite the last one."""

    def write(self, text: str) -> None:
        if text := text.strip():
            print(text, file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Each line is flushed."""


def shown(loop: Iterable[_Each], what: str, unit: str, total: int | None = None) -> Iterator[_Each]:
    """Gives the elements of `loop` and shows how many there were.

    Args:
      loop: The elements.
      what: What is done, such as `matching`.
      unit: What an element is, in the plural.
      total: Their number, if `loop` has no length.
    """
    is_terminal = sys.stderr.isatty()
    look: dict[str, Any] = {"mininterval": 0.1} if is_terminal else {"mininterval": _LINE_SECONDS, "file": _Lines(), "ncols": 0}
    look |= {"maxinterval": look["mininterval"], "delay": _DELAY_SECONDS, "leave": False, "smoothing": 0}
    bar = tqdm(loop, desc=what, unit=f" {unit}", total=total, **look)
    if not is_terminal:  # the first line comes after the delay, and not a whole interval later
        bar.last_print_t -= _LINE_SECONDS - _DELAY_SECONDS
    yield from bar
