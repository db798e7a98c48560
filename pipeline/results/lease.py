"""Leases, as in Kubernetes: which run processes which images in a results folder, and whether its process is alive.

Jobs, streams, archives and compactions use one protocol:

- On a local disk the holder keeps a file locked. The system releases the lock when the process ends, however it ends, and never
  while it is only paused.
- On Cloud Storage the holder renews its record in one object (see `claims_cloud`). A process that was killed on this machine is
  known to be dead at once, any other one five minutes after its last renewal.

`leased` keeps other jobs away from a run's images. A job that lost its lease commits nothing: it renews the lease right before it
commits, and a new holder fences it first. Streams take no lease on images, since a backfill may run beside a stream; `alive` only
shows that they run.
"""

from __future__ import annotations

import contextlib
import glob
import os
import posixpath
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from apache_beam.io.filesystems import FileSystems

from pipeline.errors import BusyError, TakenOverError
from pipeline.results.cancellation import confirmed_before_commit
from pipeline.results.claims import LEASE_TIMES, Claim, LeaseTimes
from pipeline.results.claims_cloud import CloudClaims
from pipeline.storage.files import make_folder
from pipeline.storage.globs import escape_glob
from pipeline.storage.listing_backends import GS
from pipeline.storage.locks import if_unlocked, locked_file, one_at_a_time
from pipeline.storage.state import is_own_file, read_checked

_FILE = ".lease-"
_LOCK = "lock"
_REPORTS = "figures"  # only workers that outlive their launcher write there
_UNLOCKED_SECONDS = 3600.0  # a folder without a lock file has no living holder once it is that old


class LocalClaims:
    """The claims in a local results folder, of which one may be this run's.

    Args:
      output: The folder.
    """

    expired: Sequence[Claim] = ()  # a lock ends with its process, so no run has to be fenced

    def __init__(self, output: str) -> None:
        self._output = output
        self._held = contextlib.ExitStack()

    def take(self, claim: Claim) -> Claim | None:
        """Makes a claim; returns the claim that conflicts with it, if there is one."""
        make_folder(self._output)
        path = f"{self._output}/{_FILE}{claim.run}"
        with one_at_a_time(self._output):
            self._held.enter_context(locked_file(path, claim.to_json()))
            self._held.callback(_remove, path)
            # in this order: where folders have no locks, both of two runs may be refused, and never none
            for other in self._alive():
                if other.run != claim.run and other.shares(claim):
                    self._held.close()
                    return other
        return None

    def _alive(self) -> Iterator[Claim]:
        for path in filter(is_own_file, glob.glob(f"{glob.escape(self._output)}/{_FILE}*")):
            with contextlib.suppress(FileNotFoundError), if_unlocked(path) as free:
                claim = read_checked(path, Claim.from_json) if os.path.getsize(path) else None
                if free and (claim or not os.path.getsize(path)):  # else it is not this program's file
                    _remove(path)
                elif claim and not free:
                    yield claim

    def renew(self, _claim: Claim) -> bool:
        """Whether the run has its claim: always."""
        return True

    def release(self, _claim: Claim) -> None:
        """Gives the claim up."""
        self._held.close()

    @contextlib.contextmanager
    def kept(self, _claim: Claim, _lost: Callable[[], None]) -> Iterator[None]:
        """Does nothing: the system keeps the lock."""
        yield


@contextlib.contextmanager
def leased(
    staging: str,
    patterns: Sequence[str],
    *,
    wait_s: float,
    lost: Callable[[], object],
    fence: Callable[[str], object],
    works_here: bool = True,
    times: LeaseTimes = LEASE_TIMES,
) -> Iterator[None]:
    """Holds the lease of a run, before any other file of the run exists.

    Args:
      staging: The run's staging folder.
      patterns: The images that it works at.
      wait_s: The longest wait for another run that works at some of them; standard error names that run.
      lost: Called, in a thread, when another run has taken over; nothing of this one is committed any more.
      fence: Keeps the run of a staging folder from committing.
      works_here: Whether the run's work ends with this process; else a lease whose process is gone lasts until it expires.
      times: When the lease is renewed, and when it expires.

    Raises:
      BusyError: Another run works at some of them.
      TakenOverError: Another run has taken over.
    """
    output, run = _output_and_run(staging)
    claim = Claim.of_this_process(run, patterns, works_here=works_here)
    claims = CloudClaims(output, times) if output.startswith(GS) else LocalClaims(output)
    _take(claims, claim, output, wait_s, times.poll_s or (10.0 if output.startswith(GS) else 1.0))
    gone = TakenOverError(
        f"output {output}: another run took over, since this one had not renewed its lease; nothing was committed"
    )
    is_lost = threading.Event()

    def confirm() -> None:
        if not claims.renew(claim):
            is_lost.set()
            raise gone

    def stop() -> None:
        fence(staging)
        is_lost.set()
        lost()

    try:
        for dead in claims.expired:
            fence(staging.removesuffix(run) + dead.run)
        with confirmed_before_commit(confirm), claims.kept(claim, stop):
            yield
    except (KeyboardInterrupt, Exception) as err:
        if is_lost.is_set() or (isinstance(err, Exception) and not _holds(claims, claim)):
            raise gone from err
        raise
    finally:
        claims.release(claim)


