"""What travels between a job and its feeder processes: which images to prepare, and what became of them. Pixels never travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pipeline.errors import UserError
from pipeline.failures import Failure
from pipeline.feed.fit import ModelInput
from pipeline.records import Image
from pipeline.storage.store import FoundFile


class Limits(NamedTuple):
    """The limits of reading and decoding.

    Attributes:
      max_pixels: See `decode_image`.
      scaled_decode: Whether a large JPEG may be decoded at reduced scale.
      max_file_bytes: A larger file is refused.
      read_threads: Images that one process reads from storage in parallel.
      read_ahead_bytes: Most bytes that it has read ahead.
      memory_bytes: Most memory of the job's own process; None: no limit.
      processes: How many decode side by side.
      retry_seconds: How long an image is tried again while storage fails.
      give_up_seconds: How long a store may fail for all images before the job ends.
    """

    max_pixels: float
    scaled_decode: bool
    max_file_bytes: int
    read_threads: int
    read_ahead_bytes: float
    memory_bytes: int | None
    processes: int
    retry_seconds: float
    give_up_seconds: float


class Work(NamedTuple):
    """Some images of a chunk, for one process.

    Attributes:
      slot: The part of the shared memory for the chunk's pixels.
      model_input: How they are fitted; an image of any size, or in tiles, is alone in its chunk.
      images: By their places in the chunk, at which their pixels go.
      sample_below: An image whose identity has a smaller hash gets a thumbnail.
      most_tiles: How many tiles of an image lie in each half of the slot.
    """

    slot: int
    model_input: ModelInput
    images: dict[int, Image]
    sample_below: int
    most_tiles: int


class Fitted(msgspec.Struct, frozen=True, gc=False):
    """An image whose pixels lie in the shared memory.

    Attributes:
      place: Its place in the chunk.
      image_wh: Width and height, upright, at full size.
      pixels_hw: Height and width of its pixels in the shared memory.
      read_s: Seconds of reading.
      decode_s: Seconds of decoding and fitting.
      received_at: When reading began, or the bytes came, seconds since the epoch.
      generation: The generation that was read.
      thumbnail: A JPEG, if it gets one.
      first_tile: Which of its tiles is the first one there.
      tiles: How many of them are there; 1 for a whole image.
    """

    place: int
    image_wh: tuple[int, int]
    pixels_hw: tuple[int, int]
    read_s: float
    decode_s: float
    received_at: float
    generation: str
    thumbnail: bytes
    first_tile: int = 0
    tiles: int = 1


class Prepared(NamedTuple):
    """What became of `Work`.

    Attributes:
      fitted: The images whose pixels lie in the shared memory.
      failures: Why the other images have none, by their places in the chunk.
    """

    fitted: list[Fitted]
    failures: dict[int, Failure]


class Portion(NamedTuple):
    """Some tiles of an image lie in a half of its slot, and others follow, the last ones as `Prepared`.

    Attributes:
      fitted: The image.
      following: How many portions follow.
    """

    fitted: Fitted
    following: int


class PortionUsed(NamedTuple):
    """A half of a slot is free for the portion after the next one."""


class StoreFails(NamedTuple):
    """A store fails, or is back; see `note_storage`."""

    failure: str
    how_long: str


class StoreAway(NamedTuple):
    """A store has answered nobody for long, or cannot be used here, so the job must end."""

    error: UserError


class StoreAnswers(NamedTuple):
    """The store of this image has answered another process."""

    uri: str


class StopWaiting(NamedTuple):
    """The job ends: no image waits for its store any more, and none is tried again."""


class LookUp(NamedTuple):
    """Files whose sizes and generations are wanted, beside the images in work.

    Attributes:
      number: Names the question.
      locations: Paths or URIs.
      seconds: How long failures of a store are tried again.
    """

    number: int
    locations: Sequence[str]
    seconds: float


class LookedUp(NamedTuple):
    """The answer to the `LookUp` of this number, in its order; None for a file that could not be looked up."""

    number: int
    found: list[FoundFile | None]


class Coming(NamedTuple):
    """The next `Work` holds so many bytes of images."""

    size: int


ANY_ROOM = 64e6  # bytes of decoding that need not wait: a detector that has started has room for them
