"""What others have left in a results folder, and whether a new run may work there: the rules of the folder.

- A run never deletes, overwrites or hides what another one wrote, unless it is told to by `--replace`.
- The same command gives the same files again, not a second copy: they carry a name that is made of the command. It is another
  command where it names other images: started in another folder, or with a manifest of other content.
- What would mix with other results, or double them, is refused in one line that names the ways on: `--only-new` adds what has no
  row by this model and these settings yet, `--replace` takes the place of what batch jobs have left, another folder has room.
- Streams add to their archives, and to what batch jobs with the same settings have left.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from pipeline.config import OF_RELEASES
from pipeline.errors import OutputError
from pipeline.records import row_bytes
from pipeline.storage.completion import Provenance
from pipeline.storage.files import exists
from pipeline.storage.other_runs import mode_of, settings_at_work, settings_published
from pipeline.storage.results import REPORT, Rows, list_rows, read_summary, run_of_rows, time_in_name

RESOLVED_INPUT = "resolved_input"  # a setting that a job adds: its inputs as they are the same from wherever it is started
_OF_JOB = ("mode", "input", "dates", "time_zone")
# of the detector's settings those that decide which rows come out; precision and reduced decoding change their last digits
_OF_ROWS = ("score_threshold", "iou_threshold", "classes", "max_detections")
_VERSION = "model.model_version"  # of a batch job that decides on its rows; those of a stream come from several anyway
_SHOWN = 200
_WAYS_ON = "give --only-new to add what they lack, --replace to remove them, or another folder"


def run_name(settings: Mapping[str, Any], started_at: float) -> str:
    """The name that the files of a batch job carry: of its command alone, or also of its start where it adds to others.

    Args:
      settings: All settings of the job, nested.
      started_at: Seconds since the epoch.
    """
    named = {name: value for name, value in _of_rows(json.loads(row_bytes(settings))).items() if value not in (None, "", [])}
    command = hashlib.blake2b(row_bytes(sorted(named.items())), digest_size=4).hexdigest()
    return f"{command}-{time_in_name(started_at)}" if settings.get("only_new") else command


def same_work(settings: Mapping[str, Any], model: tuple[str, str]) -> str:
    """What is equal for two runs of which one can go on where the other was killed: they make the same rows, spilled alike."""
    new = json.loads(row_bytes(settings))
    write = new.get("write", {})
    parts = [_of_rows(new), Provenance.of(new, model), new.get("only_new"), new.get("retry_dead"), write.get("shards")]
    return hashlib.blake2b(row_bytes(parts), digest_size=16).hexdigest()


def check_write_policy(output: str, settings: Mapping[str, Any], *, replace: bool = False) -> None:
    """Makes sure that a run with these settings neither wipes results of another kind nor mixes with them.

    Args:
      output: The results folder.
      settings: All settings of the job, nested.
      replace: Whether the user wants earlier results removed.

    Raises:
      OutputError: It would; the message says in what they differ, and what to do.
    """
    new = json.loads(row_bytes(settings))
    if new.get("only_new"):
        return  # rows say their model, and indexes their settings: nothing is mixed up, or doubled
    is_stream = new["mode"] == "streaming"
    for other in settings_at_work(output):
        if is_stream or other.get("settings", {}).get("only_new") or mode_of(other) == "compact":
            continue  # each adds files of its own; and what is compacted goes on as it is
        if difference := _difference(other.get("settings", {}), new):
            raise OutputError(f"output {output}: another job is at work there {difference}; wait for it, or give another folder")
    rows = list_rows(output)
    if is_stream:
        if rows.of_batch and (difference := _earlier_difference(output, new, rows, but=(*_OF_JOB, _VERSION))):
            raise OutputError(f"output {output}: holds the results of a batch job {difference}; give another folder")
    elif rows.of_streams:
        ways = "--only-new to add to it, or another folder"
        what = "compacted rows" if all("-compact" in name for name in rows.of_streams) else "the archive of a stream"
        raise OutputError(f"output {output}: holds {what}, a batch job would double them; give {ways}")
    elif not replace and (difference := _earlier_difference(output, new, rows)):
        raise OutputError(f"output {output}: holds the results of a run {difference}; {_WAYS_ON}")
    elif not replace and {run_of_rows(name) for name in rows.of_batch} - {"", run_name(new, 0)}:
        raise OutputError(f"output {output}: holds the results of several runs; {_WAYS_ON}")


def _earlier_difference(output: str, new: Mapping[str, Any], rows: Rows, but: Collection[str] = ()) -> str:
    summary = read_summary(output)
    earlier = (
        [summary["config"]] if summary else [about["settings"] for about in settings_published(output) if "settings" in about]
    )
    if not earlier and (rows.of_batch or exists(f"{output}/{REPORT}")):
        return "whose settings are not known, since its summary.json is missing"
    return next(filter(None, (_difference(old, new, but) for old in earlier)), "")


def _difference(old: Mapping[str, Any], new: Mapping[str, Any], but: Collection[str] = ()) -> str:
    """In what two runs' settings differ that decide on their rows; what one of them does not name is not compared."""
    before, now = _of_rows(old), _of_rows(new)
    for key in before:
        if key in now and key not in but and before[key] != now[key]:
            return f"with {key} {_short(before[key])} where this one has {_short(now[key])}"
    return ""


def _of_rows(settings: Mapping[str, Any]) -> dict[str, Any]:
    model, detect = settings.get("model", {}), settings.get("detect", {})
    named = {_VERSION: model["model_version"]} if "model_version" in model else {}
    named |= {
        **{f"model.{name}": model[name] for name in model if name not in OF_RELEASES},
        **{name: detect[name] for name in _OF_ROWS if name in detect},
    }
    of_job = {name: settings[name] for name in _OF_JOB if name in settings}
    return of_job | ({"input": settings[RESOLVED_INPUT]} if RESOLVED_INPUT in settings else {}) | named


def _short(value: Any) -> str:
    text = row_bytes(value).decode()
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 4]}…{text[-_SHOWN // 2 :]}"  # long paths differ at their ends
