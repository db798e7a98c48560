"""The name under which pip knows this project, and how its users add an extra."""

from __future__ import annotations

PROJECT = "hybrid-detection-pipeline"


def pip_install(extra: str) -> str:
    """The command that adds an extra where this project is installed.

    >>> pip_install("s3")
    "pip install 'hybrid-detection-pipeline[s3]'"
    """
    return f"pip install '{PROJECT}[{extra}]'"
