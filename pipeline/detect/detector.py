"""A model behind a feeder and a batcher: chunks of images in, one `DetectedImage` or `DeadLetter` out for each image.

    start(images) -> feeder processes read, decode and fit -> a thread: batcher.run(pixels) -> boxes back to the images -> results

This process holds names, sizes and outputs; pixels stay in memory that the feeder processes fill and the engine reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

from msgspec.structs import replace

from pipeline.config import DetectConfig, ReadConfig
from pipeline.detect.batcher import Outputs
from pipeline.detect.canary import Canary
from pipeline.detect.detections import to_detections
from pipeline.detect.engine import BadOutput, OutOfMemory
from pipeline.detect.golden import disagreement, failing_request
from pipeline.detect.loaded_model import LoadedModel, ModelInUse
from pipeline.detect.merge_tiles import merge_tiles
from pipeline.errors import DeviceFailedError, ModelError
from pipeline.failures import Failure
from pipeline.feed.chunks import FedChunk
from pipeline.feed.feeder import Feeder
from pipeline.feed.fit import ModelInput
from pipeline.feed.read_image import GIVE_UP_SECONDS
from pipeline.feed.tiles import Tiles
from pipeline.feed.work import Limits
from pipeline.limits import MEMORY, Share, available_cpus
from pipeline.process import PROCESS
from pipeline.records import INLINE, DeadLetter, DetectedImage, Detections, EncodedImage, Image, Timing, ref_of
from pipeline.stats.canary_stats import CanaryStats
from pipeline.stats.counted import COUNTED
from pipeline.stats.job_stats import JobStats
from pipeline.stats.samples import Sampler
from pipeline.storage.fetch import RETRY_SECONDS
from pipeline.storage.store import FoundFile

Result = DetectedImage | DeadLetter

_THREADS = 1024  # at most; each waits for its batch, or for a version, and few do
_READ_AHEAD_BYTES = 512e6  # of all feeder processes of a host, where that is more than a photo of 5 MB for each of their threads
_PHOTO_BYTES = 5e6
_START_THREAD = "start new thread"  # in Python's error where the system has no room for one


class VersionWatch(Protocol):
    """Replaces the detector's model version while a job runs."""

    def close(self) -> None:
        """Stops the watch."""


