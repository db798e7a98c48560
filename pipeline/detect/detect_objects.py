"""`DetectObjects`: Beam's RunInference over the project's own model handler. Knows no mode, window, runner or flag."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.ml.inference.base import ModelHandler, RunInference
from apache_beam.utils.windowed_value import WindowedValue

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.detector import Detector
from pipeline.detect.load_detector import shared_detector
from pipeline.detect.loaded_model import LoadModel
from pipeline.prefetch import Prefetcher, Slot
from pipeline.records import DeadLetter, DetectedImage, EncodedImage
from pipeline.stats import metrics

_REQUEST_IMAGES = 64  # what RunInference waits for at once; as many as request_images more are under way


class DetectedAndDead(NamedTuple):
    """The two outputs of `DetectObjects`: each image is in exactly one of them."""

    detected: beam.PCollection[DetectedImage]
    dead: beam.PCollection[DeadLetter]


class DetectObjects(beam.PTransform):
    """Finds objects in images, with one model per process shared by all bundles.

    Element in: `EncodedImage`. Elements out: `DetectedImage` or `DeadLetter`, one for each image, in the window and at the
    time of the image.
    Bounded or unbounded; deterministic but for the last bits of floats, so a retried bundle gives the same rows.

    Args:
      model: A SavedModel's path (local or `gs://`), a `ModelConfig` for one that does not describe itself, or a function that
        loads a model of another engine (`loaded_model`).
      detect: How to run it; keyword arguments below override single settings.
      samples: How many images get a thumbnail in their record (for a report).
      **settings: Any field of `DetectConfig`, e.g. `score_threshold=0.4`, `classes=["dog"]`.

    Raises:
      ConfigError: A setting is unknown, or its value is none that it may have.

    Example:
      `images | DetectObjects("/models/yolov4", score_threshold=0.4)`
    """

    def __init__(
        self,
        model: str | ModelConfig | LoadModel = "digits",
        detect: DetectConfig | None = None,
        samples: int = 0,
        **settings: Any,
    ):
        super().__init__()
        self._model = ModelConfig(path=model) if isinstance(model, str) else model
        self._detect = dataclasses.replace(detect or DetectConfig(), **settings)
        self._samples = samples

    def expand(self, images: beam.PCollection[EncodedImage]) -> DetectedAndDead:
        """Wires a head start, RunInference, and the parting of its results."""
        handler = DetectorHandler(self._model, self._detect, self._samples)
        results = (
            images
            | "StartDetecting" >> beam.ParDo(StartDetecting(handler, self._detect))
            | "RunInference" >> RunInference(handler)
            | "PartDeadLetters" >> beam.FlatMap(_part).with_outputs("dead", main="detected")
        )
        return DetectedAndDead(results.detected, results.dead)


class StartedImage:
    """An image that the detector of this process has begun to work on; elsewhere, just the image.

    Attributes:
      image: The image.
    """

    def __init__(self, image: EncodedImage, work: Future[DetectedImage | DeadLetter] | None = None):
        self.image = image
        self._work = work

    def __reduce__(self) -> tuple[Any, ...]:
        return StartedImage, (self.image,)  # a runner that moves it to another process starts it again there

    def finish(self, detector: Detector) -> DetectedImage | DeadLetter:
        """Waits for the result."""
        return (self._work or detector.start(self.image)).result()


class StartDetecting(beam.DoFn):
    """Hands each image to the detector as soon as it is read, and passes it on only when enough newer ones are under way.

    So the model works while the first request fills, and never drains while the results of one request are passed on. Bounded by
    count and by encoded bytes. Each image keeps its window and timestamp.
    """

    def __init__(self, handler: DetectorHandler, detect: DetectConfig):
        self._handler = handler
        self._most = detect.request_images
        self._most_bytes = detect.request_mb * 1e6

    def setup(self) -> None:
        self._detector = self._handler.load_model()

    def start_bundle(self) -> None:
        self._ahead: Prefetcher[EncodedImage, StartedImage] = Prefetcher(self._start, self._most, self._most_bytes)

    def process(
        self, image: EncodedImage, timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        return self._ahead.add(image, timestamp, window)

    def finish_bundle(self) -> Iterator[WindowedValue]:
        return self._ahead.rest()

    def _start(self, place: Slot[EncodedImage, StartedImage]) -> None:
        place.hold(len(place.element.content))
        place.result.set_result(StartedImage(place.element, self._detector.start(place.element)))


class DetectorHandler(ModelHandler[StartedImage, DetectedImage | DeadLetter, Detector]):
    """Tells RunInference how to load the detector, and how many images to hand it at once.

    A request is larger than a device batch, and its images are under way when it comes: the detector keeps several batches in
    flight, filled with the images of whatever requests there are.
    """

    def __init__(self, model: ModelConfig | LoadModel, detect: DetectConfig, samples: int = 0):
        super().__init__()
        self._model = model
        self._detect = detect
        self._samples = samples

    def load_model(self) -> Detector:
        return shared_detector(self._model, self._detect, self._samples)

    def run_inference(
        self, batch: Sequence[StartedImage], model: Detector, inference_args: dict[str, Any] | None = None
    ) -> Iterable[DetectedImage | DeadLetter]:
        results = []
        for started in batch:
            result = started.finish(model)
            metrics.count_result(result, len(started.image.content))  # one by one: the display moves while the next is waited for
            results.append(result)
        metrics.count_swaps(model.counted_swaps())
        return results

    def batch_elements_kwargs(self) -> Mapping[str, Any]:
        size = min(_REQUEST_IMAGES, self._detect.request_images)
        return {"min_batch_size": size, "max_batch_size": size}

    def get_num_bytes(self, batch: Sequence[StartedImage]) -> int:
        return sum(len(started.image.content) for started in batch)

    def get_metrics_namespace(self) -> str:
        return "DetectObjects"


def _part(result: DetectedImage | DeadLetter) -> Iterable[Any]:
    yield beam.pvalue.TaggedOutput("dead", result) if isinstance(result, DeadLetter) else result
