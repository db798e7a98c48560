"""`DetectObjects`: finds objects in images, with one model for each process, through Beam's RunInference.

    ImageRef or EncodedImage --> StartDetecting ----> Chunk -------> RunInference --> PartDeadLetters --> detected
                                      | start      (a future)           | results         `--> dead
                                      v                                 v
                 Detector: feeder processes read and decode --> model --> a result for each image

The work begins in StartDetecting, which hands chunks of images to the process's detector and passes each on only once enough
newer ones are under way. RunInference only waits for the results. So images are read and decoded ahead of need, and the model
never idles while the results of a chunk go downstream. `detect_images` does the same without Beam.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple, cast

import apache_beam as beam
from apache_beam.ml.inference.base import ModelHandler, RunInference
from apache_beam.utils.windowed_value import WindowedValue

from pipeline.beam_internals import let_inference_measure_memory
from pipeline.config import DetectConfig, ModelConfig, ReadConfig
from pipeline.detect.detector import Detector, Result
from pipeline.detect.given_images import GivenImage, as_records
from pipeline.detect.load_detector import DetectorSpec, checked_settings, count_steps, shared_detector
from pipeline.detect.loaded_model import LoadModel
from pipeline.limits import MEMORY
from pipeline.process import PROCESS
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, Image
from pipeline.stats import beam_metrics

_MOST_BYTES = 64e6  # of encoded images under way
_BYTES_PER_IMAGE = 1000  # of its name and its result, pickled
_LOOK_SECONDS = 0.5  # how soon a wait for the model notices that the job was stopped

let_inference_measure_memory()


class DetectedAndDead(NamedTuple):
    """The outputs of `DetectObjects`; each image is in exactly one of them."""

    detected: beam.PCollection[DetectedImage]
    dead: beam.PCollection[DeadLetter]


class DetectObjects(beam.PTransform):
    """Finds objects in images, with one model for each process, shared by all bundles.

    Element in: `ImageRef`, whose image is read here, or `EncodedImage`. Elements out: `DetectedImage` or `DeadLetter`, one for
    each image, with its window and timestamp. Bounded or unbounded. A retried bundle gives the same rows, up to the last bits of
    floats.

    Args:
      model: A model's path (local or `gs://`), a `ModelConfig` for a model that does not describe itself, or a function that
        loads a model of another engine (`loaded_model`); or a `DetectorSpec`, which has all of the arguments but `lazily`.
      detect: How to run the model; the keyword arguments override its fields.
      samples: How many samples the job wants; images that may be among them get a thumbnail.
      read: How images are read that have no bytes yet.
      lazily: Whether the first image loads the model, instead of the start of the worker.
      **settings: Any field of `DetectConfig`, e.g. `score_threshold=0.4`, `classes=["dog"]`.

    Raises:
      ConfigError: A setting is unknown, or its value is not allowed.

    Example:
      `images | DetectObjects("/models/yolov4", score_threshold=0.4)`
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | ModelConfig | LoadModel | DetectorSpec,
        detect: DetectConfig | None = None,
        samples: int = 0,
        *,
        read: ReadConfig | None = None,
        lazily: bool = False,
        **settings: Any,
    ):
        super().__init__()
        if isinstance(model, DetectorSpec):
            spec = model
        else:
            spec = DetectorSpec(*checked_settings(model, detect, settings), samples, read or ReadConfig())
        self._handler = DetectorHandler(spec, lazily=lazily)

    def expand(self, images: beam.PCollection[Image]) -> DetectedAndDead:
        """Wires the steps of the module's drawing."""
        results = (
            images
            | "StartDetecting" >> beam.ParDo(StartDetecting(self._handler)).with_output_types(Chunk)
            | "RunInference" >> RunInference(self._handler)
            | "PartDeadLetters" >> beam.FlatMap(_part).with_outputs("dead", main="detected")
        )
        return DetectedAndDead(results.detected, results.dead)


def detect_images(images: Iterable[GivenImage], detector: Detector, *, bgr: bool = False) -> Iterator[Result]:
    """Finds objects in images without Beam: starts images ahead, and yields one result for each, in their order.

    Args:
      images: Paths, URIs, bytes of image files, arrays `(H, W, 3) uint8` RGB, images of Pillow, or records. An image without a
        name has `images[<place>]` as its URI. Read lazily: as many as keep the detector busy, and at most 64 MB of them, are
        under way.
      detector: Does the work, on its own threads and processes.
      bgr: Whether arrays are BGR, as OpenCV reads them.

    Raises:
      TypeError: `images` is one image, or none; while the results are read, an element is no image.
    """
    return _detect(as_records(images, bgr=bgr), detector)


def _detect(images: Iterable[Image], detector: Detector) -> Iterator[Result]:
    chunks = _Chunks(detector)
    for image in images:
        for chunk in chunks.add(image):
            yield from chunk.finish(detector).results
    for chunk in chunks.rest():
        yield from chunk.finish(detector).results