class Detector:
    """Detects in images with a loaded model; thread-safe.

    Args:
      model: The model; the detector closes it.
      detect: How to run the model.
      samples: How many samples the job wants; images that may be among them get a thumbnail.
      read: How images that have no bytes yet are read.
      feeder: Of `feeder_of`, if it has been started before the model was loaded; the detector closes it.

    Attributes:
      in_use: The model version in use; swaps it.
      watched: Looks for other versions; None where the version is fixed.
      canary: The version that also gets a fraction of the images; None where there is none.
      no_canary: The version labelled canary and why it gets no images; None where no version has the label, or the canary runs.
      version_events: What has happened to versions since the last `counted_swaps`: `swaps` and `refusals`.
      ready_at: When the detector became usable, seconds since the epoch.
    """

    def __init__(
        self,
        model: LoadedModel,
        detect: DetectConfig,
        samples: int = 0,
        read: ReadConfig | None = None,
        feeder: Feeder | None = None,
    ):
        self.in_use = ModelInUse(model)
        self.watched: VersionWatch | None = None
        self.canary: Canary | None = None
        self.no_canary: CanaryStats | None = None
        self.version_events: deque[str] = deque()
        self._last_canary: Canary | None = None  # also after its end
        self._feeder_of_canary: Feeder
        self._settings = detect
        self._tiles = Tiles(detect.tiles, int(detect.tile_overlap * detect.tiles), detect.tile_whole) if detect.tiles else None
        self._sampler, self._has_samples = Sampler(samples), samples > 0
        self._under_way: set[Future[list[Result]]] = set()
        self._pool = ThreadPoolExecutor(_THREADS, "detect")
        self._pool.submit(time.time).result()  # one thread is there, also where the system has no room for more
        self._read = read or ReadConfig()
        self._feeder = feeder or feeder_of(detect)
        open_feeder(self._feeder, detect, self._read)
        self._is_closed = False
        self.ready_at = time.time()

    @property
    def model(self) -> LoadedModel:
        """The model version in use."""
        return self.in_use.current

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Allowed batch sizes, ascending."""
        return self.model.batcher.batch_sizes

    @property
    def chunk_size(self) -> int:
        """Most images that are fed and run together: a batch, or one image in tiles, or of a model that takes any size.

        A swap may change it.
        """
        return _chunk_size(self.model, self._tiles)

    @property
    def chunks_in_flight(self) -> int:
        """How many chunks keep the feeder processes and the model busy, as far as memory has room for their pixels."""
        model, size = self.model, self.chunk_size
        to = ModelInput.of(model.metadata, self._tiles)
        images = self._feeder.processes * self._feeder.images_ahead(to)
        wanted = 1 - (-(images + model.batcher.images_in_flight) // size)
        (height, width), pictures = to.most_hw, 2 * self._feeder.tiles_at_once(to, _portion(model)) if to.tiles else size
        return max(2, int(min(wanted, self._feeder.most_bytes / (height * width * 3 * pictures))))

    def check(self, model: LoadedModel) -> str | None:
        """Why a version must not be used, in one line; None if it passes its checks."""
        if self._settings.tile_whole and model.metadata.resize == "none":
            return "it takes images at their own size, and tile_whole would give it all of a large image at once; leave it out"
        with contextlib.ExitStack() as checked:
            feeder = self._feeder
            if not self.in_use.is_lent:  # images that wait for a version hold all memory of this one
                feeder = checked.enter_context(contextlib.closing(self._small_feeder()))
            detect_in = functools.partial(self._detect_with, model, feeder, tiles=None)  # golden images are those of the model
            failure = failing_request(model.warmup_requests, model.batcher, detect_in)
            return failure or disagreement(model.golden, detect_in, self._settings)

    def use_canary(self, model: LoadedModel | None) -> None:
        """Gives this version a fraction of the images too; None: no version any more. Closes the former canary."""
        if former := self.canary:
            self.canary = None
            former.close()
            self._feeder_of_canary.close()
        if model:
            thumbnail = self._feeder.thumbnail if self._has_samples else None
            self._feeder_of_canary = self._small_feeder()  # so that a canary that hangs holds no memory of the version in use
            detect_in = functools.partial(self._detect_with, model, self._feeder_of_canary, tiles=self._tiles)
            self.canary = self._last_canary = Canary(model, self.model.version, self._settings, detect_in, thumbnail)

    def _small_feeder(self) -> Feeder:
        one_process = dataclasses.replace(self._settings, feeder_processes=1)
        feeder = feeder_of(one_process)
        open_feeder(feeder, one_process, self._read)
        return feeder

    def canary_stats(self, wait_s: float = 0.0) -> CanaryStats | None:
        """Figures of the current or the last canary; waits up to `wait_s` seconds for its images under way."""
        return self._last_canary.figures(wait_s) if self._last_canary else self.no_canary

    def model_stats(self, wait_s: float = 0.0) -> JobStats:
        """Facts of the model in use, and the figures of `canary_stats`."""
        notes, names = self.model.notes, self.model.metadata.class_names
        in_use = (self.model.metadata.name, self.model.version)
        canary = self.canary_stats(wait_s)
        return JobStats(batch_sizes=self.batch_sizes, canary=canary, model_notes=notes, class_names=names, in_use=in_use)

    def note_event(self, name: str) -> None:
        """Counts a swap or a refusal: for what this process serves at once, for Beam's counters with the next chunk."""
        self.version_events.append(name)
        with COUNTED.lock:
            COUNTED.model_events[name] += 1

    def counted_swaps(self) -> Counter[str]:
        """`swaps` and `refusals` of versions and the canary's counts, since the last call."""
        counts = Counter[str]()
        with contextlib.suppress(IndexError):
            while True:
                counts[self.version_events.popleft()] += 1
        if not self._last_canary:
            return counts
        of_canary = self._last_canary.take_counts()
        with COUNTED.lock:
            COUNTED.model_events.update(of_canary)
        return counts + of_canary

    def stop_waiting(self) -> None:
        """Skips images of messages whose store does not answer, since the job ends."""
        self._feeder.stop_waiting()

    def close(self) -> None:
        """Finishes the images under way, then frees memory, threads and processes; images that come later raise `ModelError`."""
        self._is_closed = True
        if self.watched:
            self.watched.close()
        self.stop_waiting()
        wait(list(self._under_way))
        self._pool.shutdown()
        self.use_canary(None)
        self._feeder.close()
        self.in_use.close()

    def look_up(self, locations: Sequence[str], seconds: float) -> list[Future[list[FoundFile | None]]]:
        """Begins to look up files in the feeder processes; see `Feeder.look_up`."""
        return self._feeder.look_up(locations, seconds)

    def start(self, images: Sequence[Image]) -> Future[list[Result]]:
        """Starts detection in at least one image; they end together, with a result for each, in their order.

        More than `chunk_size` are fed apart: they may have been collected for a version with larger chunks.
        """
        model = self.model
        size = _chunk_size(model, self._tiles)
        parts = [self._start(model, images[n : n + size]) for n in range(0, len(images), size)]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _start(self, model: LoadedModel, images: Sequence[Image]) -> Future[list[Result]]:
        result: Future[list[Result]] = Future()
        self._under_way.add(result)
        result.add_done_callback(self._under_way.discard)
        started_at = time.time()
        feeding = self._feed(self._feeder, images, model, self._tiles, self._sampler.below())
        feeding.add_done_callback(functools.partial(self._on_fed, started_at, result))
        return result

    def detect(self, images: Sequence[Image]) -> list[Result]:
        """Detects in all images; one result for each, in their order."""
        return self.start(images).result() if images else []

    @staticmethod
    def _feed(
        feeder: Feeder, images: Sequence[Image], model: LoadedModel, tiles: Tiles | None, sample_below: int = 0
    ) -> Future[FedChunk]:
        to = ModelInput.of(model.metadata, tiles)
        return feeder.start(images, to, sample_below, feeder.tiles_at_once(to, _portion(model)) if tiles else 1)

    def _on_fed(self, started_at: float, result: Future[list[Result]], feeding: Future[FedChunk]) -> None:
        try:
            self._pool.submit(self._detect_fed, feeding, started_at, result)
        except RuntimeError as err:
            if _START_THREAD not in str(err):  # then another thread takes it
                # else the interpreter ends, as after Ctrl-C
                result.set_exception(ModelError("the detector is closed") if self._is_closed else KeyboardInterrupt())

    def _detect_fed(self, feeding: Future[FedChunk], started_at: float, result: Future[list[Result]]) -> None:
        images = 0
        try:
            fed = feeding.result()
            images = len(fed.images)
            PROCESS.parts["detector"].begin(images)
            result.set_result(self._detect_in_use(fed, started_at))
        except BaseException as err:  # noqa: BLE001  the future passes it on
            if isinstance(err, DeviceFailedError):
                PROCESS.fail(err)
            result.set_exception(err)
        finally:
            PROCESS.parts["detector"].end(images)

    def _detect_in_use(self, fed: FedChunk, started_at: float) -> list[Result]:
        try:
            with self.in_use.taken() as model:  # one version for all of these images
                if fed.model_input == ModelInput.of(model.metadata, self._tiles):
                    found = self._run(model, fed, started_at)
                else:  # a version with another input came in between
                    fed.discard()
                    found = self._detect_with(model, self._feeder, fed.images, started_at, tiles=self._tiles)
        finally:
            fed.discard()
        if canary := self.canary:
            for image, result in zip(fed.images, found, strict=True):
                canary.record_stable(image, result)
        return [self._with_thumbnail(image, result) for image, result in zip(fed.images, found, strict=True)]

    def _detect_with(
        self, model: LoadedModel, feeder: Feeder, images: Sequence[Image], started_at: float | None = None, *, tiles: Tiles | None
    ) -> list[Result]:
        """Detects with a version for whose input the images are not fitted yet, in chunks of its own."""
        found: list[Result] = []
        size = _chunk_size(model, tiles)
        for n in range(0, len(images), size):
            fed = self._feed(feeder, images[n : n + size], model, tiles).result()
            try:
                found += self._run(model, fed, started_at or time.time())
            finally:
                fed.discard()
        return found

    def _run(self, model: LoadedModel, fed: FedChunk, started_at: float) -> list[Result]:
        PROCESS.check_stopped()
        if fed.model_input.tiles:
            return [self._run_tiles(model, fed, started_at)]
        results: dict[int, Result] = {place: self._dead(fed.images[place], failure) for place, failure in fed.failures.items()}
        for outputs in model.batcher.run(fed.pixels):
            results |= self._results(model, fed, outputs, started_at)
        return [results[place] for place in range(len(fed.images))]

    def _run_tiles(self, model: LoadedModel, fed: FedChunk, started_at: float) -> Result:
        """The one result of an image, once all of its tiles have theirs; a failure of one is that of the image."""
        results: list[Result] = []
        for portion in fed.portions():
            PROCESS.check_stopped()
            PROCESS.parts["detector"].progressed()
            results += [self._dead(fed.images[0], failure) for failure in portion.failures.values()]
            for outputs in model.batcher.run(portion.pixels):
                results += [result for _, result in self._results(model, portion, outputs, started_at)]
            if dead := [result for result in results if isinstance(result, DeadLetter)]:
                return dead[0]
        return merge_tiles([each for each in results if isinstance(each, DetectedImage)], self._settings)

    def _dead(self, image: Image, failure: Failure) -> DeadLetter:
        letter = failure.dead_letter(ref_of(image), _payload(image))
        is_skipped = failure.reason == "storage_unavailable" and letter.ref.message_id and not self._feeder.waits
        return replace(letter, skipped=True) if is_skipped else letter

    def _results(self, model: LoadedModel, fed: FedChunk, outputs: Outputs, started_at: float) -> Iterator[tuple[int, Result]]:
        """The results for the images (or tiles of one) of one batch, by their place in the chunk."""
        returned_at, batch = time.monotonic(), fed.fitted[outputs.start : outputs.stop]
        found: Sequence[Detections | Failure]
        if outputs.error:
            found = [_failure_of(outputs.error)] * len(batch)
        else:
            transforms = fed.transforms(outputs.start, outputs.stop)
            found = to_detections(outputs.arrays, model.metadata, transforms, self._settings)
        now, name, version = time.time(), model.metadata.name, model.version
        predict_s, postprocess_s = returned_at - fed.fed_at, (time.monotonic() - returned_at) / len(batch)
        batch_size, batch_s = outputs.batch_size, outputs.seconds
        for fitted, detections in zip(batch, found, strict=True):
            image = fed.images[fitted.place]
            if isinstance(detections, Failure):
                letter = self._dead(image, replace(detections, generation=fitted.generation))
                yield fitted.place, replace(letter, model_name=name, model_version=version, thumbnail=fitted.thumbnail)
                continue
            ref = replace(ref_of(image), generation=fitted.generation)
            latency_s = now - (fitted.received_at or started_at)
            timing = Timing(fitted.read_s, fitted.decode_s, predict_s, postprocess_s, latency_s, now, batch_size, batch_s)
            yield fitted.place, DetectedImage(ref, *fitted.image_wh, name, version, detections, timing, fitted.thumbnail)
            batch_size, batch_s = 0, 0.0  # a sum over images counts each batch once

    def _with_thumbnail(self, image: Image, result: Result) -> Result:
        """The same result, with a thumbnail only if it may be a sample; the image is read again if the result has none."""
        if not self._sampler.wants(result):
            return replace(result, thumbnail=b"") if result.thumbnail else result
        if result.thumbnail:
            return result
        return replace(result, thumbnail=self._feeder.thumbnail(image if isinstance(image, EncodedImage) else result.ref))


