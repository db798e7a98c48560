"""Processes and threads that tests, demos and benches start: each ends with the block that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import HTTPServer
from pathlib import Path
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")
_HANGS_SECONDS = 500.0  # no test depends on it: one that gets so far has hung
_LOOK_SECONDS = 0.02
_GIVES_UP_SECONDS = 10.0  # a thread may wait for what a failed test no longer does
_PAUSED_SECONDS = 5.0  # a longer step of the clock is a machine that stood still, which is no wait


class _Process(Protocol):
    def poll(self) -> int | None: ...


@contextlib.contextmanager
def running(command: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a command, as `subprocess.Popen` does; when the block ends, however it does, all of its group is killed."""
    process = subprocess.Popen(command, start_new_session=True, **how)
    try:
        yield process
    finally:
        end_group(process)


@contextlib.contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[threading.Thread]:
    """Runs a function in a thread of its own; the block ends when the thread has, and raises what the function raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as err:  # noqa: BLE001  raised in the test
            raised.append(err)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield thread
    except BaseException:
        thread.join(_GIVES_UP_SECONDS)
        raise
    thread.join(_HANGS_SECONDS)
    assert not thread.is_alive(), "the thread has hung"
    if raised:
        raise raised[0]


@contextlib.contextmanager
def served(server: HTTPServer) -> Iterator[int]:
    """Serves HTTP in a thread of its own for the length of a block; yields the port."""

    def stop() -> None:
        server.shutdown()
        server.server_close()

    with in_thread(lambda: server.serve_forever(0.01)), contextlib.ExitStack() as stack:
        stack.callback(stop)
        yield server.server_port


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a group, with all of it, and waits for its end; one that has ended is left alone."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def has_ended(pid: int) -> bool:
    """Whether a process has ended; its parent may not have taken its exit code yet."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def wait_until(holds: Callable[[], _T], printed: Callable[[], str] = str, process: _Process | None = None) -> _T:
    """Waits for what another process or thread does; returns what `holds` returned: something true.

    The test fails if `process` ends first, and shows what `printed` returns, such as a log.
    """
    waited, looked = 0.0, time.monotonic()
    while True:
        at_work = process is None or process.poll() is None
        if found := holds():
            return found
        assert at_work and waited < _HANGS_SECONDS, printed()
        time.sleep(_LOOK_SECONDS)
        before, looked = looked, time.monotonic()
        waited += min(looked - before, _PAUSED_SECONDS)
