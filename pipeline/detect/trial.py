"""A detector in a process of its own, which answers with what it finds in some photos, and how fast; `tune` races two of them."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from pipeline import own_python
from pipeline.config import load_config
from pipeline.detect.detect_objects import detect_images
from pipeline.detect.detector import Detector
from pipeline.detect.load_detector import load_detector
from pipeline.errors import ModelError
from pipeline.records import DetectedImage, ImageRef, detection_row

Settings = Mapping[str, Any]  # what differs from those of config files, by dotted key


@contextlib.contextmanager
def trial(configs: Sequence[str], settings: Settings, photos: Sequence[str], answers_s: float) -> Iterator[Callable[..., Any]]:
    """Runs the detector with some settings in a process of its own, which begins to load at once.

    Args:
      configs: Config files of the job.
      settings: What differs from them, by dotted key.
      photos: Paths of images.
      answers_s: Longest wait for an answer.

    Yields:
      A function that returns the rows of the photos, once; with a number of seconds, the images per second in a turn of that
      length. It raises ModelError if the detector cannot be loaded so, or does not answer.
    """
    connection, theirs = multiprocessing.Pipe()

    def answer(*seconds: float) -> Any:
        with contextlib.suppress(BrokenPipeError):
            for each in seconds:
                connection.send(each)
        if not connection.poll(answers_s):
            raise ModelError(f"did not answer for {answers_s:.0f} s")
        try:
            found = connection.recv()
        except (EOFError, ConnectionResetError):
            raise ModelError(f"the process ended with exit code {process.wait()}") from None
        if isinstance(found, ModelError):
            raise found
        return found

    with connection:
        process = subprocess.Popen(  # noqa: S603  this Python and this module; in a session of its own, since Ctrl-C is for the command
            [*own_python.command_of(__name__), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=own_python.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # TensorFlow prints
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            theirs.close()
            connection.send((configs, settings, photos))
            yield answer
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    """Runs in the process of a trial: answers with the rows of the photos, then with a rate for each number of seconds."""
    connection = Connection(int(sys.argv[1]))
    try:
        configs, settings, photos = connection.recv()
        config = load_config(configs, settings)
        images = [ImageRef(uri) for uri in photos]
        detector = load_detector(config.model, config.detect, read=config.read)  # without samples, which a job has few of
        connection.send([detection_row(found) for found in detector.detect(images) if isinstance(found, DetectedImage)])
        while True:
            connection.send(rate(detector, images, connection.recv()))
    except Exception as err:  # noqa: BLE001  whatever these settings do to an engine
        with contextlib.suppress(OSError):  # the command has ended
            connection.send(ModelError(" ".join(str(err).split()) or type(err).__name__))
    finally:
        os._exit(0)  # nothing is left to do, and TensorFlow's threads would wait for each other


def rate(detector: Detector, photos: Sequence[ImageRef], seconds: float) -> float:
    """Images per second of a job that detects in the photos again and again, while it is in full swing; it ends with the turn."""
    is_over = threading.Event()
    results = detect_images(itertools.takewhile(lambda _: not is_over.is_set(), itertools.cycle(photos)), detector)

    def finish(images: int) -> int:
        return sum(1 for _ in itertools.islice(results, images))

    finish(max(detector.chunk_size, detector.model.batcher.images_in_flight // 2))  # until batches and threads are busy
    began, done = time.monotonic(), 0
    while (elapsed := time.monotonic() - began) < seconds or not done:
        done += finish(detector.chunk_size)
    is_over.set()
    for _ in results:  # nothing of this turn runs in the next one
        pass
    return done / elapsed
