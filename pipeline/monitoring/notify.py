"""Tells the outside how a job ended, however it did: a webhook, and a file from which Prometheus scrapes the last run."""

from __future__ import annotations

import functools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline.config import MonitoringConfig
from pipeline.errors import DONE, FAILED, OutputError
from pipeline.log_lines import LineHandler, console
from pipeline.process import PROCESS
from pipeline.stats.counted import COUNTED
from pipeline.stats.job_stats import JobStats
from pipeline.storage.files import file_to_write, write_file

_WAITS_S = (0.0, 1.0, 4.0)  # before each try
_TRY_SECONDS = 10.0
_LAST_RUN = {  # the metrics of the file, with their help
    "detection_last_run_timestamp_seconds": "when the last run of a batch job ended",
    "detection_last_success_timestamp_seconds": "when a run last ended with exit code 0 and was not skipped; 0: never",
    "detection_last_exit_code": "the exit code of the last run",
    "detection_last_dead_share": "share of the images that have only a dead letter, of all images of the last run's input",
    "detection_last_duration_seconds": "how long the last run took",
}
_SUCCESS = "detection_last_success_timestamp_seconds"


def notifying(monitoring: MonitoringConfig, log: LineHandler, work: Callable[[], int]) -> int:
    """Runs the work of a job and tells of its end, also where the watchdog ends the process; returns its exit code."""
    code, began = FAILED, time.time()
    COUNTED.summary = {}
    with COUNTED.counting() as stats:
        tell = functools.partial(_tell, monitoring, stats, began)
        PROCESS.before_exit = tell
        try:
            code = work()
            return code
        finally:
            PROCESS.before_exit = None
            tell(code, log.last_error)


def _tell(monitoring: MonitoringConfig, stats: JobStats, began: float, code: int, error: str) -> None:
    if monitoring.metrics_file:
        try:
            _write_last_run(monitoring.metrics_file, stats, began, code)
        except OutputError:  # the command has been refused for it
            pass
        except Exception as err:  # noqa: BLE001  the job's exit code does not depend on it
            console.warning("metrics_file %s: cannot be written: %s", monitoring.metrics_file, err)
    if url := monitoring.notify.get_secret_value():
        images = {"read": stats.read, "detected": stats.detected, "dead": stats.failed, "skipped": stats.skipped}
        notify(url, {"images": images, **COUNTED.summary, "exit_code": code, "error": error})


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


def _write_last_run(path: str, stats: JobStats, began: float, code: int) -> None:
    """Writes the file, as a whole; of the one before it keeps the last success, unless this run is one.

    A skipped run has no summary, and is no success: the run that it made room for may be stuck.
    """
    behind = file_to_write("--metrics-file", path)
    now, is_success = time.time(), code == DONE and bool(COUNTED.summary)
    images, done, dead = COUNTED.summary.get("images", {}), COUNTED.summary.get("done_before", 0), stats.failed
    known = images.get("detected", stats.detected) + images.get("dead", dead) + done
    share = (images.get("dead", dead) + COUNTED.summary.get("dead_before", 0)) / max(known, 1)
    values = (now, now if is_success else _last_success(behind), code, share, now - began)
    schedule = re.sub(r'[\\"\n]', "_", os.path.basename(path).removesuffix(".prom"))
    lines = _lines(dict(zip(_LAST_RUN, values, strict=True)), schedule)
    write_file(behind, "".join(lines).encode())


def _lines(values: Mapping[str, float], schedule: str) -> Iterator[str]:
    for name, value in values.items():
        yield f'# HELP {name} {_LAST_RUN[name]}\n# TYPE {name} gauge\n{name}{{schedule="{schedule}"}} {value:.16g}\n'


def _last_success(path: str) -> float:
    """When a run last succeeded, as the file of an earlier run has it; 0 where there is none."""
    if not os.path.exists(path):
        return 0.0
    with open(path, encoding="utf-8", errors="replace") as file:
        found = re.search(rf"^{_SUCCESS}\{{.*\}} ([\d.e+]+)$", file.read(), re.MULTILINE)
    return float(found[1]) if found else 0.0
