"""What an earlier run left in a results folder, and whether a new one may take its place.

The same command may: it gives the same files again. A run whose rows would be others may not unless it is told to, for it would
wipe, or mix, what somebody still needs. Until runs add up in one folder, that is refused in one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.errors import OutputError
from pipeline.records import row_bytes
from pipeline.storage.files import exists
from pipeline.storage.results import REPORT, Rows, list_rows, read_summary
from pipeline.storage.staging import settings_at_work, settings_published

_OF_JOB = ("mode", "input", "dates", "time_zone")
# of the detector's settings those that decide which rows come out; precision and reduced decoding change their last digits
_OF_ROWS = ("score_threshold", "iou_threshold", "classes", "max_detections")


def check_earlier(output: str, settings: Mapping[str, Any], *, replace: bool = False) -> None:
    """Makes sure that a run with these settings neither wipes results of another kind nor mixes with them.

    Args:
      output: The results folder.
      settings: All settings of the job, nested.
      replace: Whether the user wants earlier results removed.

    Raises:
      OutputError: It would; the message says in what they differ, and what to do.
    """
    new = json.loads(row_bytes(settings))
    for other in settings_at_work(output):
        if new["mode"] == other["settings"]["mode"] == "streaming":
            continue  # each adds files of its own
        if difference := _difference(other["settings"], new):
            raise OutputError(f"output {output}: another job is at work there {difference}; wait for it, or give another folder")
    rows = list_rows(output)
    if new["mode"] == "streaming":
        if rows.of_batch:
            raise OutputError(f"output {output}: holds the results of a batch job; give another folder to a stream's archive")
        return
    if rows.of_streams:
        raise OutputError(f"output {output}: holds the archive of a stream, a batch job would mix with it; give another folder")
    if not replace and (difference := _earlier_difference(output, new, rows)):
        raise OutputError(f"output {output}: holds the results of a run {difference}; give another folder, or --replace them")


def _earlier_difference(output: str, new: Mapping[str, Any], rows: Rows) -> str:
    summary = read_summary(output)
    earlier = [summary["config"]] if summary else [about["settings"] for about in settings_published(output)]
    if not earlier and (rows.of_batch or exists(f"{output}/{REPORT}")):
        return "whose settings are not known, since its summary.json is missing"
    return next(filter(None, (_difference(old, new) for old in earlier)), "")


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """In what two runs' settings differ that decide on their rows; what one of them does not name is not compared."""
    before, now = _of_rows(old), _of_rows(new)
    for key in before:
        if key in now and before[key] != now[key]:
            return f"with {key} {_short(before[key])} where this one has {_short(now[key])}"
    return ""


def _of_rows(settings: Mapping[str, Any]) -> dict[str, Any]:
    model, detect = settings.get("model", {}), settings.get("detect", {})
    named = {**{f"model.{name}": model[name] for name in model}, **{name: detect[name] for name in _OF_ROWS if name in detect}}
    return {**{name: settings[name] for name in _OF_JOB if name in settings}, **named}


def _short(value: Any) -> str:
    text = row_bytes(value).decode()
    return text if len(text) <= 80 else f"{text[:79]}…"
