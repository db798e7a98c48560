"""Runs that go on without a launcher: what the next one must know to find their figures, and to sum them up.

The staging folder stays where it is, since workers tell their figures there. Others remove it when nothing in it has changed for
a week.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.storage.staging import LEFT, about, introduce, others


class Left(NamedTuple):
    """A run without a launcher.

    Attributes:
      job: Its runner's name for it.
      started_at: When its command started, seconds since the epoch.
      submitted_at: When the runner had it.
    """

    job: str
    started_at: float
    submitted_at: float


def leave(staging: str, settings: Mapping[str, Any], left: Left) -> None:
    """Leaves a run to itself; its folder is kept for whoever comes back to it."""
    introduce(staging, {"settings": settings, LEFT: left})


def found_again(output: str, job: str) -> tuple[str, Left] | None:
    """The staging folder of a job that was left, and what is known of it; None where nobody has left such a job here."""
    for staging in others(output) if job else ():
        for said in about(staging):
            left = Left(*said.get(LEFT, ("", 0.0, 0.0)))
            if left.job == job:
                return staging, left
    return None
