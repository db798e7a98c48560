"""The reader of all state files. A file that cannot be read counts as absent, and one line on standard error names it.

A power cut may leave a file empty or cut off, and whoever can write to the results folder can leave anything there. So the reader
checks the content against its type, and callers use a path in it only if the path lies in its own folder.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from pipeline.storage.files import exists, read_file


def read_checked(path: str, parse: Callable[[bytes], Any]) -> Any:
    """What `parse` makes of a file; None where there is no such file, or `parse` raises a `ValueError`.

    Args:
      path: The file.
      parse: Parses its content.
    """
    if not is_own_file(path):
        if os.path.lexists(path):
            warn_unreadable(path, "expected a file")
        return None
    try:
        return parse(read_file(path)) if exists(path) else None
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, PermissionError) as err:
        warn_unreadable(path, " ".join(str(err).split())[:200])
        return None


@functools.lru_cache(maxsize=1000)  # once for each file, although a run reads some of them often
def warn_unreadable(path: str, why: str) -> None:
    """Prints that a state file counts as absent."""
    shown = path.encode("utf-8", "backslashreplace").decode()
    print(f"warning: {shown} cannot be read and counts as absent: {why}", file=sys.stderr, flush=True)


def is_own_file(path: str) -> bool:
    """Whether a local path is a regular file: no link, no folder, no pipe. Always true of objects."""
    return "://" in path or (os.path.isfile(path) and not os.path.islink(path))
