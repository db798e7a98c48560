"""What the steps of a job count: once, as Beam metrics of every mode and runner, and for the display of this process.

Namespace `Detection`; distributions hold whole numbers, hence microseconds:

| metric | kind | what |
|---|---|---|
| `read` | counter | images that were listed, or that messages asked for |
| `skipped` | counter | of these, the ones listed before or asked for before |
| `detected` | counter | images with a result |
| `dead` | counter | dead letters of all stages; read = detected + dead + skipped |
| `swaps`, `refusals` | counter | versions of the model that a process has put into use while it worked, or refused |
| `canary_images`, `canary_failed` | counter | images that a canary was given, and of these the ones that it failed on |
| `canary_objects`, `canary_matched` | counter | objects of it and of the version in use, in the shadow; pairs that agree |
| `canary_ms` | counter | its time, summed over images |
| `image_bytes` | distribution | encoded bytes of an image that the detector took |
| `batch_size` | distribution | rung of a device batch |
| `model_us` | distribution | the model's time for a device batch |
| `read_us`, `decode_us`, `postprocess_us` | distribution | an image's time in this stage |
| `latency_ms` | distribution | streams: from an image's event time to its publishing (`event-to-publish`) |
| `backlog_age_ms` | distribution | streams: from a message's publishing to its reading |

Beam keeps metrics by bundle and thread, so these functions are called where a DoFn processes an element, never in a thread of a
pool: there they would only reach the display. An image costs 8 microseconds.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from apache_beam.metrics import Metrics

from pipeline.records import DeadLetter, DetectedImage

NAMESPACE = "Detection"
STAGES = ("read", "decode", "postprocess")  # of which each image notes its time; the model's is noted by batch

_OF_VERSIONS = ("swaps", "refusals", "canary_images", "canary_failed", "canary_objects", "canary_matched", "canary_ms")
_counters = {name: Metrics.counter(NAMESPACE, name) for name in ("read", "skipped", "detected", "dead", *_OF_VERSIONS)}
_image_bytes = Metrics.distribution(NAMESPACE, "image_bytes")
_batch_size = Metrics.distribution(NAMESPACE, "batch_size")
_model_us = Metrics.distribution(NAMESPACE, "model_us")
_stages_us = {stage: Metrics.distribution(NAMESPACE, f"{stage}_us") for stage in STAGES}
_latency_ms = Metrics.distribution(NAMESPACE, "latency_ms")
_backlog_age_ms = Metrics.distribution(NAMESPACE, "backlog_age_ms")

_of_process: Counter[str] = Counter()
_lock = threading.Lock()


def count_read(images: int = 1) -> None:
    """Counts images that were listed or asked for, whatever becomes of them."""
    _count("read", images)


def count_skipped(images: int = 1) -> None:
    """Counts images that were read before."""
    _count("skipped", images)


def count_result(result: DetectedImage | DeadLetter, image_bytes: int = 0) -> None:
    """Counts what became of an image, where it becomes an element of the pipeline.

    Args:
      result: A result, or a dead letter of any stage.
      image_bytes: Encoded bytes of the image, where it came as far as the detector.
    """
    if image_bytes:
        _image_bytes.update(image_bytes)
    if isinstance(result, DeadLetter):
        _count("dead")
        return
    _count("detected")
    timing = result.timing
    for stage, distribution in _stages_us.items():
        distribution.update(int(getattr(timing, stage) * 1e6))
    if timing.led_batch:
        _batch_size.update(timing.led_batch)
        _model_us.update(int(timing.model * 1e6))


def count_swaps(counts: Mapping[str, int]) -> None:
    """Counts what became of model versions: `swaps`, `refusals`, and a canary's figures."""
    for name, times in counts.items():
        _count(name, times)


def note_latency(milliseconds: float) -> None:
    """Notes how long after its event time an image of a stream was published."""
    _latency_ms.update(int(milliseconds))


def note_backlog_age(milliseconds: float) -> None:
    """Notes how long a message of a stream had waited when it was read."""
    _backlog_age_ms.update(int(milliseconds))


def process_counts() -> Counter[str]:
    """`read`, `skipped`, `detected` and `dead` of this process so far, over all jobs; a bundle that was retried counts twice."""
    with _lock:
        return _of_process.copy()


def _count(name: str, images: int = 1) -> None:
    _counters[name].inc(images)
    with _lock:
        _of_process[name] += images
