"""resume points of a run in one process: what it has spilled, so that the same command goes on from there after a kill.

    .staging-<run>/spill/<id>.resume              spills of rows, and at the end which they are and what was counted of them
    .staging-<run>/begun-<killed run>/<id>.resume the same of a killed run of the same command, taken over

A resume point is one file, or one object, and counts once it is complete: what was cut short lacks its end.

To take over, on a local disk, is to rename the folder, in one step, from a run whose process is known to have ended, into one
that is held: so no two runs ever have it, and one that is killed in between leaves it where the next one looks. On object storage
all objects are copied before the first is removed, by who holds the lease of the images; a run that is killed in between leaves a
part of them a second time, so of several killed runs the one counts that has the most.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import posixpath
import struct
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from apache_beam.io.filesystems import FileSystems

from pipeline.data_format import DataError, pack, unpack
from pipeline.storage.files import list_files, open_part, sync
from pipeline.storage.globs import escape_glob
from pipeline.storage.spill_files import KeyedSpills, SpillFile
from pipeline.storage.state import is_own_file, lies_in, warn_unreadable

SPOOLS = "spill"
CHECKPOINT = ".resume"
_BEGUN = "begun-"
_END = struct.Struct(">Q8s")  # size of what is told of the spills, and a mark
_COMPLETE = b"complete"

_Key = TypeVar("_Key")
_Counted = TypeVar("_Counted")


@dataclasses.dataclass(frozen=True)
class ResumePoint(Generic[_Key, _Counted]):
    """What a run had done.

    Attributes:
      spills: Complete spills, each with what it is a part of.
      counted: What was counted of their rows.
    """

    spills: Sequence[tuple[_Key, SpillFile]]
    counted: _Counted


def footer_of(resume_point: ResumePoint[Any, Any]) -> bytes:
    """What makes a file of spills a resume point, at its end."""
    told = pack(resume_point)
    return told + _END.pack(len(told), _COMPLETE)


def take_over(killed: Sequence[str], staging: str) -> None:
    """Takes over what killed runs of the same command have left, and what these had taken over; their folders go afterwards."""
    if "://" not in staging:
        for each in killed:
            for folder in (f"{each}/{SPOOLS}", *glob.glob(f"{glob.escape(each)}/{_BEGUN}*")):
                if os.path.isdir(folder) and lies_in(folder, each):
                    taken = f"{staging}/{_begun_name(each, folder)}"
                    os.rename(folder, f"{taken}-{uuid.uuid4().hex[:8]}" if os.path.lexists(taken) else taken)
        sync([staging])
        return
    most = max(killed, key=rows_in, default="")
    paths = [path for pattern in _patterns(most) for path in list_files(pattern)] if most else []
    copies = [f"{staging}/{_begun_name(most, posixpath.dirname(path))}/{posixpath.basename(path)}" for path in paths]
    if paths:
        FileSystems.copy(paths, copies)


def resume_points_of(staging: str, kind: Any = ResumePoint) -> Iterator[ResumePoint[Any, Any]]:
    """What the killed runs had done that this one has taken over.

    Args:
      staging: This run's folder.
      kind: `ResumePoint` with the types of what it holds (see `data_format`); one that holds others does not count.
    """
    return _read_all(f"{escape_glob(staging)}/{_BEGUN}*/*{CHECKPOINT}", staging, kind)


def rows_in(staging: str) -> int:
    """How many rows are in a run's checkpoints, its own and those that it took over."""
    checkpoints = [resume_point for pattern in _patterns(staging) for resume_point in _read_all(pattern, staging)]
    return sum(spill.lines for resume_point in checkpoints for _, spill in resume_point.spills)


def _patterns(staging: str) -> list[str]:
    return [f"{escape_glob(staging)}/{folder}/*{CHECKPOINT}" for folder in (SPOOLS, f"{_BEGUN}*")]


def _begun_name(killed: str, folder: str) -> str:
    name = posixpath.basename(folder)
    return f"{_BEGUN}{posixpath.basename(killed).lstrip('.')}" if name == SPOOLS else name


def _read_all(pattern: str, staging: str, kind: Any = ResumePoint) -> Iterator[ResumePoint[Any, Any]]:
    for entry in sorted(FileSystems.match([pattern])[0].metadata_list, key=lambda entry: entry.path):
        if is_own_file(entry.path) and lies_in(entry.path, staging) and (read := _read(entry.path, entry.size_in_bytes, kind)):
            yield read


def _read(path: str, size_bytes: int, kind: Any) -> ResumePoint[Any, Any] | None:
    """A checkpoint; None where it was cut short, or is none of this version."""
    rest = size_bytes - _END.size
    if rest < 0:
        return None
    with open_part(path, rest, _END.size) as end:
        told_bytes, mark = _END.unpack(end.read())
    if mark != _COMPLETE or told_bytes > rest:
        return None
    with open_part(path, rest - told_bytes, told_bytes) as told:
        try:
            resume_point: ResumePoint[Any, Any] = unpack(kind, told.read())
            return dataclasses.replace(resume_point, spills=tuple(_moved(resume_point.spills, path, rest - told_bytes)))
        except DataError as err:
            warn_unreadable(path, str(err))
            return None


def _moved(spills: KeyedSpills, path: str, most_bytes: int) -> Iterator[tuple[Any, SpillFile]]:
    """The spills where they are now: in this file, whatever path they name."""
    for key, spill in spills:
        if not 0 <= spill.start <= spill.start + spill.size_bytes <= most_bytes or spill.lines < 0:
            raise DataError(f"{spill} is no part of it")
        yield key, spill._replace(path=path)
