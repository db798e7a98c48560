"""Other people's ways to detect in images, each as its own documentation shows; `make bench-peers` runs them beside the pipeline.

Each has a virtual environment below `.peers/`, made from the lock of its name, or lives in the project's own.
"""

from __future__ import annotations

from pathlib import Path

ENVIRONMENTS = Path(".peers")


def python_of(environment: str) -> str:
    """The interpreter of an environment."""
    return str(ENVIRONMENTS / environment / "bin" / "python")
