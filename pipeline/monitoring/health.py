"""The health checks of a job, `/livez` and `/readyz`: 200 if all pass, else 503; one line a check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.monitoring.http_server import Answer
from pipeline.secrets import masked_text
from pipeline.stats.job_stats import JobStats
from pipeline.stats.process import PROCESS

_STUCK_SECONDS = 600.0  # where the watchdog is off


class Check(NamedTuple):
    """The outcome of one check.

    Attributes:
      name: What was checked.
      passes: Whether it is well.
      text: What was found, in one line.
    """

    name: str
    passes: bool
    text: str


def liveness(stuck_after_s: float) -> list[Check]:
    """Whether no thread of the run has died, and no part is stuck. If not, only a restart helps."""
    limit = stuck_after_s or _STUCK_SECONDS
    died = "; ".join(f"{name}: {error}" for name, error in PROCESS.died.items())
    parts = [
        Check(name, part.stalled_s < limit, f"{part.waiting} waiting, {part.stalled_s:.0f} s without progress")
        for name, part in PROCESS.parts.items()
    ]
    return [Check("threads", not died, died or "all work"), *parts]


def readiness(stats: JobStats) -> list[Check]:
    """Whether the model is warm, here or on a worker, and Pub/Sub and storage answered the last calls."""
    warm = bool(stats.batch_sizes)
    services = [
        Check(name, name not in PROCESS.failing, PROCESS.failing.get(name, "answers"))
        for name in ("Pub/Sub", "storage", "archive")
    ]
    return [Check("model", warm, "warm" if warm else PROCESS.waiting_for or "not loaded yet"), *services]


def answer(checks: Sequence[Check]) -> Answer:
    """The page with the outcome of these checks."""
    lines = [
        f"{'ok' if check.passes else 'FAILED'} {check.name}: {' '.join(masked_text(check.text).split())}\n" for check in checks
    ]
    return Answer("".join(lines).encode(), 200 if all(check.passes for check in checks) else 503)
