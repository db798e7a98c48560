"""Tells a webhook or a command, once, how a job ended."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import FAILED
from pipeline.log_lines import LogLines
from pipeline.secrets import masked_target, masked_text
from pipeline.stats.process import PROCESS
from pipeline.stats.summary import JobStats

_WAITS_S = (0.0, 1.0, 4.0)  # before each try
_TRY_SECONDS = 10.0
_TOLD = (ValueError, FileNotFoundError, PermissionError)  # texts of others may have the whole URL or command


@contextlib.contextmanager
def notifying(where: str, lines: LogLines) -> Iterator[dict[str, Any]]:
    """Notifies when the block has ended, however it did; yields the outcome, to which the block adds `exit_code`."""
    outcome: dict[str, Any] = {"exit_code": FAILED}
    stats = JobStats()
    PROCESS.summary = {}
    PROCESS.begin_counting(stats)
    try:
        yield outcome
    finally:
        PROCESS.end_counting(stats)
        images = {"read": stats.read, "detected": stats.detected, "dead": stats.failed, "skipped": stats.skipped}
        notify(where, {"images": images, **PROCESS.summary, **outcome, "error": lines.last_error})


def notify(where: str, outcome: Mapping[str, Any]) -> None:
    """Sends the outcome as JSON, in three tries; a failure is one warning and never an exception.

    Args:
      where: A webhook's http or https URL, which gets a POST and is not followed to any other place, or a command, which gets
        standard input.
      outcome: What to send.
    """
    content, why = json.dumps(outcome, default=str).encode(), ""
    for wait_s in _WAITS_S:
        time.sleep(wait_s)
        try:
            _post(where, content) if _is_url(where) else _run(where, content)
            return
        except Exception as err:  # noqa: BLE001  the job's exit code does not depend on it
            why = str(err) if type(err) in _TOLD else type(err).__name__
    print(f"warning: notification failed: {masked_target(where)}: {masked_text(' '.join(why.split()))[:200]}", file=sys.stderr)


def _is_url(where: str) -> bool:
    return where.lower().startswith(("http://", "https://"))


def _post(url: str, content: bytes) -> None:
    import requests

    headers = {"Content-Type": "application/json"}
    with requests.post(url, content, headers=headers, timeout=_TRY_SECONDS, allow_redirects=False, stream=True) as answer:
        if not 200 <= answer.status_code < 300:
            raise ValueError(f"it answered with status {answer.status_code}")


def _run(command: str, content: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # it need not read all
        done = subprocess.run(  # noqa: S603  the user's own command
            shlex.split(command), check=False, input=content, capture_output=True, timeout=_TRY_SECONDS, start_new_session=True
        )
        if done.returncode:
            raise ValueError(f"it ended with exit code {done.returncode}: {done.stderr.decode(errors='replace')}")
