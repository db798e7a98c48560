"""Resume points of a run in one process: the same command resumes from them after a kill.

    .staging-<run>/spill/<id>.resume              spill files of rows, followed by a footer: their places, and the statistics
    .staging-<run>/resumed-<killed run>/<id>.resume the same, taken over from a killed run of the same command

A resume point is one file or object. It counts once it is complete; a file that was cut short has no footer.

A run takes over resume points on a local disk by one rename of their folder, from a run whose process has ended into a folder
that is held. So no two runs ever have them, and the next run finds them after a kill. On object storage the run, which
has the lease of the images, copies all objects before the killed run's folder is removed. A kill in between leaves some objects
twice, so of several killed runs only the one with the most rows counts.
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

SPILLS = "spill"
CHECKPOINT = ".resume"
_RESUMED = "resumed-"
_END = struct.Struct(">Q8s")  # size of the footer, and a mark
_COMPLETE = b"complete"

_Key = TypeVar("_Key")
_Counted = TypeVar("_Counted")


@dataclasses.dataclass(frozen=True)
class ResumePoint(Generic[_Key, _Counted]):
    """The work that a run had done.

    Attributes:
      spills: Complete spill files, each with the key of its part.
      counted: The statistics of their rows.
    """

    spills: Sequence[tuple[_Key, SpillFile]]
    counted: _Counted


def footer_of(resume_point: ResumePoint[Any, Any]) -> bytes:
    """The footer that makes a file of spills a resume point."""
    footer = pack(resume_point)
    return footer + _END.pack(len(footer), _COMPLETE)


def take_over(killed: Sequence[str], staging: str) -> None:
    """Takes over the resume points of killed runs of one command, with those that these had taken over."""
    if "://" not in staging:
        for each in killed:
            for folder in (f"{each}/{SPILLS}", *glob.glob(f"{glob.escape(each)}/{_RESUMED}*")):
                if os.path.isdir(folder) and lies_in(folder, each):
                    taken = f"{staging}/{_resumed_name(each, folder)}"
                    os.rename(folder, f"{taken}-{uuid.uuid4().hex[:8]}" if os.path.lexists(taken) else taken)
        sync([staging])
        return
    most = max(killed, key=rows_in, default="")
    paths = [path for pattern in _patterns(most) for path in list_files(pattern)] if most else []
    copies = [f"{staging}/{_resumed_name(most, posixpath.dirname(path))}/{posixpath.basename(path)}" for path in paths]
    if paths:
        FileSystems.copy(paths, copies)


def resume_points_of(staging: str, kind: Any = ResumePoint) -> Iterator[ResumePoint[Any, Any]]:
    """The resume points that this run has taken over.

    Args:
      staging: This run's folder.
      kind: `ResumePoint` with the types of its content (see `data_format`); one with other content does not count.
    """
    return _read_all(f"{escape_glob(staging)}/{_RESUMED}*/*{CHECKPOINT}", staging, kind)


def rows_in(staging: str) -> int:
    """How many rows the resume points in a run's folder have, its own and those that it took over."""
    points = [resume_point for pattern in _patterns(staging) for resume_point in _read_all(pattern, staging)]
    return sum(spill.lines for resume_point in points for _, spill in resume_point.spills)


def _patterns(staging: str) -> list[str]:
    return [f"{escape_glob(staging)}/{folder}/*{CHECKPOINT}" for folder in (SPILLS, f"{_RESUMED}*")]


def _resumed_name(killed: str, folder: str) -> str:
    name = posixpath.basename(folder)
    return f"{_RESUMED}{posixpath.basename(killed).lstrip('.')}" if name == SPILLS else name


def _read_all(pattern: str, staging: str, kind: Any = ResumePoint) -> Iterator[ResumePoint[Any, Any]]:
    for entry in sorted(FileSystems.match([pattern])[0].metadata_list, key=lambda entry: entry.path):
        if is_own_file(entry.path) and lies_in(entry.path, staging) and (read := _read(entry.path, entry.size_in_bytes, kind)):
            yield read


def _read(path: str, size_bytes: int, kind: Any) -> ResumePoint[Any, Any] | None:
    """A resume point; None if it was cut short, or is none of this version."""
    rest = size_bytes - _END.size
    if rest < 0:
        return None
    with open_part(path, rest, _END.size) as end:
        footer_bytes, mark = _END.unpack(end.read())
    if mark != _COMPLETE or footer_bytes > rest:
        return None
    with open_part(path, rest - footer_bytes, footer_bytes) as footer:
        try:
            resume_point: ResumePoint[Any, Any] = unpack(kind, footer.read())
            return dataclasses.replace(resume_point, spills=tuple(_moved(resume_point.spills, path, rest - footer_bytes)))
        except DataError as err:
            warn_unreadable(path, str(err))
            return None


def _moved(spills: KeyedSpills, path: str, most_bytes: int) -> Iterator[tuple[Any, SpillFile]]:
    """The spill files at their present place: in this file, whatever path they name."""
    for key, spill in spills:
        if not 0 <= spill.start <= spill.start + spill.size_bytes <= most_bytes or spill.lines < 0:
            raise DataError(f"{spill} is no part of it")
        yield key, spill._replace(path=path)
