"""Checkpoints of a run in one process: what it has spooled, so that the same command goes on from there after a kill.

    .staging-<run>/spool/<id>.checkpoint              spools of rows, and at the end which they are and what was counted of them
    .staging-<run>/begun-<killed run>/<id>.checkpoint the same of a killed run of the same command, taken over

A checkpoint is one file, or one object, and counts once it is complete: what was cut short lacks its end.

To take over, on a local disk, is to rename the folder, in one step, from a run whose process is known to have ended, into one
that is held: so no two runs ever have it, and one that is killed in between leaves it where the next one looks. On object storage
all objects are copied before the first is removed, by who holds the lease of the images; a run that is killed in between leaves a
part of them a second time, so of several killed runs the one counts that has the most.
"""

from __future__ import annotations

import glob
import os
import pickle
import posixpath
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from apache_beam.io.filesystems import FileSystems

from pipeline.storage.files import list_files, open_part, sync
from pipeline.storage.globs import escape_glob
from pipeline.storage.spools import KeyedSpools, Spool

SPOOLS = "spool"
CHECKPOINT = ".checkpoint"
_BEGUN = "begun-"
_END = struct.Struct(">Q8s")  # size of what is told of the spools, and a mark
_COMPLETE = b"complete"


class Checkpoint(NamedTuple):
    """What a run had done.

    Attributes:
      spools: Complete spools, each with what it is a part of.
      counted: What was counted of their rows.
    """

    spools: KeyedSpools
    counted: Any


def footer_of(checkpoint: Checkpoint) -> bytes:
    """What makes a file of spools a checkpoint, at its end."""
    told = pickle.dumps(checkpoint)
    return told + _END.pack(len(told), _COMPLETE)


def take_over(killed: Sequence[str], staging: str) -> None:
    """Takes over what killed runs of the same command have left, and what these had taken over; their folders go afterwards."""
    if "://" not in staging:
        for each in killed:
            for folder in (f"{each}/{SPOOLS}", *glob.glob(f"{glob.escape(each)}/{_BEGUN}*")):
                if os.path.isdir(folder):
                    os.rename(folder, f"{staging}/{_begun_name(each, folder)}")
        sync([staging])
        return
    most = max(killed, key=rows_in, default="")
    paths = [path for pattern in _patterns(most) for path in list_files(pattern)] if most else []
    copies = [f"{staging}/{_begun_name(most, posixpath.dirname(path))}/{posixpath.basename(path)}" for path in paths]
    if paths:
        FileSystems.copy(paths, copies)


def checkpoints_begun(staging: str) -> Iterator[Checkpoint]:
    """What the killed runs had done that this one has taken over."""
    return _read_all(f"{escape_glob(staging)}/{_BEGUN}*/*{CHECKPOINT}")


def rows_in(staging: str) -> int:
    """How many rows are in a run's checkpoints, its own and those that it took over."""
    checkpoints = [checkpoint for pattern in _patterns(staging) for checkpoint in _read_all(pattern)]
    return sum(spool.lines for checkpoint in checkpoints for _, spool in checkpoint.spools)


def _patterns(staging: str) -> list[str]:
    return [f"{escape_glob(staging)}/{folder}/*{CHECKPOINT}" for folder in (SPOOLS, f"{_BEGUN}*")]


def _begun_name(killed: str, folder: str) -> str:
    name = posixpath.basename(folder)
    return f"{_BEGUN}{posixpath.basename(killed).lstrip('.')}" if name == SPOOLS else name


def _read_all(pattern: str) -> Iterator[Checkpoint]:
    for entry in sorted(FileSystems.match([pattern])[0].metadata_list, key=lambda entry: entry.path):
        if checkpoint := _read(entry.path, entry.size_in_bytes):
            yield checkpoint


def _read(path: str, size_bytes: int) -> Checkpoint | None:
    """A checkpoint; None where it was cut short, or another version of this program wrote it."""
    rest = size_bytes - _END.size
    if rest < 0:
        return None
    with open_part(path, rest, _END.size) as end:
        told_bytes, mark = _END.unpack(end.read())
    if mark != _COMPLETE:
        return None
    try:
        with open_part(path, rest - told_bytes, told_bytes) as told:
            checkpoint: Checkpoint = pickle.load(told)  # noqa: S301  written by a run of this very command
    except (AttributeError, ImportError, TypeError, pickle.UnpicklingError):
        return None
    return checkpoint._replace(spools=tuple(_moved(checkpoint.spools, path)))


def _moved(spools: KeyedSpools, path: str) -> Iterable[tuple[Any, Spool]]:
    return ((key, spool._replace(path=path)) for key, spool in spools)
