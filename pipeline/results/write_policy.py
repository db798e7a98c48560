"""Write policy: whether a new run may write to a results folder that has results of other runs.

- The same command writes the same files again. A command is another one if it names other images: if it starts in another folder,
  or reads a manifest with other content.
- A run that would mix its rows with other rows, or double them, is refused. The message names the ways on: `--only-new` adds the
  rows that are missing for this model and these settings, `--replace` removes what batch jobs have written, or another folder.
- A stream adds to its archives, and to the results of batch jobs with the same settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from pipeline.errors import OutputError
from pipeline.records import row_bytes
from pipeline.results.completion import Provenance, RowSettings
from pipeline.results.layout import REPORT, Rows, list_rows, read_summary, run_of_rows, time_in_name
from pipeline.results.other_runs import committed_states, mode_of, runs_at_work
from pipeline.storage.files import exists

RESOLVED_INPUT = "resolved_input"  # a setting that a job adds: its inputs, independent of the current folder
_OF_JOB = ("mode", "input", "dates", "time_zone")
_VERSION = "model.model_version"  # decides on the rows of a batch job; the rows of a stream come from several versions anyway
_SHOWN = 200
_WAYS_ON = "give --only-new to add what they lack, --replace to remove them, or another folder"


def run_name(settings: Mapping[str, Any], started_at: float) -> str:
    """The name in a batch job's files: a hash of its command, with `only_new` followed by its start.

    Args:
      settings: All settings of the job, nested.
      started_at: Seconds since the epoch.
    """
    named = {name: value for name, value in _of_rows(json.loads(row_bytes(settings))).items() if value not in (None, "", [])}
    command = hashlib.blake2b(row_bytes(sorted(named.items())), digest_size=4).hexdigest()
    return f"{command}-{time_in_name(started_at)}" if settings.get("only_new") else command


def same_work(settings: Mapping[str, Any], model: tuple[str, str]) -> str:
    """A hash that two runs share if one can resume the other: they write the same rows, in the same shards."""
    new = json.loads(row_bytes(settings))
    write = new.get("write", {})
    parts = [_of_rows(new), Provenance.of(new, model), new.get("only_new"), new.get("retry_dead"), write.get("shards")]
    return hashlib.blake2b(row_bytes(parts), digest_size=16).hexdigest()


def check_write_policy(output: str, settings: Mapping[str, Any], *, replace: bool = False) -> None:
    """Makes sure that a run with these settings neither deletes results of another kind nor mixes with them.

    Args:
      output: The results folder.
      settings: All settings of the job, nested.
      replace: Whether the user wants earlier results removed.

    Raises:
      OutputError: It would; the message names the difference, and what to do.
    """
    new = json.loads(row_bytes(settings))
    if new.get("only_new"):
        return  # rows have their model and indexes their settings, so nothing is mixed or doubled
    is_stream = new["mode"] == "streaming"
    for other in runs_at_work(output).values():
        if is_stream or other.get("settings", {}).get("only_new") or mode_of(other) == "compact":
            continue  # each adds files of its own, and a compaction changes no row
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
    earlier = [summary["config"]] if summary else [about["settings"] for about in committed_states(output) if "settings" in about]
    if not earlier and (rows.of_batch or exists(f"{output}/{REPORT}")):
        return "whose settings are not known, since its summary.json is missing"
    return next(filter(None, (_difference(old, new, but) for old in earlier)), "")


def _difference(old: Mapping[str, Any], new: Mapping[str, Any], but: Collection[str] = ()) -> str:
    """The first difference between two runs in settings that decide on rows; settings that only one of them has are left out."""
    before, now = _of_rows(old), _of_rows(new)
    for key in before:
        if key in now and key not in but and before[key] != now[key]:
            return f"with {key} {_short(before[key])} where this one has {_short(now[key])}"
    return ""


def _of_rows(settings: Mapping[str, Any]) -> dict[str, Any]:
    model, detect = RowSettings.of(settings)
    of_job = {name: settings[name] for name in _OF_JOB if name in settings}
    if RESOLVED_INPUT in settings:
        of_job["input"] = settings[RESOLVED_INPUT]
    if (fps := settings.get("read", {}).get("fps", 1.0)) != 1.0:  # left out else: names of runs stay those of earlier releases
        of_job["read.fps"] = fps
    if "model_version" in settings.get("model", {}):
        of_job[_VERSION] = settings["model"]["model_version"]
    return of_job | {f"model.{name}": value for name, value in model.items()} | detect


def _short(value: Any) -> str:
    text = row_bytes(value).decode()
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 4]}…{text[-_SHOWN // 2 :]}"  # long paths differ at their ends
