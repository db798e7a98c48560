"""The health checks of a job, `/livez` and `/readyz`: 200 if all pass, else 503; one line a check.

They show no error: whoever reaches the port may read them, and an error of storage names an image. The log has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.monitoring.http_server import Answer
from pipeline.process import PROCESS
from pipeline.stats.job_stats import JobStats

_STUCK_SECONDS = 600.0  # where the watchdog is off
Check = tuple[str, bool, str]  # what was checked, whether it is well, and what was found in one line


def liveness(stuck_after_s: float) -> list[Check]:
    """Whether no thread of the run has died, and no part is stuck. If not, only a restart helps."""
    limit = stuck_after_s or _STUCK_SECONDS
    parts = [
        (name, part.stalled_s < limit, f"{part.waiting} waiting, {part.stalled_s:.0f} s without progress")
        for name, part in PROCESS.parts.items()
    ]
    died = ", ".join(sorted(PROCESS.died))
    return [("threads", not died, f"{died} failed, as the log shows" if died else "all work"), *parts]


def readiness(stats: JobStats) -> list[Check]:
    """Whether the model is warm, here or on a worker, and Pub/Sub and storage answered the last calls."""
    warm = bool(stats.batch_sizes)
    services = [
        (name, is_well, "answers" if is_well else "the last call failed, as the log shows")
        for name in ("Pub/Sub", "storage", "archive")
        for is_well in [name not in PROCESS.failing]
    ]
    return [("model", warm, "warm" if warm else PROCESS.waiting_for or "not loaded yet"), *services]


def answer(checks: Sequence[Check]) -> Answer:
    """The page with the outcome of these checks."""
    lines = [f"{'ok' if well else 'FAILED'} {name}: {text}\n" for name, well, text in checks]
    return Answer("".join(lines).encode(), 200 if all(well for _, well, _ in checks) else 503)
