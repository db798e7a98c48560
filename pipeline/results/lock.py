"""Locks in a results folder: one process at a time does what a lock names, such as the work of one command, or compaction.

- On a local disk the holder keeps a file locked (flock). The system releases it when the process ends, however it ends.
- On object storage the holder writes one object, only over the generation that it knows, and again every half minute. After five
  minutes without a heartbeat, by the store's clock, the next one takes the lock.
- A lock that names a run whose job goes on without its launcher is held as long as that run is alive (`Run.goes_on`).

The correctness of rows never depends on a lock: rows are only ever added, so a process that lost its lock can only repeat work.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import logging
import math
import os
import re
import socket
import stat
import threading
import time
import uuid
from collections.abc import Iterator

from pipeline.errors import BusyError
from pipeline.failures import ImageError
from pipeline.log_lines import console
from pipeline.process import PROCESS
from pipeline.results.run_folder import Run
from pipeline.storage.files import delete_files, delete_generations, make_folder
from pipeline.storage.store import ChangedError, FoundFile, retried
from pipeline.storage.stores import store_of

LOCK = ".lock-"  # the beginning of the names of locks
_BEAT_SECONDS = 30.0  # between two heartbeats
_EXPIRES_SECONDS = 300.0  # after the last heartbeat
_POLL_SECONDS = 2.0  # between two attempts of a process that waits
_NO_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO)  # a folder, a link, or a socket, which somebody put there
_SHOWN = 300  # characters of a holder
_WRITE_SECONDS = 20.0  # for which one write is tried again
_BEAT = b"\0"  # separates the holder from what makes each heartbeat another content
_MOST_BYTES = 1e6  # of a lock; somebody else may have put anything there
_RUN = re.compile(rb"run ([0-9a-f]+),")  # how the holder of a command's lock begins
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(output: str, name: str, *, wait_s: float = 0.0, what: str = "") -> Iterator[None]:
    """Holds a lock while this lasts.

    Args:
      output: The results folder, local or on object storage.
      name: The name of the lock.
      wait_s: The longest wait for another holder; standard error names it.
      what: What the holder does, for those who wait.

    Raises:
      BusyError: Another process holds it.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    holder = f"{what}, process {os.getpid()} on {socket.gethostname()}, since {now:%F %T.%f} UTC".encode()
    take = _take_object if "://" in output else _take_file
    end, waits = time.monotonic() + wait_s, False
    with contextlib.ExitStack() as held:
        while (other := take(f"{output}/{LOCK}{name}", holder, held)) is not None:
            who, left = _shown(other), end - time.monotonic()
            busy = f"output {output}: another run is processing the same{f' ({who})' if who else ''}"
            if left <= 0:
                raise BusyError(f"{busy}, and this one waited for {wait_s:g} s" if wait_s else busy, who)
            if not waits:
                console.info("waiting: %s", busy)
                waits = True
            time.sleep(min(_POLL_SECONDS, left))
        yield


def _shown(holder: bytes) -> str:
    """A holder for a person; whoever can write to the folder may have put any bytes there."""
    return "".join(filter(str.isprintable, holder.decode("utf-8", "replace")))[:_SHOWN]


def since(holder: str) -> float:
    """When a holder took its lock, seconds since the epoch; infinite where its text does not say it."""
    found = re.search(r"since (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.\d+ UTC$", holder)
    with contextlib.suppress(ValueError):
        return datetime.datetime.fromisoformat(f"{found[1]}+00:00").timestamp() if found else math.inf
    return math.inf


def _take_file(path: str, holder: bytes, held: contextlib.ExitStack) -> bytes | None:
    """Takes a lock on a disk until `held` ends, or returns what its holder wrote."""
    make_folder(os.path.dirname(path))
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as err:
            if err.errno not in _NO_FILE:
                raise
            _log.warning("%s: expected a file as a lock (%s); equal commands at once would do the work twice", path, err)
            return None
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            _log.warning("%s: expected a file as a lock, it is none; equal commands at once would do the work twice", path)
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with os.fdopen(file, "rb") as other:
                return other.read(_SHOWN)
        except OSError as err:  # a disk without locks; rows do not depend on them
            _log.warning("%s: this disk has no locks (%s); equal commands at once would do the work twice", path, err)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                if _goes_on(path, left := os.pread(file, _SHOWN, 0)):
                    os.close(file)
                    return left
                os.ftruncate(file, 0)
                os.pwrite(file, holder, 0)
                held.callback(os.close, file)
                held.callback(_delete_file, path, holder)  # while it is locked, so that nobody locks a removed one
                return None
        os.close(file)  # its holder has removed it meanwhile


def _goes_on(path: str, holder: bytes) -> bool:
    """Whether a lock's holder is a run that is alive without its launcher."""
    found = _RUN.match(holder)
    return found is not None and Run(os.path.dirname(path), found[1].decode()).goes_on()


def _delete_file(path: str, holder: bytes) -> None:
    if not _goes_on(path, holder):
        delete_files([path])


def _take_object(path: str, holder: bytes, held: contextlib.ExitStack) -> bytes | None:
    """Takes a lock on object storage until `held` ends, or returns what its holder wrote."""
    try:
        age_s, before = retried(store_of(path).age)(path)
        other = _content(path)[0].partition(_BEAT)[0]
        if age_s <= _EXPIRES_SECONDS or _goes_on(path, other):
            return other
    except FileNotFoundError:
        before = ""
    if not (generation := _write_object(path, holder, before)):
        return b""
    held.enter_context(_beating(path, holder, generation, _BEAT_SECONDS))
    return None


def _content(path: str) -> tuple[bytes, str]:
    """The content of a lock, and its generation; nothing of a file that is none."""
    with contextlib.suppress(ImageError):
        return retried(store_of(path).download)(FoundFile(path), _MOST_BYTES, lambda _size: None)
    return b"", ""


def _write_object(path: str, holder: bytes, before: str) -> str:
    """Writes a lock over this generation; its new generation, or empty if another process has it."""
    content = holder + _BEAT + uuid.uuid4().hex.encode()  # an ETag may be a hash: each heartbeat writes another content
    try:
        return retried(store_of(path).write, _WRITE_SECONDS)(path, content, before)
    except (ChangedError, FileNotFoundError):  # also where a lost answer made the client try again
        with contextlib.suppress(FileNotFoundError):  # another process wrote it or deleted it between the two calls
            there, generation = _content(path)
            return generation if there == content else ""
        return ""


@contextlib.contextmanager
def _beating(path: str, holder: bytes, generation: str, beat_s: float) -> Iterator[None]:
    """Writes a lock again and again; at the end deletes it, unless another process has it by then; else it expires."""
    end = threading.Event()

    def beat() -> None:
        nonlocal generation
        while not end.wait(beat_s):
            with contextlib.suppress(Exception):  # the next heartbeat may reach storage
                if not (written := _write_object(path, holder, generation)):
                    _log.warning("%s: another process has taken this lock; the work goes on and may be done twice", path)
                    return
                generation = written

    def release() -> None:
        beats.join()
        with contextlib.suppress(Exception):
            if not _goes_on(path, holder):
                delete_generations({path: generation})

    beats = threading.Thread(target=beat, name="lock heartbeat", daemon=True)
    beats.start()
    try:
        yield
    finally:
        end.set()
        PROCESS.clean_up(release)
