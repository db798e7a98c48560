"""The versions in which launcher and workers must agree: Beam refuses another Python, and steps are pickled by the others."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from typing import NamedTuple

from models.base.project import PROJECT

_SECONDS = 20.0


class Software(NamedTuple):
    """Versions of a process or of an image; empty where they are not known.

    Attributes:
      python: Python's minor version, `3.11`.
      beam: Beam's version.
      project: This project's version.
    """

    python: str
    beam: str
    project: str = ""

    def __str__(self) -> str:
        known = {"Python": self.python, "Beam": self.beam, "detect-objects": self.project}
        return ", ".join(f"{name} {version}" for name, version in known.items() if version)

    def fits(self, other: Software) -> bool:
        """Whether no known version differs."""
        return all(one == another or not (one and another) for one, another in zip(self, other, strict=True))


OF_DOCKERFILE = Software("3.11", "2.77.0")  # the defaults of deploy/Dockerfile


def version_of(package: str) -> str:
    """The version of an installed package; empty where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def here() -> Software:
    """The versions of this process."""
    return Software(".".join(map(str, sys.version_info[:2])), version_of("apache-beam"), version_of(PROJECT))


def of_image(image: str) -> Software | None:
    """The versions that the labels of an image of deploy/Dockerfile have; None where Docker does not have the image here."""
    if not shutil.which("docker"):
        return None
    command = ["docker", "image", "inspect", "--format", "{{json .Config.Labels}}", image]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)  # noqa: S603
        labels = json.loads(done.stdout) or {}
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    found = Software(labels.get("detect-objects.python", ""), labels.get("detect-objects.beam", ""))
    return found if any(found) else None
