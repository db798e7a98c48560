"""A process that loads a model has a bounded number of heaps, where the C library is glibc."""

import os
import subprocess
import sys

import pytest

from pipeline.detect.process_memory import _glibc
from tests.conftest import REPO
from tests.detect.versioned_models import TOY, write_version

# on one core: six threads, all alive at once, that each allocate; malloc_info(3) lists the heaps
COUNT_HEAPS = f"""
import ctypes, os, sys, threading
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_model import load
load(ModelConfig(sys.argv[1]), DetectConfig(engine="{TOY}")).batcher.close()
glibc = ctypes.CDLL(None)
glibc.malloc.restype = glibc.fdopen.restype = ctypes.c_void_p
all_there = threading.Barrier(6)
def allocate():
    glibc.malloc(5000)
    all_there.wait()
threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
stream = ctypes.c_void_p(glibc.fdopen(1, b"w"))
glibc.malloc_info(0, stream)
glibc.fflush(stream)
"""


@pytest.mark.skipif(_glibc() is None, reason="the C library is not glibc")
@pytest.mark.parametrize(
    ("wish", "heaps"), [({}, 2), ({"MALLOC_ARENA_MAX": "5"}, 5)], ids=["two on one core", "as the user says"]
)
def test_a_loaded_model_bounds_the_heaps_that_threads_share(tmp_path, wish, heaps):
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"} | wish
    command = [sys.executable, "-c", COUNT_HEAPS, write_version(tmp_path, 7)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=580, check=True, env=environment)
    assert done.stdout.count("<heap nr=") == heaps
