"""The facts about an image on which everything is decided before its pixels are decoded."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pipeline.failures import ImageError

Size = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """An image file as its header describes it.

    Attributes:
      format: The name that Pillow knows the format by.
      wh: Width and height of the pixels as they are stored, before `orientation`.
      content: What a decoder is given: the file, without what no pixel depends on (texts, profiles, later frames).
      seconds: About what decoding costs one core of the machine in BENCHMARKS.md, at worst.
      decoder: Who is asked.
      orientation: As in Exif 2.3, section 4.6.4: 1 to 8.
      bytes_per_pixel: Peak memory of decoding for each pixel of `wh`, as measured.
      scales: Whether decoding at reduced scale takes less memory: JPEG whose pixels come in one pass.
      cut: Whether the file ends earlier than its own lengths say.
    """

    format: str
    wh: Size
    content: bytes
    seconds: float
    decoder: Literal["opencv", "pillow"] = "opencv"
    orientation: int = 1
    bytes_per_pixel: float = 0.0
    scales: bool = False
    cut: bool = False

    @property
    def pixels(self) -> int:
        """Number of pixels."""
        return self.wh[0] * self.wh[1]


def corrupt(message: str) -> ImageError:
    """The error for a header that contradicts itself or its format."""
    return ImageError("decode", "corrupt", f"damaged image header: {message}")


def not_read(message: str) -> ImageError:
    """The error for a kind of image that is not read here."""
    return ImageError("decode", "not_an_image", f"expected an image, got {message}")


def too_large(most: str, wh: Size) -> ImageError:
    """The error for an image of more pixels than `max_megapixels` allows."""
    message = f"expected at most {most}, got {wh[0]} x {wh[1]} pixels; max_megapixels sets the limit"
    return ImageError("decode", "too_large", message)


def too_much(message: str) -> ImageError:
    """The error for a file of more parts than an image can need."""
    return ImageError("decode", "too_much_work", f"not worth its work: {message}")
