"""Locks in a results folder: one process at a time does what a lock names, such as the work of one command, or compaction.

- On a local disk the holder keeps a file locked (flock). The system releases it when the process ends, however it ends.
- On Cloud Storage the holder writes one object with `ifGenerationMatch` and again every half minute. After five minutes without a
  heartbeat, by the server's clock, the next one takes the lock.

The correctness of rows never depends on a lock: rows are only ever added, so a process that lost its lock can only repeat work.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.errors import BusyError
from pipeline.records import row_bytes
from pipeline.storage.cloud import GS, blob_of, server_times
from pipeline.storage.files import make_folder

LOCK = ".lock-"  # the beginning of the names of locks
_SHOWN = 200  # characters of a holder's command
_log = logging.getLogger(__name__)


class LockTimes(NamedTuple):
    """The times of a lock on Cloud Storage, in seconds.

    Attributes:
      beat_s: Between two heartbeats.
      expires_s: After the last heartbeat, the time until another process may take the lock.
      poll_s: Between two attempts of a process that waits, on a disk too.
    """

    beat_s: float = 30.0
    expires_s: float = 300.0
    poll_s: float = 2.0


TIMES = LockTimes()


@contextlib.contextmanager
def locked(output: str, name: str, *, wait_s: float = 0.0, what: str = "", times: LockTimes = TIMES) -> Iterator[None]:
    """Holds a lock while this lasts.

    Args:
      output: The results folder, local or `gs://`.
      name: The name of the lock.
      wait_s: The longest wait for another holder; standard error names it.
      what: What the holder does, for those who wait.
      times: Its times.

    Raises:
      BusyError: Another process holds it.
    """
    holder = row_bytes({"what": what[:_SHOWN], "host": socket.gethostname(), "pid": os.getpid(), "since": time.time()})
    path = f"{output}/{LOCK}{name}"
    lock = _CloudLock(path, holder, times) if output.startswith(GS) else _LocalLock(path, holder)
    end, waits = time.monotonic() + wait_s, False
    while (other := lock.take()) is not None:
        left = end - time.monotonic()
        if left <= 0:
            more = f", and this one waited for {wait_s:g} s" if wait_s else ""
            raise BusyError(f"output {output}: {_described(other)}{more}")
        if not waits:
            print(f"waiting: output {output}: {_described(other)}", file=sys.stderr, flush=True)
            waits = True
        time.sleep(min(times.poll_s, left))
    try:
        yield
    finally:
        lock.release()


class _LocalLock:
    """A locked file, which the holder removes."""

    def __init__(self, path: str, holder: bytes) -> None:
        self._path, self._holder = path, holder
        self._file = -1

    def take(self) -> bytes | None:
        """Takes the lock, or returns what its holder wrote."""
        make_folder(os.path.dirname(self._path))
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with os.fdopen(file, "rb") as held:
                    return held.read(1 << 16)
            except OSError as err:  # a disk without locks; rows do not depend on them
                _log.warning("%s: this disk has no locks (%s); equal commands at once would do the work twice", self._path, err)
            if self._is_current(file):
                os.ftruncate(file, 0)
                os.pwrite(file, self._holder, 0)
                self._file = file
                return None
            os.close(file)  # its holder has removed it meanwhile

    def _is_current(self, file: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        return False

    def release(self) -> None:
        """Removes the file while it is locked, so that nobody locks a removed one."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._path)
        os.close(self._file)


class _CloudLock:
    """An object that its holder writes again and again."""

    def __init__(self, path: str, holder: bytes, times: LockTimes) -> None:
        self._path, self._holder, self._times = path, holder, times
        self._generation = 0
        self._end = threading.Event()

    def take(self) -> bytes | None:
        """Takes the lock, or returns what its holder wrote."""
        from google.api_core.exceptions import NotFound

        blob = blob_of(self._path)
        with server_times(blob.client) as server:
            try:
                blob.reload()
                is_free, generation = server[-1] - blob.updated.timestamp() > self._times.expires_s, blob.generation
                content = b"" if is_free else bytes(blob.download_as_bytes())
            except NotFound:
                is_free, generation, content = True, 0, b""
        if not (is_free and self._write(generation)):
            return content
        self._beats = threading.Thread(target=self._beat, name="lock heartbeat", daemon=True)
        self._beats.start()
        return None

    def _write(self, generation: int) -> bool:
        """Writes the object over this generation; whether it succeeded."""
        from google.api_core.exceptions import NotFound, PreconditionFailed
        from google.cloud.storage.retry import DEFAULT_RETRY

        blob = blob_of(self._path)
        try:
            blob.upload_from_string(self._holder, if_generation_match=generation, retry=DEFAULT_RETRY.with_timeout(20.0))
        except (PreconditionFailed, NotFound):  # also where a lost answer made the client try again
            try:
                blob.reload()
                if bytes(blob.download_as_bytes()) != self._holder:
                    return False
            except NotFound:  # another process wrote it or deleted it between the two calls
                return False
        self._generation = blob.generation
        return True

    def _beat(self) -> None:
        while not self._end.wait(self._times.beat_s):
            with contextlib.suppress(Exception):  # the next heartbeat may reach storage
                if not self._write(self._generation):
                    _log.warning("%s: another process has taken this lock; the work goes on and may be done twice", self._path)
                    return

    def release(self) -> None:
        """Deletes the object, unless another process has it by now; if storage fails, the lock expires."""
        self._end.set()
        self._beats.join()
        with contextlib.suppress(Exception):
            blob_of(self._path).delete(if_generation_match=self._generation)


def _described(holder: bytes) -> str:
    """A holder for a person; its record may be any bytes."""
    try:
        record = json.loads(holder)
        since = datetime.datetime.fromtimestamp(float(record["since"]), datetime.timezone.utc)
        who = f"{record['what']}, process {record['pid']} on {record['host']}, since {since:%F %T} UTC"
        return f"another run is processing the same ({who})"
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return "another run is processing the same"
