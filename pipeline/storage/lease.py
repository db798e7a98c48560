"""A run's lease on the images it works at: while it lasts, no other run works at any of them for the same results folder.

On a local disk it is a file, `.lease-<run>`, that the system holds locked for the run's process: free at once when that ends,
however it ends, and never while it only pauses. On Cloud Storage it is a claim that must be renewed (see `claims_cloud`); a run
that lost it publishes nothing: it makes sure before it publishes, and who takes over stops it first.

Streams take none: a backfill beside a stream is wanted.
"""

from __future__ import annotations

import contextlib
import glob
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from pipeline.errors import BusyError, TakenOverError
from pipeline.storage.cancellation import asked_before_publishing
from pipeline.storage.claims import Claim
from pipeline.storage.claims_cloud import CloudClaims
from pipeline.storage.files import make_folder
from pipeline.storage.listing_backends import GS
from pipeline.storage.locks import if_unlocked, locked_file, one_at_a_time
from pipeline.storage.staging import fence, output_of, run_of, staging_of
from pipeline.storage.state import is_own_file, read_checked

_FILE = ".lease-"


class LocalClaims:
    """The claims in a local results folder, of which one may be this run's.

    Args:
      output: The folder.
    """

    poll_seconds = 1.0
    expired: Sequence[Claim] = ()  # whose process has ended is known to be dead

    def __init__(self, output: str) -> None:
        self._output = output
        self._held = contextlib.ExitStack()

    def take(self, claim: Claim) -> Claim | None:
        """Makes a claim; returns the one that is in its way, if there is one."""
        make_folder(self._output)
        path = f"{self._output}/{_FILE}{claim.run}"
        with one_at_a_time(self._output):
            for other in self._alive():
                if other.shares(claim):
                    return other
            self._held.enter_context(locked_file(path, claim.to_json()))
        self._held.callback(_remove, path)
        return None

    def _alive(self) -> Iterator[Claim]:
        for path in filter(is_own_file, glob.glob(f"{glob.escape(self._output)}/{_FILE}*")):
            with contextlib.suppress(FileNotFoundError), if_unlocked(path) as free:
                claim = read_checked(path, Claim.from_json) if os.path.getsize(path) else None
                if free and (claim or not os.path.getsize(path)):  # else somebody else's file
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
        """Nothing to do: the system keeps it."""
        yield


@contextlib.contextmanager
def leased(
    staging: str, patterns: Sequence[str], *, wait_s: float, lost: Callable[[], object], works_here: bool = True
) -> Iterator[None]:
    """Holds the lease of a run, before anything else of it is there.

    Args:
      staging: Where the run's unfinished files will be.
      patterns: What it works at.
      wait_s: The longest wait for another run that works at some of it; who that is, is said on standard error.
      lost: Called, in a thread, when another run has taken over; nothing of this one is published any more.
      works_here: Whether the run's work ends with this process; else who finds the process gone waits for a while.

    Raises:
      BusyError: Another run works at some of it.
      TakenOverError: Another run has taken over.
    """
    output, claim = output_of(staging), Claim.of_this_process(run_of(staging), patterns, works_here=works_here)
    claims = CloudClaims(output) if output.startswith(GS) else LocalClaims(output)
    _take(claims, claim, output, wait_s)
    gone = TakenOverError(f"output {output}: another run took over while nothing was heard of this one; nothing was published")
    told = threading.Event()

    def confirm() -> None:
        if not claims.renew(claim):
            told.set()
            raise gone

    def stop() -> None:
        fence(staging)
        told.set()
        lost()

    try:
        for dead in claims.expired:
            fence(staging_of(output, dead.run))
        with asked_before_publishing(confirm), claims.kept(claim, stop):
            yield
    except (KeyboardInterrupt, Exception) as err:
        if told.is_set() or (isinstance(err, Exception) and _is_lost(claims, claim)):
            raise gone from err
        raise
    finally:
        claims.release(claim)


def _take(claims: CloudClaims | LocalClaims, claim: Claim, output: str, wait_s: float) -> None:
    end, said = time.monotonic() + wait_s, False
    while other := claims.take(claim):
        left = end - time.monotonic()
        if left <= 0:
            waited = f", and this one waited for {wait_s:g} s" if said else "; --when-busy wait waits for it"
            raise BusyError(f"output {output}: {other}{waited}")
        if not said:
            print(f"waiting: output {output}: {other}", file=sys.stderr, flush=True)
            said = True
        time.sleep(min(claims.poll_seconds, left))


def _is_lost(claims: CloudClaims | LocalClaims, claim: Claim) -> bool:
    with contextlib.suppress(Exception):  # what ended the run is what matters
        return not claims.renew(claim)
    return False


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        os.remove(path)
