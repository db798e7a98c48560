"""`DetectObjects`: finds objects in images, with one model for each process, through Beam's RunInference.

    EncodedImage --> StartDetecting --> StartedImage --> RunInference --> PartDeadLetters --> detected
                          | start          (a future)         | result                   `--> dead
                          v                                   v
              Detector: waiting images --> decode --> model --> result of each image

The work begins in StartDetecting, which hands each image to the process's detector and passes it on only once enough newer ones
are under way. RunInference only waits for the results. So the model works while RunInference collects its first batch, and never
idles while the results of a batch go downstream. `detect_images` does the same without Beam.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.ml.inference.base import ModelHandler, RunInference
from apache_beam.utils.windowed_value import WindowedValue

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.detector import Detector
from pipeline.detect.load_detector import shared_detector
from pipeline.detect.loaded_model import LoadModel
from pipeline.limits import MEMORY
from pipeline.prefetch import Prefetcher, Slot
from pipeline.records import DeadLetter, DetectedImage, EncodedImage
from pipeline.results.cancellation import until_cancelled
from pipeline.stats import metrics

_REQUEST_IMAGES = 64  # that RunInference waits for at once; up to request_images more are under way


class DetectedAndDead(NamedTuple):
    """The outputs of `DetectObjects`; each image is in exactly one of them."""

    detected: beam.PCollection[DetectedImage]
    dead: beam.PCollection[DeadLetter]


class DetectObjects(beam.PTransform):
    """Finds objects in images, with one model for each process, shared by all bundles.

    Element in: `EncodedImage`. Elements out: `DetectedImage` or `DeadLetter`, one for each image, with the image's window and
    timestamp. Bounded or unbounded. A retried bundle gives the same rows, up to the last bits of floats.

    Args:
      model: A SavedModel's path (local or `gs://`), a `ModelConfig` for a model that does not describe itself, or a function that
        loads a model of another engine (`loaded_model`).
      detect: How to run the model; the keyword arguments override its fields.
      samples: How many samples the job wants; images that may be among them get a thumbnail.
      **settings: Any field of `DetectConfig`, e.g. `score_threshold=0.4`, `classes=["dog"]`.

    Raises:
      ConfigError: A setting is unknown, or its value is not allowed.

    Example:
      `images | DetectObjects("/models/yolov4", score_threshold=0.4)`
    """

    def __init__(
        self,
        model: str | ModelConfig | LoadModel,
        detect: DetectConfig | None = None,
        samples: int = 0,
        *,
        lazily: bool = False,
        **settings: Any,
    ):
        super().__init__()
        self._model = ModelConfig(path=model) if isinstance(model, str) else model
        self._detect = dataclasses.replace(detect or DetectConfig(), **settings)
        self._samples = samples
        self._lazily = lazily

    def expand(self, images: beam.PCollection[EncodedImage]) -> DetectedAndDead:
        """Wires the steps of the module's drawing."""
        handler = DetectorHandler(self._model, self._detect, self._samples, lazily=self._lazily)
        results = (
            images
            | "StartDetecting" >> beam.ParDo(StartDetecting(handler, self._detect))
            | "RunInference" >> RunInference(handler)
            | "PartDeadLetters" >> beam.FlatMap(_part).with_outputs("dead", main="detected")
        )
        return DetectedAndDead(results.detected, results.dead)


def detect_images(
    images: Iterable[EncodedImage], detector: Detector, detect: DetectConfig
) -> Iterator[DetectedImage | DeadLetter]:
    """Finds objects in images without Beam: starts images ahead, and yields one result for each, in their order.

    Args:
      images: Read lazily: at most `request_images` of them, and `request_mb` of encoded bytes, are under way.
      detector: Does the work, on its own threads.
      detect: The bounds.
    """
    ahead = _started_ahead(lambda: detector, detect)
    for image in images:
        yield from (started.value.finish(detector) for started in ahead.add(image))
    yield from (started.value.finish(detector) for started in ahead.rest())


