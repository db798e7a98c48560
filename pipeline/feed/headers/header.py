"""An image's header: what the limits are checked against before its pixels are decoded."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pipeline.failures import ImageError

Size = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """An image file as its header describes it.

    Attributes:
      format: Pillow's name for it.
      wh: Width and height of the pixels as they are stored, before `orientation`.
      content: The bytes for the decoder: the file without parts on which no pixel depends (texts, profiles, later frames).
      seconds: Worst case of decoding, in CPU-seconds of the machine in BENCHMARKS.md.
      decoder: The library that decodes it.
      orientation: As in Exif 2.3, section 4.6.4: 1 to 8.
      bytes_per_pixel: Peak memory of decoding for each pixel of `wh`, as measured.
      scales: Whether decoding at reduced scale takes less memory: JPEG whose pixels come in one pass.
      cut: Whether the file is shorter than its own lengths say; a JPEG: lacks the marker of its end, which `content` has.
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
    """The error for a kind of image that is not supported."""
    return ImageError("decode", "not_an_image", f"expected an image, got {message}")


def too_large(most: str, wh: Size) -> ImageError:
    """The error for an image above `max_megapixels`."""
    message = f"expected at most {most}, got {wh[0]} x {wh[1]} pixels; max_megapixels sets the limit"
    return ImageError("decode", "too_large", message)


def too_much(message: str) -> ImageError:
    """The error for a file with more parts than an image can need."""
    return ImageError("decode", "too_much_work", f"not worth its work: {message}")
