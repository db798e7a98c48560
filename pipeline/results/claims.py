"""The record of a lease: a run, the images that it works at, and its process.

Two claims conflict where a pattern of each may match the same file. Only the fixed beginnings and endings of patterns are
compared, so no conflict is missed, and sometimes two claims conflict that share no file. Manifests are not read here: a job that
has one claims everything.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import socket
import time
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pipeline.data_format import from_plain
from pipeline.records import row_bytes
from pipeline.storage.globs import fixed_beginning, has_wildcard, is_folder, real_pattern

EVERYTHING = "**"
_MOST_PATTERNS = 400  # more than a year of days; more patterns become one, their common beginning
_EXACT = "\0"  # marks the end of a whole name


class LeaseTimes(NamedTuple):
    """The times of a lease, in seconds.

    Attributes:
      renew_s: Between two renewals on Cloud Storage.
      expires_s: After the last renewal there, the time until another run may take over.
      silent_s: After the last report of its workers, the time until a run without its launcher counts as dead.
      poll_s: Between two attempts of a run that waits; 0: one second on a disk, ten on Cloud Storage.
    """

    renew_s: float = 30.0
    expires_s: float = 300.0
    silent_s: float = 900.0  # workers report only what has changed
    poll_s: float = 0.0


LEASE_TIMES = LeaseTimes()


class _Span(NamedTuple):
    """The beginning and the ending that all matches of a pattern share."""

    beginning: str
    ending: str

    def meets(self, other: _Span) -> bool:
        (short, long), (tail, whole) = (sorted(texts, key=len) for texts in zip(self, other, strict=True))
        return long.startswith(short) and whole.endswith(tail)


def _is_time(seconds: float) -> bool:
    return 0 <= seconds < 4e9  # the year 2096


@dataclasses.dataclass(frozen=True)
class Claim:
    """A run's claim.

    Attributes:
      run: Its name.
      patterns: The images that it works at; local patterns are absolute.
      host: Its machine.
      pid: Its process there.
      life: The start id of the process, unique on the machine; empty where the system has none.
      since: When it began, seconds since the epoch.
      renewed: When it was last renewed, by the server's clock on Cloud Storage.
    """

    run: Annotated[str, re.compile(r"[\w-]+").fullmatch]  # it becomes part of a path
    patterns: tuple[str, ...]
    host: str
    pid: int
    life: str
    since: Annotated[float, _is_time]
    renewed: Annotated[float, _is_time]

    @classmethod
    def of_this_process(cls, run: str, patterns: Sequence[str], *, works_here: bool = True) -> Claim:
        """A claim of this process, made now; `works_here`: whether the run's work ends with this process."""
        named = sorted({_settled(pattern) for pattern in patterns})
        if len(named) > _MOST_PATTERNS:
            named = [f"{fixed_beginning(os.path.commonprefix(named))}**"]  # noqa: RUF071  of characters
        now, pid = time.time(), os.getpid()
        return cls(run, tuple(named), socket.gethostname(), pid, _life_of(pid) if works_here else "", now, now)

    @classmethod
    def from_json(cls, text: bytes) -> Claim:
        """Parses what `to_json` returned.

        Raises:
          ValueError: The text is no claim.
        """
        claim: Claim = from_plain(cls, json.loads(text))
        return claim

    def to_json(self) -> bytes:
        """The claim as one line of JSON."""
        return row_bytes(dataclasses.asdict(self))

    def shares(self, other: Claim) -> bool:
        """Whether some image may belong to both claims."""
        theirs = [span for pattern in other.patterns for span in _spans(pattern)]
        return any(span.meets(each) for pattern in self.patterns for span in _spans(pattern) for each in theirs)

    def is_known_dead(self) -> bool:
        """Whether its process ran on this machine and has ended; False where that is unknown."""
        space = _life_of(os.getpid()).rpartition(" ")[0]
        return bool(space) and self.life.startswith(f"{space} ") and _life_of(self.pid) != self.life

    def __str__(self) -> str:
        since = datetime.datetime.fromtimestamp(self.since, datetime.timezone.utc)
        more = f" and {len(self.patterns) - 1} more" if len(self.patterns) > 1 else ""
        worked_at = f"{self.patterns[0]}{more}" if self.patterns else "nothing"
        return f"run {self.run} (process {self.pid} on {self.host}) works at {worked_at} since {since:%Y-%m-%d %H:%M:%S} UTC"


def _settled(pattern: str) -> str:
    """The pattern in one spelling; a folder stands for all files in it."""
    if pattern == EVERYTHING:
        return pattern
    folder = is_folder(pattern)
    path = real_pattern(pattern)
    return f"{path.rstrip('/')}/**" if folder else path.rstrip("/")


def _spans(pattern: str) -> tuple[_Span, ...]:
    last = pattern.rpartition("/")[2]
    if has_wildcard(pattern):
        # a last part without a wildcard may be a folder, and its files may have any ending
        return (_Span(fixed_beginning(pattern), re.split(r"[*?\]]", last)[-1] if has_wildcard(last) else ""),)
    return (_Span(pattern + _EXACT, pattern), _Span(f"{pattern}/", ""))


def _life_of(pid: int) -> str:
    """Boot id, process namespace and start time of a process; empty where it does not run or the system has no such files."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot, open(f"/proc/{pid}/stat") as stat:
            state, *fields = stat.read().rpartition(") ")[2].split()
            return "" if state in "ZX" else f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')} {fields[18]}"
    except (OSError, IndexError):
        return ""