@contextlib.contextmanager
def alive(folder: str, times: LeaseTimes = LEASE_TIMES) -> Iterator[None]:
    """Shows other processes that a run is alive while this lasts; a local folder is made.

    A run has one lock or record, which serves all that show it as alive, such as its launcher and its archive.

    Args:
      folder: The run's folder, `<output>/.staging-<run>`.
      times: When the lease is renewed, and when it expires.
    """
    output, run = _output_and_run(folder)
    if not output.startswith(GS):
        make_folder(folder)
        with contextlib.ExitStack() as stack:
            if _is_unlocked(folder):
                stack.enter_context(locked_file(f"{folder}/{_LOCK}"))
            yield
        return
    claims, claim = CloudClaims(output, times), Claim.of_this_process(run, ())
    if claims.has(claim):
        yield
        return
    claims.take(claim)
    try:
        with claims.kept(claim, lambda: None):
            yield
    finally:
        claims.release(claim)


def _is_unlocked(folder: str) -> bool:
    try:
        with if_unlocked(f"{folder}/{_LOCK}") as free:
            return free
    except FileNotFoundError:
        return True


def remove_lock(folder: str) -> None:
    """Removes the folder of a run that has ended, if only its lock is left there."""
    if os.listdir(folder) == [_LOCK]:
        _remove(f"{folder}/{_LOCK}")
        os.rmdir(folder)


@contextlib.contextmanager
def if_dead(folder: str, times: LeaseTimes = LEASE_TIMES) -> Iterator[bool]:
    """Whether the run of a folder has ended; if so, on a local disk no other process gets that answer while this lasts.

    On Cloud Storage a run without its launcher is alive while its workers write reports.

    Args:
      folder: The run's folder, `<output>/.staging-<run>`.
      times: When the lease is renewed, and when it expires.
    """
    output, run = _output_and_run(folder)
    if output.startswith(GS):
        holders, now = CloudClaims(output, times).alive()
        yield run not in holders and now - _written_at(f"{folder}/{_REPORTS}") > times.silent_s
        return
    with contextlib.ExitStack() as stack:
        try:
            dead = stack.enter_context(if_unlocked(f"{folder}/{_LOCK}"))
        except OSError:
            dead = os.path.isdir(folder) and time.time() - os.path.getmtime(folder) > _UNLOCKED_SECONDS
        yield dead


def age_s(folder: str) -> float:
    """The time since something was written to a folder, in seconds."""
    return time.time() - _written_at(folder)


def _written_at(folder: str) -> float:
    match = FileSystems.match([f"{escape_glob(folder)}/**"])[0]
    return max((entry.last_updated_in_seconds for entry in match.metadata_list), default=0.0)


def _output_and_run(folder: str) -> tuple[str, str]:
    return posixpath.dirname(folder), posixpath.basename(folder).partition("-")[2]


def _take(claims: CloudClaims | LocalClaims, claim: Claim, output: str, wait_s: float, poll_s: float) -> None:
    end, said = time.monotonic() + wait_s, False
    while other := claims.take(claim):
        if not wait_s:
            raise BusyError(f"output {output}: {other}; --when-busy wait waits for it")
        if not said:
            print(f"waiting: output {output}: {other}", file=sys.stderr, flush=True)
            said = True
        left = end - time.monotonic()
        if left <= 0:
            raise BusyError(f"output {output}: {other}, and this one waited for {wait_s:g} s")
        time.sleep(min(poll_s, left))


def _holds(claims: CloudClaims | LocalClaims, claim: Claim) -> bool:
    with contextlib.suppress(Exception):  # the error that ended the run matters more
        return claims.renew(claim)
    return True


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        os.remove(path)
