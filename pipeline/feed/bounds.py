"""Limits of CPU time and memory of a feeder process for one image; the kernel keeps them, also within native code."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import threading
from collections.abc import Iterator

from pipeline.feed.work import ANY_ROOM

TIMED_OUT = {signal.SIGPROF, signal.SIGALRM}  # the kernel ends the process with one of these when an image takes too long

_WAITS = 20  # an image may take this many times its CPU time in all: ends a decoder that hangs, spares one on a busy machine
_BYTES_PER_BYTE = 4  # of the file: the copies that decoders make
_MORE_BYTES = 96 << 20
_TIMES_COMING = 4  # the copies that receiving a message makes
_coming = {"bytes": 0}
_changing = threading.Lock()
_PAGE_BYTES = resource.getpagesize()


@functools.cache
def _statm() -> int:
    return os.open("/proc/self/statm", os.O_RDONLY)


def set_up() -> None:
    """Prepares this process: signals of its limits end it, and no core is dumped."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in TIMED_OUT:
        signal.signal(number, signal.SIG_DFL)  # the parent may have ignored it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def bounded(seconds: float, file_bytes: int) -> Iterator[None]:
    """Bounds the CPU time and the memory of decoding one file; an image of more than `ANY_ROOM` bytes then raises the latter."""
    limit_memory(bytes_for(file_bytes))
    try:
        with time_bounded(seconds):
            yield
    finally:
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


@contextlib.contextmanager
def time_bounded(seconds: float) -> Iterator[None]:
    """Bounds the CPU time of a block."""
    bound_time(seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def bound_time(seconds: float) -> None:
    """Ends the process after so much CPU time from now."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * _WAITS)


@contextlib.contextmanager
def clock_stopped() -> Iterator[None]:
    """Lets the image wait, without a bound."""
    left_s = signal.setitimer(signal.ITIMER_REAL, 0)[0]
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s)


def bytes_for(file_bytes: int) -> float:
    """The memory that decoding a file may take, unless its image is a large one."""
    return _BYTES_PER_BYTE * file_bytes + ANY_ROOM


def limit_memory(more_bytes: float) -> None:
    """Limits the address space to its current size, these bytes, and some for all else."""
    held_bytes = int(os.pread(_statm(), 32, 0).split()[0]) * _PAGE_BYTES
    with _changing:
        _limit(held_bytes + int(more_bytes) + _MORE_BYTES + _coming["bytes"])


def expect(message_bytes: int) -> None:
    """Lets another thread receive so many bytes, also while an image is decoded; 0 after it has received them."""
    with _changing:
        _coming["bytes"] = message_bytes * _TIMES_COMING
        now, most = resource.getrlimit(resource.RLIMIT_AS)
        if now != most:
            _limit(now + _coming["bytes"])


def _limit(wanted: int) -> None:
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))
