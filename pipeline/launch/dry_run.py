"""The lines of `--dry-run`: the input, the model, what it detects in one image, and what looks wrong.

A model's files do not show whether its description is wrong; its boxes and classes do.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import Config
from pipeline.detect.detector import Detector
from pipeline.listing.containers import images_in
from pipeline.listing.dead_letter_replay import are_letters
from pipeline.listing.names import is_container
from pipeline.log_lines import plural, say
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, ImageRef, identity_hash, mostly_outside
from pipeline.stats.summary import left_out_line
from pipeline.storage.fetch import fetch

_SHOWN = 5  # names, or objects
_TRIED = 5  # images


def shown(names: Iterable[str]) -> Iterator[str]:
    """The first few names, a line each."""
    for number, name in enumerate(names):
        yield f"         {name if number < _SHOWN else '…'}"
        if number == _SHOWN:
            return


class Planned:
    """What a job would read: counts, and the first few of each kind. It grows by 8 bytes an image, for those named twice.

    Attributes:
      first: The first few new images, by name.
      containers: The same of containers, whose images nobody has counted.
    """

    def __init__(self) -> None:
        self.first: list[ImageRef] = []
        self.containers: list[ImageRef] = []
        self._new, self._done, self._bad = array("Q"), array("Q"), array("Q")
        self._messages: list[str] = []
        self._warnings: list[str] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing was named."""
        return not (self._new or self._done or self._bad or self.containers or self._warnings)

    def add(self, found: Sequence[ImageRef | DeadLetter], is_done: np.ndarray) -> None:
        """Adds some of a listing, with which of them are done, `(N,) bool`."""
        new = list(compress(found, ~is_done))
        self._done.extend(identity_hash(_uri(each)) for each in compress(found, is_done))
        refs = [each for each in new if isinstance(each, ImageRef)]
        letters = [each for each in new if isinstance(each, DeadLetter)]
        images = [ref for ref in refs if not is_container(ref.uri)]
        self._new.extend(identity_hash(ref.uri) for ref in images)
        self.first = _first([*self.first, *images])
        self.containers = _first([*self.containers, *(ref for ref in refs if is_container(ref.uri))])
        bad = [letter for letter in letters if letter.reason == "bad_line"]
        self._bad.extend(identity_hash(letter.ref.uri) for letter in bad)
        self._messages = list(dict.fromkeys([*self._messages, *(letter.message for letter in bad)]))[: _SHOWN + 1]
        self._warnings = [*self._warnings, *(letter.message for letter in letters if letter.reason != "bad_line")][:1]

    def lines(self, left_out: Counter[str]) -> Iterator[str]:
        """How many images a job would read, the first few, what manifests name wrongly, and the files that are no images."""
        done, bad = _different(self._done), _different(self._bad)
        skipped = f", and {done} that {'is' if done == 1 else 'are'} done" if done else ""
        lines = f", and {plural(bad, 'line')} of manifests that {'names' if bad == 1 else 'name'} none" if bad else ""
        files = f"; skipped: {left_out_line(left_out)}" if left_out else ""
        yield f"input    {plural(_different(self._new), 'image')}{skipped}{lines}{files}"
        yield from shown(ref.uri for ref in self.first)
        yield from shown(self._messages)
        yield from (f"warning  {message}" for message in self._warnings)


def _uri(found: ImageRef | DeadLetter) -> str:
    return found.uri if isinstance(found, ImageRef) else found.ref.uri


def _first(refs: Iterable[ImageRef]) -> list[ImageRef]:
    """The first few by name, and one more; each once."""
    return sorted({ref.uri: ref for ref in refs}.values(), key=lambda ref: ref.uri)[: _SHOWN + 1]


def _different(hashes: array[int]) -> int:
    return len(np.unique(np.frombuffer(hashes, np.uint64))) if hashes else 0


def model_lines(detector: Detector | None, config: Config) -> Iterator[str]:
    """The model and its batch sizes; without a detector, that it is in the image of workers."""
    if detector is None:
        yield f"model    {config.model.path} is in the image of the workers: no image is tried here"
        return
    model = detector.model
    height, width = model.metadata.input_hw
    size = "images at their own size" if model.metadata.resize == "none" else f"{width}x{height} {model.metadata.resize}"
    yield f"model    {model.metadata.name} {model.version}, {size}, {plural(len(model.metadata.class_names), 'class', 'classes')}"
    engine = model.engine_name or config.detect.engine
    yield f"batches  {', '.join(map(str, detector.batch_sizes))} at {config.detect.precision} on {engine}"
    yield from (f"note     {note}" for note in model.notes)


def first_images(uris: Iterable[str], config: Config) -> Iterator[EncodedImage | DeadLetter]:
    """A few images to try, each read when the caller takes it; images before containers."""
    named = sorted((uri for uri in uris if not are_letters(uri)), key=is_container)
    for ref in map(ImageRef, named[:_TRIED]):
        if is_container(ref.uri):
            found = images_in(ref, config.read, max_megapixels=config.detect.max_megapixels)
            yield from itertools.islice((image for image in found if not isinstance(image, str)), _TRIED)
            continue
        read = fetch(ref, config.read.max_file_bytes)
        yield read if isinstance(read, EncodedImage) else read.dead_letter(ref)


def tried(detector: Detector, images: Iterable[EncodedImage | DeadLetter]) -> bool:
    """Detects until one image succeeds; prints its detections, and why each image before it failed.

    Returns:
      Whether one succeeded, or there was none to try.
    """
    image = None
    for image in images:
        result = image if isinstance(image, DeadLetter) else detector.detect([image])[0]
        if isinstance(result, DetectedImage):
            say(_found_lines(result))
            say(f"warning  {doubt}" for doubt in doubts(result, detector.model.metadata))
            return True
        say([f"tried    {result.ref.uri}: dead letter, {result.reason}: {result.message}"])
    return image is None


def _found_lines(image: DetectedImage) -> Iterator[str]:
    found = image.detections
    yield f"tried    {image.ref.uri}: {image.width}x{image.height}, {plural(len(found), 'object')}"
    boxes = np.rint(found.boxes_xyxy).astype(int).tolist()
    objects = zip(found.class_names, found.confidences, boxes, strict=True)
    yield from shown(f"{name} {confidence:.2f} at {box}" for name, confidence, box in objects)


def doubts(image: DetectedImage, metadata: DetectorMetadata) -> Iterator[str]:
    """What looks wrong in one image's detections, with the settings that may cause it.

    Boxes with the right format and units cover at least one pixel of the model's input, and lie mostly inside the image.
    Only a person can tell `xyxy` from `yxyx` where boxes are shares.
    """
    found, names = image.detections, metadata.class_names
    boxes = found.boxes_xyxy.astype(np.float64)
    area = (boxes[:, 2:] - boxes[:, :2]).clip(0).prod(axis=-1)
    input_pixel = 1.0 if metadata.resize == "none" else image.width * image.height / np.prod(metadata.input_hw)
    described = f"model.box_format is {metadata.box_format}, model.box_units {metadata.box_units}"
    if (small := area < input_pixel).any():
        yield f"{small.sum()} of {len(found)} boxes are smaller than a pixel of the model's input; {described}"
    if outside := mostly_outside([image]):
        yield f"{outside} of {len(found)} boxes are for the most part outside of the image; {described}"
    unnamed = found.class_ids[(found.class_ids < 0) | (found.class_ids >= len(names))]
    if names and len(unnamed):
        offset = f"model.class_id_offset is {metadata.class_id_offset}"
        yield f"class {unnamed[0]} was found, class_names has 0 to {len(names) - 1}; {offset}"
