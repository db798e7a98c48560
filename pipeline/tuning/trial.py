"""A trial of `detect-objects tune`: a process that loads the detector with some settings, and measures on request.

The parent writes a JSON object a line; each gets one line of JSON as its answer. The first one says what to load, and its answer
has the rows of the photos. The others say what to measure:

    {"config": ["job.yaml"], "overrides": {"detect.precision": "bfloat16"}, "photos": ["a.jpg"]}
    {"measure": "throughput", "seconds": 2.0}
    {"measure": "latency", "rate": 10.0, "seconds": 3.0}
    {"measure": "memory"}

The process ends with its standard input.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
import os
import queue
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from pipeline.config import load_config
from pipeline.detect.detector import Detector
from pipeline.detect.load_detector import load_detector
from pipeline.errors import UserError
from pipeline.limits import available_cpus, resident_bytes
from pipeline.records import DetectedImage, EncodedImage, ImageRef, detection_row
from pipeline.storage.files import read_file


def throughput(detector: Detector, photos: Sequence[EncodedImage], seconds: float) -> float:
    """Images per second while as many are in flight as the detector can use."""
    images = itertools.cycle(photos)
    ahead = detector.model.engine.images_in_flight + 2 * available_cpus()
    in_flight = collections.deque(detector.start(next(images)) for _ in range(ahead))

    def finish(count: int) -> None:
        for _ in range(count):
            in_flight.popleft().result()
            in_flight.append(detector.start(next(images)))

    finish(ahead // 2)  # until batches and threads are busy
    began, done = time.monotonic(), 0
    while (elapsed := time.monotonic() - began) < seconds or not done:
        finish(1)
        done += 1
    for result in in_flight:
        result.result()
    return done / elapsed


def latencies(detector: Detector, photos: Sequence[EncodedImage], rate: float, seconds: float) -> list[float]:
    """Seconds from the arrival of each image to its result, of images that arrive at a fixed rate, or one after the other.

    Args:
      detector: Detects in them.
      photos: The images, again and again.
      rate: Images per second; 0: each arrives when the one before is done.
      seconds: How long images arrive.
    """
    images, began, started = itertools.cycle(photos), time.monotonic(), 0
    taken = queue.SimpleQueue[float]()

    def note(arrived: float, _result: Future[Any]) -> None:
        taken.put(time.monotonic() - arrived)

    while True:
        arrives = began + started / rate if rate else time.monotonic()
        if arrives >= began + seconds and started:
            return [taken.get() for _ in range(started)]  # waits for each
        time.sleep(max(0.0, arrives - time.monotonic()))
        result = detector.start(next(images))
        result.add_done_callback(functools.partial(note, arrives))
        started += 1
        if not rate:
            result.result()


def memory_mb(_detector: Detector, _photos: Sequence[EncodedImage]) -> float:
    """Resident memory of this process."""
    return resident_bytes() / 1e6


_MEASURES: dict[str, Callable[..., Any]] = {
    "throughput": throughput,
    "latency": latencies,
    "memory": memory_mb,
}


def _answers(requests: Iterator[str]) -> Iterator[dict[str, Any]]:
    job: Mapping[str, Any] = json.loads(next(requests))
    config = load_config(job["config"], job["overrides"])
    photos = [EncodedImage(ImageRef(uri), read_file(uri)) for uri in job["photos"]]
    detector = load_detector(config.model, config.detect)
    yield {"rows": [detection_row(found) for found in detector.detect(photos) if isinstance(found, DetectedImage)]}
    for line in requests:
        request = json.loads(line)
        measure = request.pop("measure")
        yield {measure: _MEASURES[measure](detector, photos, **request)}


def main() -> None:
    """Runs in the process of the trial."""
    private = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # TensorFlow may print
    try:
        for answer in _answers(iter(sys.stdin.readline, "")):
            print(json.dumps(answer), file=private, flush=True)
    except (UserError, OSError) as err:
        print(json.dumps({"error": " ".join(str(err).split())}), file=private, flush=True)
    os._exit(0)  # nothing is left to do, and TensorFlow's threads would wait for each other
