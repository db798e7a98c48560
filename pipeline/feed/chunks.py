"""What a `Feeder` works at: chunks of images, the units that feeder processes prepare of them, and chunks that are ready."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from models.geometry import InputTransform
from pipeline.failures import Failure
from pipeline.feed.fit import ModelInput
from pipeline.feed.read_image import store_name
from pipeline.feed.work import Fitted, LookUp, Prepared, Work
from pipeline.records import Image, ImageRef
from pipeline.storage.store import FoundFile


@dataclasses.dataclass
class FedChunk:
    """Images that are ready for the model; or some tiles of one image.

    Attributes:
      images: All images of the chunk.
      model_input: How they were fitted.
      pixels: `(n, H, W, 3) uint8`, in shared memory until `release`, of images, or of tiles of one.
      fitted: The image of each of these.
      failures: Place in `images` -> why it has no pixels, of all other images.
      fed_at: When the chunk was ready, by the monotonic clock.
      rest: The next tiles of the image; None with its last ones.
    """

    images: Sequence[Image]
    model_input: ModelInput
    pixels: np.ndarray
    fitted: list[Fitted]
    failures: dict[int, Failure]
    fed_at: float
    _release: Callable[[], None] | None
    rest: Future[FedChunk] | None = None

    def transforms(self, start: int, stop: int) -> list[InputTransform]:
        """How some of the images or tiles of `pixels` were fitted."""
        some = self.fitted[start:stop]
        if not self.model_input.tiles:
            return [self.model_input.plan(each.image_wh) for each in some]
        tiles, first = self.model_input.tiles_of(some[0].image_wh), some[0].first_tile
        return [self.model_input.plan_tile(tile) for tile in tiles[first + start : first + stop]]

    def portions(self) -> Iterator[FedChunk]:
        """All tiles of the image, some at a time; each portion is released when the next one is wanted."""
        portion: FedChunk | None = self
        while portion:
            yield portion
            portion = portion._following()

    def discard(self) -> None:
        """Releases all portions, also those to come."""
        portion: FedChunk | None = self
        while portion:
            portion = portion._following()

    def _following(self) -> FedChunk | None:
        self.release()
        return self.rest.result() if self.rest else None

    def release(self) -> None:
        """Lets other images have the shared memory, when nobody uses the pixels any more; further calls do nothing."""
        release, self._release = self._release, None
        if release:
            release()


class Chunk:
    """Images that are not ready yet."""

    def __init__(self, images: Sequence[Image], to: ModelInput, sample_below: int, most_tiles: int = 1):
        self.images = images
        self.to = to
        self.sample_below = sample_below
        self.most_tiles = most_tiles  # in each half of the slot
        self.is_begun = False  # the first tiles of its image are ready, and others will be
        self.result: Future[FedChunk] = Future()
        self.slot = -1
        self.fitted: list[Fitted] = []
        self.failures: dict[int, Failure] = {}
        self.units = 1  # that are not done

    @property
    def image_bytes(self) -> int:
        """Of each image's pixels, for a model whose input has one size; of two portions of tiles."""
        return math.prod(self.to.most_hw) * 3 * (2 * self.most_tiles if self.to.tiles else 1)


class Unit:
    """Some images of a chunk, at which one process works at a time."""

    def __init__(self, chunk: Chunk, places: Sequence[int]):
        self.chunk = chunk
        self.places = places
        self.singles: deque[int] = deque()  # places to try one by one, since a process died of the unit
        self.has_begun = False

    def divided(self, images: int) -> Unit | None:
        """Leaves this unit so many images, and makes another one of the rest, if any."""
        if images >= len(self.places) or self.has_begun:
            return None
        self.chunk.units += 1
        self.places, rest = self.places[:images], self.places[images:]
        return Unit(self.chunk, rest)

    def next_work(self) -> Work:
        """What a process is to do next: all images, or a single one once a process died of them."""
        chunk, places = self.chunk, [self.singles[0]] if self.singles else self.places
        return Work(chunk.slot, chunk.to, {place: chunk.images[place] for place in places}, chunk.sample_below, chunk.most_tiles)

    def add(self, part: Prepared) -> bool:
        """Adds what a process has prepared; returns whether that was all."""
        self.chunk.fitted += part.fitted
        self.chunk.failures |= part.failures
        if self.singles:
            self.singles.popleft()
        return not self.singles

    def answered(self, part: Prepared) -> Iterable[str]:
        """An image of each store that has answered."""
        failed = {place for place, failure in part.failures.items() if failure.reason == "storage_unavailable"}
        asked = (image for place, image in self.next_work().images.items() if place not in failed)
        return {store_name(image.uri): image.uri for image in asked if isinstance(image, ImageRef)}.values()

    def process_died(self, failure: Failure) -> bool:
        """Blames the image that was tried alone, if one was; returns whether nothing is left to try.

        An image of which some tiles are in the model is not read again, as it may have changed.
        """
        if not self.singles:
            self.singles.extend(self.places)
            if not self.chunk.is_begun:
                return False
        self.chunk.failures[self.singles.popleft()] = failure
        return not self.singles


class Question:
    """A `LookUp` that is not answered yet."""

    def __init__(self, asked: LookUp):
        self.asked = asked
        self.answer: Future[list[FoundFile | None]] = Future()
