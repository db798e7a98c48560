"""Shows how far a loop or a step is: a bar on a terminal, a line now and then elsewhere, and nothing within two seconds."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import IO, Any, TypeVar

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


def bar(what: str, unit: str, total: int | None = None, **how: Any) -> Any:
    """A tqdm bar: a context manager with `update(count)`.

    Args:
      what: What is done, such as `matching`.
      unit: What an element is, in the plural.
      total: Their number, if known.
      **how: What else `tqdm` takes.
    """
    is_terminal = sys.stderr.isatty()
    look = {"mininterval": 0.1} if is_terminal else {"mininterval": _LINE_SECONDS, "file": _Lines(), "ncols": 0, "smoothing": 0}
    look |= {"maxinterval": look["mininterval"], "delay": _DELAY_SECONDS, "leave": False}
    made = tqdm(desc=what, unit=f" {unit}", total=total, **look, **how)
    if not is_terminal:  # the first line comes after the delay, and not a whole interval later
        made.last_print_t -= _LINE_SECONDS - _DELAY_SECONDS
    return made


def shown(loop: Iterable[_Each], what: str, unit: str, total: int | None = None) -> Iterator[_Each]:
    """Gives the elements of `loop` and shows how many there were.

    Args:
      loop: The elements.
      what: What is done, such as `matching`.
      unit: What an element is, in the plural.
      total: Their number, if `loop` has no length.
    """
    yield from bar(what, unit, total, iterable=loop)


def printable(line: str) -> str:
    """A line in which names cannot steer the terminal: what is not printable is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Shows what is done, and for how many seconds, while a block lasts that cannot be counted.

    Args:
      what: What is done, such as `writing the model`.
    """
    done = threading.Event()
    with _kept_open(sys.stderr) as terminal:  # the block may close or redirect standard error
        thread = threading.Thread(target=_show, args=(what, terminal, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _show(what: str, terminal: IO[str], done: threading.Event) -> None:
    """A line on a terminal is overwritten, and cleared at the end."""
    end, every_s = ("\r", 1.0) if terminal.isatty() else ("\n", _LINE_SECONDS)
    seconds = _DELAY_SECONDS
    while not done.wait(_DELAY_SECONDS if seconds == _DELAY_SECONDS else every_s):
        print(f"{what}: {seconds:.0f} s", end=end, file=terminal, flush=True)
        seconds += every_s
    if end == "\r":
        print("\033[K", end="", file=terminal, flush=True)


@contextlib.contextmanager
def _kept_open(file: IO[str]) -> Iterator[IO[str]]:
    try:
        own = os.fdopen(os.dup(file.fileno()), "w")
    except (OSError, ValueError):  # it has no descriptor
        yield file
        return
    with own:
        yield own
