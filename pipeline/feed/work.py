"""What travels between a job and its feeder processes: which images to prepare, and what became of them. Pixels never travel."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from pipeline.errors import UserError
from pipeline.feed.fit import ModelInput


class Limits(NamedTuple):
    """The limits of reading and decoding.

    Attributes:
      max_pixels: See `decode_image`.
      scaled_decode: Whether a large JPEG may be decoded at reduced scale.
      max_file_bytes: A larger file is refused.
      read_threads: Images that one process reads from storage in parallel.
      read_ahead_bytes: Most bytes that it has read ahead.
      retry_seconds: How long an image is tried again while storage fails.
      give_up_seconds: How long a store may fail for all images before the job ends.
    """

    max_pixels: float
    scaled_decode: bool
    max_file_bytes: int
    read_threads: int
    read_ahead_bytes: float
    retry_seconds: float
    give_up_seconds: float


class ToRead(NamedTuple):
    """An image that the feeder reads; the fields of `ImageRef` by the same names."""

    uri: str
    generation: str
    size_bytes: int
    signed_uri: str


class Work(NamedTuple):
    """Some images of a chunk, for one process.

    Attributes:
      slot: The part of the shared memory for its pixels.
      start: Where in it those of the first image go, bytes; the others follow.
      model_input: How they are fitted.
      images: Place in the chunk -> the image, or its encoded bytes.
      sample_below: An image to read whose identity has a smaller hash gets a thumbnail.
      thumbnails: Places of other images that get one.
    """

    slot: int
    start: int
    model_input: ModelInput
    images: dict[int, ToRead | bytes]
    sample_below: int = 0
    thumbnails: frozenset[int] = frozenset()


class Failure(NamedTuple):
    """Why an image cannot be detected in; the arguments of `ImageError`."""

    stage: str
    reason: str
    message: str
    generation: str = ""


@dataclasses.dataclass
class Prepared:
    """What became of `Work`.

    Attributes:
      places: The images whose pixels lie in the shared memory, in their order there.
      image_whs: `(n, 2)`, width and height of these images, upright, at full size.
      pixels_hw: Height and width of their pixels in the shared memory.
      seconds: `(n, 2)`: of reading, and of decoding and fitting.
      received_at: `(n,)`: when reading began, seconds since the epoch.
      generations: The generation that was read, of each.
      thumbnails: Place -> JPEG.
      failures: Place -> failure, of all other images.
    """

    places: list[int]
    image_whs: np.ndarray
    pixels_hw: tuple[int, int]
    seconds: np.ndarray
    received_at: np.ndarray
    generations: list[str]
    thumbnails: dict[int, bytes]
    failures: dict[int, Failure]


class AskRoom(NamedTuple):
    """A process wants to decode a large image, of more than `ANY_ROOM` bytes."""

    needed_bytes: float


class GiveRoom(NamedTuple):
    """The answer: it may, or there is no room even without other images, but for so many bytes."""

    granted: bool
    room_bytes: float = 0.0


class RoomFree(NamedTuple):
    """A process has decoded its large image."""


class StoreFails(NamedTuple):
    """A store fails; the read is tried again. An empty text: it is back."""

    text: str


class StoreAway(NamedTuple):
    """A store has answered nobody for long, or cannot be used here, so the job must end."""

    error: UserError


class Coming(NamedTuple):
    """The next `Work` holds so many bytes of images."""

    size: int


ANY_ROOM = 64e6  # bytes of decoding that need no question: a detector that has started has room for them