def _started_ahead(detector: Callable[[], Detector], detect: DetectConfig) -> Prefetcher[EncodedImage, StartedImage]:
    def start(place: Slot[EncodedImage, StartedImage]) -> None:
        place.hold(len(place.element.content))
        place.result.set_result(StartedImage(place.element, detector().start(place.element)))

    return Prefetcher(start, detect.request_images, detect.request_mb * 1e6)


class StartedImage:
    """An image, and in the process that started it the future of its result; another process starts it again.

    Attributes:
      image: The image.
    """

    def __init__(self, image: EncodedImage, work: Future[DetectedImage | DeadLetter] | None = None):
        self.image = image
        self._work = work

    def __reduce__(self) -> tuple[Any, ...]:
        return StartedImage, (self.image,)

    def finish(self, detector: Detector) -> DetectedImage | DeadLetter:
        """Waits for the result."""
        return (self._work or detector.start(self.image)).result()


class StartDetecting(beam.DoFn):
    """Starts each image in the detector, and passes it on once enough newer images are under way.

    Bounded by count and by encoded bytes. Each image keeps its window and timestamp.
    """

    def __init__(self, handler: DetectorHandler, detect: DetectConfig):
        self._handler = handler
        self._detect = detect

    def setup(self) -> None:
        self._detector = self._handler.load_model()

    def start_bundle(self) -> None:
        self._ahead = _started_ahead(self._detector, self._detect)

    def process(
        self, image: EncodedImage, timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        return self._ahead.add(image, timestamp, window)

    def finish_bundle(self) -> Iterator[WindowedValue]:
        return self._ahead.rest()


class DetectorHandler(ModelHandler[StartedImage, DetectedImage | DeadLetter, Callable[[], Detector]]):
    """Loads the detector for RunInference, and sets how many images RunInference waits for at once.

    Such a request is larger than a device batch: the detector runs several batches at once, filled from all requests.
    The model of RunInference is a function that returns the process's detector.

    Args:
      lazily: Whether the first image loads the model, instead of the start of the worker.
    """

    def __init__(self, model: ModelConfig | LoadModel, detect: DetectConfig, samples: int = 0, *, lazily: bool = False):
        super().__init__()
        self._model = model
        self._detect = detect
        self._samples = samples
        self._lazily = lazily

    def load_model(self) -> Callable[[], Detector]:
        detector = functools.partial(shared_detector, self._model, self._detect, self._samples)
        if not self._lazily:
            detector()
        return detector

    def run_inference(
        self, batch: Sequence[StartedImage], model: Callable[[], Detector], inference_args: dict[str, Any] | None = None
    ) -> Iterable[DetectedImage | DeadLetter]:
        results, detector = [], model()
        for started in until_cancelled(batch):
            result = started.finish(detector)
            metrics.count_result(result, len(started.image.content))  # one by one, so that the display moves
            results.append(result)
        metrics.count_swaps(detector.counted_swaps())
        return results

    def batch_elements_kwargs(self) -> Mapping[str, Any]:
        size = min(_REQUEST_IMAGES, self._detect.request_images)
        share = functools.partial(_share_of_request, size=size, most_bytes=self._detect.request_mb * 1e6)
        return {"min_batch_size": size, "max_batch_size": size, "element_size_fn": share}

    def get_num_bytes(self, batch: Sequence[StartedImage]) -> int:
        return sum(len(started.image.content) for started in batch)

    def get_metrics_namespace(self) -> str:
        return "DetectObjects"


def _share_of_request(started: StartedImage, size: int, most_bytes: float) -> int:
    """What an image counts in a request of `size`: one, or its share of the bytes of a whole request if that is more."""
    share = len(started.image.content) / MEMORY.budget(most_bytes)
    return min(size, max(1, math.ceil(size * share)))


def _part(result: DetectedImage | DeadLetter) -> Iterable[Any]:
    yield beam.pvalue.TaggedOutput("dead", result) if isinstance(result, DeadLetter) else result