def _failure_of(error: BaseException) -> Failure:
    """Why an image has no result on which the model has failed, while a blank one runs."""
    if isinstance(error, BadOutput):
        return Failure("detect", "bad_output", str(error))
    if isinstance(error, OutOfMemory):
        return Failure("detect", "no_room", f"the device has no memory on this image alone: {error}")
    return Failure("detect", "model_failed", f"the model fails on this image alone: {error}")


def feeder_of(detect: DetectConfig) -> Feeder:
    """Starts the feeder processes of a detector, which need no model yet."""
    return Feeder(detect.feeder_processes or available_cpus())


def open_feeder(feeder: Feeder, detect: DetectConfig, read: ReadConfig) -> None:
    """Lets feeder processes work."""
    feeder.open(limits_of(feeder.processes, detect, read), MEMORY.budget())


def limits_of(processes: int, detect: DetectConfig, read: ReadConfig) -> Limits:
    """What each of so many feeder processes may take, where the launcher's other processes have as many."""
    of_host = processes * Share.of_environment().of
    threads = -(-read.threads_of(of_host) // of_host)
    read_ahead_bytes = max(_READ_AHEAD_BYTES / of_host, _PHOTO_BYTES * (threads + 1))  # one is decoded meanwhile
    return Limits(
        max_pixels=detect.max_megapixels * 1e6,
        scaled_decode=detect.scaled_decode,
        max_file_bytes=read.max_file_bytes,
        read_threads=threads,
        read_ahead_bytes=min(read_ahead_bytes, MEMORY.budget() / processes),
        memory_bytes=MEMORY.limit_bytes,
        processes=processes,
        retry_seconds=RETRY_SECONDS,
        give_up_seconds=GIVE_UP_SECONDS,
    )


def _chunk_size(model: LoadedModel, tiles: Tiles | None) -> int:
    return 1 if tiles or model.metadata.resize == "none" else model.batcher.batch_sizes[-1]


def _joined(parts: Sequence[Future[list[Result]]]) -> Future[list[Result]]:
    """The results of all parts, once the last one has ended."""
    joined: Future[list[Result]] = Future()
    left = itertools.count(len(parts) - 1, -1)

    def end(_part: Future[list[Result]]) -> None:
        if next(left) == 0:
            try:
                joined.set_result([found for part in parts for found in part.result()])
            except BaseException as err:  # noqa: BLE001  the future passes it on
                joined.set_exception(err)

    for part in parts:
        part.add_done_callback(end)
    return joined


def _portion(model: LoadedModel) -> int:
    """How many tiles fill all concurrent batches."""
    return max(1, model.batcher.images_in_flight // 2)


def _payload(image: Image) -> bytes:
    """The image's bytes for its dead letter, if they came in a message and cannot be read again."""
    return image.content if isinstance(image, EncodedImage) and image.ref.uri.startswith(INLINE) else b""
