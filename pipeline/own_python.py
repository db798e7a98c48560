"""Starts this Python with a module of this program, in a process of its own."""

from __future__ import annotations

import os
import sys


def command_of(module: str) -> list[str]:
    """The command line that calls `main()` of a module.

    Packages come from this process's path (`environment`), not from the current folder, which may have a `models` of its own.
    """
    code = f"import sys; sys.path = [part for part in sys.path if part]; from {module} import main; sys.exit(main())"
    return [sys.executable, "-c", code]


def environment() -> dict[str, str]:
    """The environment of this process, with its path for packages."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part or os.getcwd() for part in sys.path)}
