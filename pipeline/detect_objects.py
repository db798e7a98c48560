"""`DetectObjects`: Beam's RunInference over the project's own model handler. Knows no mode, window, runner or flag."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.ml.inference.base import ModelHandler, RunInference

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detector import Detector, shared_detector
from pipeline.records import DeadLetter, DetectedImage, EncodedImage


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
      model: A SavedModel's path (local or `gs://`), or a `ModelConfig` for one that does not describe itself.
      detect: How to run it; keyword arguments below override single settings.
      samples: How many images get a thumbnail in their record (for a report).
      **settings: Any field of `DetectConfig`, e.g. `score_threshold=0.4`.

    Example:
      `images | DetectObjects("/models/yolov4", score_threshold=0.4)`
    """

    def __init__(
        self, model: str | ModelConfig = "digits", detect: DetectConfig | None = None, samples: int = 0, **settings: Any
    ):
        super().__init__()
        self._model = ModelConfig(path=model) if isinstance(model, str) else model
        self._detect = dataclasses.replace(detect or DetectConfig(), **settings)
        self._samples = samples

    def expand(self, images: beam.PCollection[EncodedImage]) -> DetectedAndDead:
        """Wires RunInference and parts its results."""
        results = (
            images
            | "RunInference" >> RunInference(DetectorHandler(self._model, self._detect, self._samples))
            | "PartDeadLetters" >> beam.FlatMap(_part).with_outputs("dead", main="detected")
        )
        return DetectedAndDead(results.detected, results.dead)


class DetectorHandler(ModelHandler[EncodedImage, DetectedImage | DeadLetter, Detector]):
    """Tells RunInference how to load the detector, and how many images to hand it at once.

    A request is larger than a device batch: the detector decodes ahead and keeps several batches in flight within it. Its
    bytes are bounded as well as its count, since 512 images of 12 megapixels would be two gigabytes.
    """

    def __init__(self, model: ModelConfig, detect: DetectConfig, samples: int = 0):
        super().__init__()
        self._model = model
        self._detect = detect
        self._samples = samples

    def load_model(self) -> Detector:
        return shared_detector(self._model, self._detect, self._samples)

    def run_inference(
        self, batch: Sequence[EncodedImage], model: Detector, inference_args: dict[str, Any] | None = None
    ) -> Iterable[DetectedImage | DeadLetter]:
        return model.detect(batch)

    def batch_elements_kwargs(self) -> Mapping[str, Any]:
        most, byte_limit = self._detect.request_images, self._detect.request_mb * 1e6

        def size(image: EncodedImage) -> int:
            return min(most, max(1, math.ceil(len(image.content) * most / byte_limit)))

        return {"min_batch_size": most, "max_batch_size": most, "element_size_fn": size}

    def get_num_bytes(self, batch: Sequence[EncodedImage]) -> int:
        return sum(len(image.content) for image in batch)

    def get_metrics_namespace(self) -> str:
        return "DetectObjects"


def _part(result: DetectedImage | DeadLetter) -> Iterable[Any]:
    yield beam.pvalue.TaggedOutput("dead", result) if isinstance(result, DeadLetter) else result
