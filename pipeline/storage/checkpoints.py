"""Checkpoints of a run on one machine: what it has spooled, so that the same command goes on from there after a kill.

    .staging-<run>/spool/<id>              a spool of rows
    .staging-<run>/spool/<id>.checkpoint   which spools are complete, and what was counted until then
    .staging-<run>/begun-<killed run>/     the same of a killed run of the same command, taken over

A checkpoint is written when its spools are complete, and counts as soon as it has its name; spools that are in none do not count.
To take over is to rename the folder, in one step, from a run whose process is known to have ended, into one that is held: so no
two runs ever have it, and one that is killed in between leaves it where the next one looks. Local folders only: object storage
has neither locks nor such a step.
"""

from __future__ import annotations

import glob
import os
import pickle
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pipeline.storage.files import read_file, write_file
from pipeline.storage.spools import Spool

SPOOLS = "spool"
_ENDING = ".checkpoint"
_BEGUN = "begun-"


class Checkpoint(NamedTuple):
    """What a run had done.

    Attributes:
      spools: Complete spools, each with what it is a part of.
      counted: What was counted of their rows.
    """

    spools: tuple[tuple[Any, Spool], ...]
    counted: Any


def write_checkpoint(staging: str, checkpoint: Checkpoint) -> None:
    """Makes a checkpoint of spools that lie in a run's folder of spools."""
    write_file(f"{staging}/{SPOOLS}/{uuid.uuid4().hex}{_ENDING}", pickle.dumps(checkpoint))


def take_over(killed: str, staging: str) -> None:
    """Takes over what a killed run of the same command has left, and what that had taken over."""
    for folder in (f"{killed}/{SPOOLS}", *glob.glob(f"{glob.escape(killed)}/{_BEGUN}*")):
        name = os.path.basename(folder) if _BEGUN in folder else f"{_BEGUN}{os.path.basename(killed).lstrip('.')}"
        if os.path.isdir(folder):
            os.rename(folder, f"{staging}/{name}")


def checkpoints_begun(staging: str) -> Iterator[Checkpoint]:
    """What the killed runs had done that this one has taken over."""
    for path in sorted(glob.glob(f"{glob.escape(staging)}/{_BEGUN}*/*{_ENDING}")):
        found: Checkpoint = pickle.loads(read_file(path))  # noqa: S301  written by a run of this very command
        yield found._replace(spools=tuple(_moved(found.spools, os.path.dirname(path))))


def _moved(spools: Iterable[tuple[Any, Spool]], folder: str) -> Iterator[tuple[Any, Spool]]:
    for key, spool in spools:
        yield key, spool._replace(path=f"{folder}/{os.path.basename(spool.path)}")
