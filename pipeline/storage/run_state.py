"""What a run says of itself in its staging folder: `run.json`, and what it publishes; checked when it is read."""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, TypedDict

from pipeline.data_format import from_plain
from pipeline.storage.files import list_files
from pipeline.storage.globs import escape_glob
from pipeline.storage.results import STAGING, Settings, is_replaceable
from pipeline.storage.state import lies_in, read_checked, read_state, warn_unreadable

RUN = "run.json"
DETACHED = "left"  # what a run says of itself that goes on without a launcher
_RUN_ID = re.compile(r"[0-9a-f]{8,12}")  # `new_staging` and the launcher of a stream give such names
_ENTRY = re.compile(
    r"(run|ready|commit|published)\.json|stopped|written|lock(\.new)?|alive|spill|merge|figures|compact|detections|dead_letters"
    r"|begun-.*|[0-9a-f]{32}|\.staging-[0-9a-f]{12}"
)
_LATEST_TIME = 4e9  # the year 2096
_Time = Annotated[float, lambda seconds: 0 <= seconds < _LATEST_TIME]


class DetachedJob(NamedTuple):
    """A run without a launcher.

    Attributes:
      job: Its runner's name for it.
      started_at: When its command started, seconds since the epoch.
      submitted_at: When the runner had it.
    """

    job: str
    started_at: _Time
    submitted_at: _Time


class _About(TypedDict, total=False):
    settings: Settings
    command: str
    started_at: _Time
    same: str
    left: DetachedJob


class Commit(NamedTuple):
    """What is published.

    Attributes:
      names: Files of the staging folder, each with the name that it gets; both in the output folder.
      gone: The files that go for them, with their generations.
      adds: Whether the run adds to what is there, for where `run.json` cannot be read.
    """

    names: list[tuple[str, str]]
    gone: dict[str, str]
    adds: bool = False


def about(staging: str) -> Iterator[dict[str, Any]]:
    """What a run says of itself, if it has said so."""
    told = read_state(f"{staging}/{RUN}", _About)
    if told is not None:
        yield told


def is_own_staging(staging: str) -> bool:
    """Whether this program made a staging folder: its `run.json` says so, or its name and all that lies in it."""
    if "settings" in next(about(staging), {}):
        return True
    paths = list_files(f"{escape_glob(staging)}/**") if "://" in staging else map(f"{staging}/".__add__, os.listdir(staging))
    names = {path[len(staging) + 1 :].partition("/")[0] for path in paths}
    return bool(_RUN_ID.fullmatch(posixpath.basename(staging).removeprefix(STAGING))) and all(map(_ENTRY.fullmatch, names))


def read_commit(staging: str, name: str) -> Commit | None:
    """What a run publishes, by its own file; None where there is none, or it names what is not its own to move or to delete."""
    told: Commit | None = read_checked(f"{staging}/{name}", _parse_commit)
    if told is None:
        return None
    output = posixpath.dirname(staging)
    own = all(lies_in(f"{output}/{staged}", staging) for staged, _ in told.names)
    if own and all(is_replaceable(name, output) for name in (*(final for _, final in told.names), *told.gone)):
        return told
    warn_unreadable(f"{staging}/{name}", "it names files that are not this run's")
    return None


def _parse_commit(content: bytes) -> Commit:
    plain = json.loads(content)
    if isinstance(plain, list):  # versions before this one wrote the names alone
        plain = {"names": plain, "gone": {}}
    commit: Commit = from_plain(Commit, plain)
    return commit
