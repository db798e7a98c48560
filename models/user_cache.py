"""This project's folder in the user's cache: below `$XDG_CACHE_HOME`, else `~/.cache`.

https://specifications.freedesktop.org/basedir-spec
"""

from __future__ import annotations

import os

from models.project import PROJECT


def cache_folder() -> str:
    """The folder, which may not exist yet; a relative `$XDG_CACHE_HOME` counts as unset, as the specification wants it."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = named if os.path.isabs(named) else os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, PROJECT)
