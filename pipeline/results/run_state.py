"""The state file of a run, `run.json`: its type, and the checks at each read."""

from __future__ import annotations

import os
import posixpath
import re
from typing import Annotated, NamedTuple, TypedDict

from pipeline.results.layout import STAGING, Settings, is_replaceable
from pipeline.storage.files import list_files
from pipeline.storage.globs import escape_glob
from pipeline.storage.state import lies_in, read_state, warn_unreadable

RUN = "run.json"
STATES = RUNNING, DETACHED, COMMITTED, DONE, STOPPED = ("running", "detached", "committed", "done", "stopped")
_RUN_ID = re.compile(r"[0-9a-f]{8,12}")  # `Run.new` and the launcher of a stream give such names
_ENTRY = re.compile(
    r"run\.json|written|lock(\.new)?|spill|merge|figures|compact|detections|dead_letters"
    r"|archive|resumed-.*|[0-9a-f]{32}|\.staging-[0-9a-f]{12}"
)
_REPAIR = "; if the run was committing, its command repairs the results when it runs again"
_LATEST_TIME = 4e9  # the year 2096
_Time = Annotated[float, lambda seconds: 0 <= seconds < _LATEST_TIME]


class DetachedJob(NamedTuple):
    """A detached run.

    Attributes:
      job: Its runner's name for it.
      started_at: When its command started, seconds since the epoch.
      submitted_at: When the runner had it.
    """

    job: str
    started_at: _Time
    submitted_at: _Time


class Commit(NamedTuple):
    """What a run commits.

    Attributes:
      names: Files of the run's folder, each with the name that it gets; both relative to the results folder.
      gone: The files that make way for them, with their generations.
    """

    names: list[tuple[str, str]]
    gone: dict[str, str]


class _State(TypedDict):
    state: Annotated[str, STATES.__contains__]


class State(_State, total=False):
    """The content of `run.json`."""

    settings: Settings
    command: str
    started_at: _Time
    same: str
    detached: DetachedJob
    commit: Commit


def read_run(folder: str) -> State:
    """The state of the run with this folder; empty where there is none, or it names files that are not the run's."""
    state: State | None = read_state(f"{folder}/{RUN}", State, _REPAIR)
    if state is None:
        return {}  # type: ignore[typeddict-item]
    if state["state"] not in (COMMITTED, DONE) or ("commit" in state and _is_own(state["commit"], folder)):
        return state
    warn_unreadable(f"{folder}/{RUN}", f"expected a commit of this run's own files{_REPAIR}")
    return {}  # type: ignore[typeddict-item]


def _is_own(commit: Commit, folder: str) -> bool:
    output = posixpath.dirname(folder)
    own = all(lies_in(f"{output}/{staged}", folder) for staged, _ in commit.names)
    return own and all(is_replaceable(name, output) for name in (*(final for _, final in commit.names), *commit.gone))


def is_own_folder(folder: str) -> bool:
    """Whether this program made a folder of unfinished files: by its `run.json`, or by its name and all that lies in it."""
    if "settings" in read_run(folder):
        return True
    paths = list_files(f"{escape_glob(folder)}/**") if "://" in folder else map(f"{folder}/".__add__, os.listdir(folder))
    names = {path[len(folder) + 1 :].partition("/")[0] for path in paths}
    return bool(_RUN_ID.fullmatch(posixpath.basename(folder).removeprefix(STAGING))) and all(map(_ENTRY.fullmatch, names))
