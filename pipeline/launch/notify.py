"""Tells a webhook, once, how a job ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.errors import FAILED
from pipeline.log_lines import LineHandler, console
from pipeline.stats.process import PROCESS

_WAITS_S = (0.0, 1.0, 4.0)  # before each try
_TRY_SECONDS = 10.0


def notifying(url: str, log: LineHandler, work: Callable[[], int]) -> int:
    """Runs the work of a job and notifies when it has ended, however it did; returns its exit code."""
    code = FAILED
    PROCESS.summary = {}
    with PROCESS.counting() as stats:
        try:
            code = work()
            return code
        finally:
            images = {"read": stats.read, "detected": stats.detected, "dead": stats.failed, "skipped": stats.skipped}
            notify(url, {"images": images, **PROCESS.summary, "exit_code": code, "error": log.last_error})


def notify(url: str, outcome: Mapping[str, Any]) -> None:
    """Posts the outcome as JSON, in three tries, and follows no redirect; a failure is one warning and never an exception."""
    import requests

    content, headers, why = json.dumps(outcome, default=str).encode(), {"Content-Type": "application/json"}, ""
    for wait_s in _WAITS_S:
        time.sleep(wait_s)
        try:
            with requests.post(url, content, headers=headers, timeout=_TRY_SECONDS, allow_redirects=False, stream=True) as answer:
                if 200 <= answer.status_code < 300:
                    return
                why = f"it answered with status {answer.status_code}"
        except Exception as err:  # noqa: BLE001  the job's exit code does not depend on it
            why = type(err).__name__  # its text may have the whole URL
    console.warning("notification failed: %s", why)
