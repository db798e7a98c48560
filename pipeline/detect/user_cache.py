"""This project's folder in the user's cache: below `$XDG_CACHE_HOME`, else `~/.cache`.

https://specifications.freedesktop.org/basedir-spec
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from models.base.project import PROJECT


def cache_folder() -> str:
    """The folder, which may not exist yet; a relative `$XDG_CACHE_HOME` counts as unset, as the specification wants it."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = named if os.path.isabs(named) else os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, PROJECT)


def keep_newest(place: str, pattern: str, most: int) -> None:
    """Deletes all but the newest files or folders that match, as far as they can be deleted; other processes may do the same."""
    found = []
    for path in Path(place).glob(pattern):
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path))
    for _, old in sorted(found)[: max(0, len(found) - most)]:
        if old.is_dir():
            shutil.rmtree(old, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                old.unlink()
