"""Who is alive, by the staging folder of its run.

A local run holds a lock on a file, which the system takes back when the process ends, however it ends. On object storage there is
no such thing. There a run that has a lease is alive while its claim stands (see `claims_cloud`): one that was killed on this very
machine is known to be dead at once, others five minutes later. A run without a lease, as a stream, writes a small object each
minute, and counts as dead once the newest of its objects is a quarter of an hour old (whose clock is wrong by more than a few
minutes gets no access to Cloud Storage at all).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from apache_beam.io.filesystems import FileSystems

from pipeline.storage.claims_cloud import CloudClaims
from pipeline.storage.files import make_folder, write_file
from pipeline.storage.globs import escape_glob
from pipeline.storage.listing_backends import GS
from pipeline.storage.locks import if_unlocked, locked_file
from pipeline.storage.renewal import renewed

_LOCK, _ALIVE = "lock", "alive"
_RENEW_SECONDS = 60.0
_DEAD_SECONDS = 900.0
_UNLOCKED_SECONDS = 3600.0  # a folder without a lock was made by nobody who lives, once it is that old


@contextlib.contextmanager
def alive(staging: str) -> Iterator[None]:
    """While this lasts, the run of a staging folder is alive for all others; the folder is made."""
    if "://" not in staging:
        make_folder(staging)
        with locked_file(f"{staging}/{_LOCK}"):
            yield
        return

    def renew() -> bool:
        write_file(f"{staging}/{_ALIVE}", b"")
        return True

    renew()
    with renewed("heartbeat", _RENEW_SECONDS, renew):
        yield


@contextlib.contextmanager
def if_dead(staging: str, output: str, leased: str = "") -> Iterator[bool]:
    """Whether the run of a staging folder has ended; if so, on a local disk nobody else finds that out while this lasts.

    Args:
      staging: The folder.
      output: The results folder in which it lies.
      leased: The name of the run, where it has a lease for as long as it has this folder; else empty.
    """
    if "://" in staging:
        has_claim = leased and output.startswith(GS)
        yield leased not in CloudClaims(output).alive() if has_claim else age_s(staging) > _DEAD_SECONDS
        return
    with contextlib.ExitStack() as stack:
        try:
            dead = stack.enter_context(if_unlocked(f"{staging}/{_LOCK}"))
        except FileNotFoundError:
            dead = os.path.isdir(staging) and time.time() - os.path.getmtime(staging) > _UNLOCKED_SECONDS
        yield dead


def age_s(staging: str) -> float:
    """How long ago something was written to a folder, in seconds."""
    match = FileSystems.match([f"{escape_glob(staging)}/**"])[0]
    return time.time() - max((entry.last_updated_in_seconds for entry in match.metadata_list), default=0.0)
