"""Memory that is free goes back to the system, and threads share heaps, where the C library is glibc."""

import os
import subprocess
import sys

import pytest

from pipeline.detect.process_memory import _glibc
from tests.conftest import REPO

# twelve threads, all alive at once, that each allocate; malloc_info(3) lists the heaps
COUNT_HEAPS = """
import ctypes, sys, threading
from pipeline.detect.process_memory import trim_memory, cap_malloc_arenas
cap_malloc_arenas(int(sys.argv[1]))
glibc = ctypes.CDLL(None)
glibc.malloc.restype = ctypes.c_void_p
glibc.fdopen.restype = ctypes.c_void_p
all_there = threading.Barrier(12)
def allocate():
    glibc.malloc(5000)
    all_there.wait()
threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
trim_memory(collect_garbage=True)
stream = ctypes.c_void_p(glibc.fdopen(1, b"w"))
glibc.malloc_info(0, stream)
glibc.fflush(stream)
"""


@pytest.mark.skipif(_glibc() is None, reason="the C library is not glibc")
@pytest.mark.parametrize(
    ("heaps", "wish", "found"),
    [(2, {}, 2), (3, {}, 3), (2, {"MALLOC_ARENA_MAX": "5"}, 5)],
    ids=["two", "three", "what the user's environment says goes before"],
)
def test_threads_share_so_many_heaps(heaps, wish, found):
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"} | wish
    command = [sys.executable, "-c", COUNT_HEAPS, str(heaps)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=580, check=True, env=environment)
    assert done.stdout.count("<heap nr=") == found