@dataclasses.dataclass(eq=False)
class Chunk:
    """Images, and in the process that started them the future of their results; another process starts them again.

    Attributes:
      images: The images.
      places: Timestamp and window of each.
      results: One for each image; empty until they are there.
      work: The future.
    """

    images: Sequence[Image]
    places: Sequence[tuple[Any, Any]]
    results: Sequence[Result] = ()
    work: Future[list[Result]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Chunk, (self.images, self.places, self.results)

    @property
    def encoded_bytes(self) -> int:
        """Bytes of images that are held."""
        return sum(map(_bytes_of, self.images))

    def finish(self, detector: Detector) -> Chunk:
        """Waits for the results; returns the chunk with them.

        Raises:
          KeyboardInterrupt: The job was stopped.
        """
        work = self.work or detector.start(self.images)
        while not wait([work], _LOOK_SECONDS).done:
            PROCESS.check_stopped()
        return Chunk(self.images, self.places, work.result())


class ChunkCoder(beam.coders.Coder):
    """Beam's pickling of chunks. Beam asks for the size of most elements; an estimate spares their pickling."""

    _pickle = beam.coders.PickleCoder()

    def encode(self, chunk: Chunk) -> bytes:
        """The bytes of a chunk, without the future."""
        return cast("bytes", self._pickle.encode(chunk))

    def decode(self, content: bytes) -> Chunk:
        """The chunk of these bytes."""
        return cast("Chunk", self._pickle.decode(content))

    def estimate_size(self, chunk: Chunk) -> int:
        """About the length of these bytes."""
        return chunk.encoded_bytes + _BYTES_PER_IMAGE * len(chunk.images)


beam.coders.registry.register_coder(Chunk, ChunkCoder)


class _Chunks:
    """Collects images into chunks, and starts these ahead of need, bounded by count and by encoded bytes."""

    def __init__(self, detector: Detector):
        self._detector = detector
        self._images: list[Image] = []
        self._places: list[tuple[Any, Any]] = []
        self._bytes = 0  # of these images
        self._under_way: deque[tuple[Chunk, int]] = deque()  # with their bytes

    def add(self, image: Image, timestamp: Any = None, window: Any = None) -> Iterable[Chunk]:
        """Adds an image; yields the oldest chunks while too many are under way."""
        self._images.append(image)
        self._places.append((timestamp, window))
        self._bytes += _bytes_of(image)
        is_full = len(self._images) >= self._detector.chunk_size or self._bytes >= _MOST_BYTES
        return self._start() if is_full else ()

    def rest(self) -> Iterator[Chunk]:
        if self._images:
            yield from self._start()
        yield from self._pass_on(0, 0)

    def _start(self) -> Iterator[Chunk]:
        chunk = Chunk(self._images, self._places, work=self._detector.start(self._images))
        self._under_way.append((chunk, self._bytes))
        self._images, self._places, self._bytes = [], [], 0
        return self._pass_on(self._detector.chunks_in_flight, MEMORY.budget(_MOST_BYTES))

    def _pass_on(self, most: int, most_bytes: float) -> Iterator[Chunk]:
        """Yields the oldest chunks while more are under way; a chunk counts until the next one is wanted, so it has ended."""
        while len(self._under_way) > most or (len(self._under_way) > 1 and sum(n for _, n in self._under_way) > most_bytes):
            yield self._under_way[0][0]
            self._under_way.popleft()


def _bytes_of(image: Image) -> int:
    return len(image.content) if isinstance(image, EncodedImage) else 0


class StartDetecting(beam.DoFn):
    """Starts chunks of images in the detector, and passes each on once enough newer ones are under way."""

    def __init__(self, handler: DetectorHandler):
        self._handler = handler

    def setup(self) -> None:
        count_steps(self._handler.spec, 1)
        self._detector = self._handler.load_model()

    def teardown(self) -> None:
        count_steps(self._handler.spec, -1)

    def start_bundle(self) -> None:
        self._chunks: _Chunks | None = None

    def process(
        self, image: Image, timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterable[WindowedValue]:
        if not self._chunks:
            self._chunks = _Chunks(self._detector())
        return map(_in_window, self._chunks.add(image, timestamp, window))

    def finish_bundle(self) -> Iterable[WindowedValue]:
        return map(_in_window, self._chunks.rest()) if self._chunks else ()


def _in_window(chunk: Chunk) -> WindowedValue:
    timestamp, window = chunk.places[0]
    return WindowedValue(chunk, timestamp, (window,))


class DetectorHandler(ModelHandler[Chunk, Chunk, Callable[[], Detector]]):
    """Loads the detector for RunInference, which waits for one chunk at a time.

    The detector runs several chunks at once, started ahead. The model of RunInference is a function that returns the process's
    detector.

    Args:
      spec: Of the detector.
      lazily: Whether the first image loads the model, instead of the start of the worker.
    """

    def __init__(self, spec: DetectorSpec, *, lazily: bool = False):
        super().__init__()
        self.spec = spec
        self._load = functools.partial(shared_detector, spec)
        self._lazily = lazily

    def load_model(self) -> Callable[[], Detector]:
        if not self._lazily:
            self._load()
        return self._load

    def run_inference(
        self, batch: Sequence[Chunk], model: Callable[[], Detector], inference_args: dict[str, Any] | None = None
    ) -> Iterable[Chunk]:
        detector = model()
        finished = [chunk.finish(detector) for chunk in batch]
        beam_metrics.count_results(*(result for chunk in finished for result in chunk.results))
        beam_metrics.count_swaps(detector.counted_swaps())
        return finished

    def batch_elements_kwargs(self) -> Mapping[str, Any]:
        return {"min_batch_size": 1, "max_batch_size": 1}

    def get_num_bytes(self, batch: Sequence[Chunk]) -> int:
        return sum(chunk.encoded_bytes for chunk in batch)

    def get_metrics_namespace(self) -> str:
        return "DetectObjects"


def _part(chunk: Chunk) -> Iterable[Any]:
    """Each result in the window and at the time of its image."""
    for (timestamp, window), result in zip(chunk.places, chunk.results, strict=True):
        windowed = WindowedValue(result, timestamp, (window,))
        yield beam.pvalue.TaggedOutput("dead", windowed) if isinstance(result, DeadLetter) else windowed
