"""State files of runs: one reader for all. A file that cannot be read counts as absent, and one line on standard error names it.

A power cut leaves such files empty or cut off, and whoever may write to the results folder may leave anything there. So the
content of a state file is checked against its type, and a path that it names is used only where it lies in its own folder.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from pipeline.data_format import from_plain
from pipeline.storage.files import exists, read_file


def read_state(path: str, kind: Any) -> Any:
    """The content of a JSON file as a type (see `data_format`); None where there is no such file, or it cannot be read."""
    return read_checked(path, lambda content: from_plain(kind, json.loads(content)))


def read_checked(path: str, parse: Callable[[bytes], Any]) -> Any:
    """What `parse` makes of a file; None where there is no such file, or `parse` raises a `ValueError`."""
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


@functools.lru_cache(maxsize=1000)  # once each; a run looks at some files many times
def warn_unreadable(path: str, why: str) -> None:
    """Says on standard error that a state file counts as absent."""
    shown = path.encode("utf-8", "backslashreplace").decode()
    print(f"warning: {shown} cannot be read and counts as absent: {why}", file=sys.stderr, flush=True)


def is_own_file(path: str) -> bool:
    """Whether a local path is a file itself: no link to one elsewhere, no folder, no pipe. True of objects."""
    return "://" in path or (os.path.isfile(path) and not os.path.islink(path))


def lies_in(path: str, folder: str) -> bool:
    """Whether a path lies below a folder, whatever it is made of: `..`, links, doubled separators."""
    if not path.startswith(f"{folder}/") or "\0" in path or {"", ".", ".."} & {*path[len(folder) + 1 :].split("/")}:
        return False
    return "://" in path or os.path.realpath(path).startswith(f"{os.path.realpath(folder).rstrip('/')}/")
