"""Versions of a model are prepared in forks of a process that has TensorFlow, which saves eight seconds of a core each.

A job starts an interpreter for each version that it prepares. Here that one hands its pipes over as soon as it starts, to a fork
that does the work, and ends with the fork's exit code. If either is killed, so is the other.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path

from tests.forked_jobs import ForkedJob
from tests.processes import wait_until

# a module that Python imports at its start
_HAND_OVER = """
import sys

if "load_in_subprocess" in sys.orig_argv[-1]:
    import json, os, socket

    with socket.socket(socket.AF_UNIX) as warm:
        warm.connect({place!r})
        socket.send_fds(warm, [json.dumps([os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
        code = warm.recv(1)
    os._exit(code[0] if code else 1)
"""


@contextlib.contextmanager
def preparing(folder: Path) -> Iterator[None]:
    """Prepares versions for all processes that have a folder on their `sys.path`."""
    place = folder / "socket"
    (folder / "sitecustomize.py").write_text(_HAND_OVER.format(place=str(place)), encoding="utf-8")
    with ForkedJob([place], folder / "log", module="tests.warm_preparations") as server:
        wait_until(place.exists, (folder / "log").read_text, server)
        yield


def main(argv: Sequence[str]) -> int:
    """Forks a process for each that connects, until the process of the tests ends."""
    (place,) = argv
    tests = multiprocessing.parent_process()
    assert tests
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}.new")
        listener.listen()
        os.rename(f"{place}.new", place)
        while tests.sentinel not in wait([listener, tests.sentinel]):
            connection, _ = listener.accept()
            if not os.fork():
                _prepare(connection)
            connection.close()
    return 0


def _prepare(connection: socket.socket) -> None:
    from pipeline.detect import load_in_subprocess

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    said, pipes, *_ = socket.recv_fds(connection, 1 << 20, 3)
    cwd, environment = json.loads(said)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, pipe in enumerate(pipes):
        os.dup2(pipe, number)
        os.close(pipe)
    sys.stdin = os.fdopen(0, closefd=False)
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    if "STORAGE_EMULATOR_HOST" in environment:
        from apache_beam.internal.gcp import auth

        auth._Credentials._credentials_init = True  # see `emulators`
    code = 1
    try:
        load_in_subprocess.main()
        code = 0
    finally:
        connection.send(bytes([code]))
        os._exit(code)


def _end_with(connection: socket.socket) -> None:
    connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)
