"""What tests of `Feeder` share: limits, images that take short and for ever, and the feeder processes of a process."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import psutil
from PIL import Image

from pipeline.feed.chunks import FedChunk
from pipeline.feed.feeder import Feeder
from pipeline.feed.fit import ModelInput
from pipeline.feed.work import Limits
from pipeline.records import EncodedImage, ImageRef
from tests import hostile_images
from tests.processes import wait_until

LIMITS = Limits(
    max_pixels=1e8,
    scaled_decode=True,
    max_file_bytes=1 << 30,
    read_threads=4,
    read_ahead_bytes=32e6,
    memory_bytes=None,
    processes=2,
    retry_seconds=0.0,
    give_up_seconds=math.inf,
)
WHOLE_DAYS = LIMITS._replace(max_pixels=1e12)  # the limit of time grows with it
STRETCH = ModelInput((20, 30), "stretch", "darknet", 0)
ANY_SIZE = ModelInput((8, 8), "none", "darknet", 0)
PIXELS = np.arange(40 * 60 * 3, dtype=np.uint8).reshape(40, 60, 3)


def encoded(file_format: str = "BMP", wh: tuple[int, int] = (60, 40), **options: object) -> bytes:
    """The same picture in any size and format."""
    return hostile_images.encoded(Image.fromarray(PIXELS).resize(wh), file_format, **options)


BMP = encoded()


def in_hand(*contents: bytes) -> list[EncodedImage]:
    """Images whose bytes are there."""
    return [EncodedImage(ImageRef(f"{number}.bmp"), content) for number, content in enumerate(contents)]


def slow_image() -> bytes:
    """Pillow joins its comment block by block: minutes."""
    return hostile_images.gif_with_long_comment(30 << 20)


@contextlib.contextmanager
def feeding(limits: Limits = LIMITS, processes: int = 1, most_bytes: float = 1e9) -> Iterator[Feeder]:
    """A feeder, closed at the end of the block."""
    feeder = Feeder(processes)
    feeder.open(limits, most_bytes)
    try:
        yield feeder
    finally:
        feeder.close()


def fed(feeder: Feeder, images: Sequence[EncodedImage | ImageRef], to: ModelInput = STRETCH) -> FedChunk:
    """One chunk, ready."""
    return feeder.start(images, to).result()


def places(chunk: FedChunk) -> list[int]:
    """Of the images that have pixels."""
    return [each.place for each in chunk.fitted]


OTHERS: set[psutil.Process] = set()  # feeder processes of detectors that earlier tests of this process keep


def feeders(pid: int | None = None) -> set[psutil.Process]:
    """The feeder processes of a process, but `OTHERS`."""
    found = set()
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            found |= {child} if "pipeline.feed.process" in " ".join(child.cmdline()) else set()
    return found - OTHERS


def at_work(process: psutil.Process, since: float = 1.0) -> psutil.Process:
    """Waits until a process has worked for so many seconds; its imports take less than one."""
    wait_until(lambda: sum(process.cpu_times()[:2]) > since)
    return process


def process_at_work(since: float = 1.0) -> psutil.Process:
    """Waits until the one feeder process that there is works at an image."""
    (process,) = wait_until(feeders)
    return at_work(process, since)


def wait_until_gone(process: psutil.Process) -> None:
    """Waits for a process to end; an orphan may find nobody who asks for its exit code."""
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


@contextlib.contextmanager
def job_at_work(code: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A Python process that runs this code, with a feeder process that works at an image that takes for ever: both.

    Args:
      code: Calls `begun()` where the caller of this function may go on.
    """
    begin = (
        "import os, signal, sys, time; from threading import Thread; from tests.feed.feeding import *\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job begins with it ignored
        "feeder = Feeder(1); feeder.open(WHOLE_DAYS, 1e9); result = feeder.start(in_hand(slow_image()), STRETCH)\n"
        "def begun(): print(process_at_work().pid, flush=True)\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen([sys.executable, "-c", begin + code], **pipes)
    try:
        yield process, psutil.Process(int(process.stdout.readline()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it has forked
        process.communicate()
