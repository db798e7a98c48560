"""Decodes an image file to upright 8-bit RGB pixels, or says why it cannot.

For JPEG, PNG and WebP, `headers/` first reads the size and the cost of decoding from the header, without memory for pixels. For
the other formats Pillow does (`rarer_formats.py`). So an image that is too large is refused before its pixels take memory or
time. Only the first frame of an animation is used. Alpha is dropped.
"""

from __future__ import annotations

import dataclasses
import io
import math
import warnings
from collections.abc import Callable

import cv2
import numpy as np
from PIL.PngImagePlugin import PngImageFile

from pipeline.failures import ImageError
from pipeline.feed.decoders import Room, any_room, one_line, opencv_pixels, pillow_pixels, turn_upright
from pipeline.feed.headers.formats import format_of, has_header, read_header
from pipeline.feed.headers.header import Header, Size, too_large
from pipeline.feed.rarer_formats import decode_rarer

# OpenCV's colour flags mean BGR and cannot be combined with RGB; these give the scale alone
_SCALED_DECODES = ((8, cv2.IMREAD_REDUCED_GRAYSCALE_8), (4, cv2.IMREAD_REDUCED_GRAYSCALE_4), (2, cv2.IMREAD_REDUCED_GRAYSCALE_2))
_MARGIN = 1.5  # a scaled decode keeps at least this many pixels for each pixel of the model's input
_BYTES_PER_PIXEL = 16  # of decoding; formats that take more may have fewer pixels
_PADDING = b"\xaa" * 64  # behind a JPEG's last pixel a decoder skips it; in place of pixels it makes other ones
_SECONDS = 5.0  # most CPU time of one image, where at most so many pixels are allowed:
_SECONDS_PIXELS = 100_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class DecodedImage:
    """Pixels, and the size of the image.

    Attributes:
      pixels: `(h, w, 3) uint8` RGB, upright; smaller than the image if a JPEG was decoded at reduced scale.
      image_wh: Width and height of the upright image at full size.
    """

    pixels: np.ndarray
    image_wh: Size


def decode_image(
    content: bytes,
    max_pixels: float,
    needed_wh: Callable[[Size], Size] | None = None,
    margin: float = _MARGIN,
    room: Room = any_room,
) -> DecodedImage:
    """Decodes an image file to upright RGB.

    Args:
      content: The file's bytes.
      max_pixels: Most pixels that decoding may produce (for JPEG in several scans: that the image may have). Fewer for formats
        that take more than 16 bytes a pixel to decode. It also bounds the CPU time: 5 s for each 100 million, and at least 5 s.
      needed_wh: Size of the upright image -> its size in the model's input; allows decoding at reduced scale. None: full scale.
      margin: A reduced scale leaves at least so many pixels for each needed one, along each axis.
      room: Surrounds the decoding.

    Raises:
      ImageError: The bytes are empty, of no supported format, damaged, or too large or too much work.
    """
    if not content:
        raise ImageError("decode", "empty", "expected an image, got zero bytes")
    name = format_of(content)
    if not has_header(name):
        pixels = decode_rarer(name, content, max_pixels, room)
        return DecodedImage(pixels, pixels.shape[1::-1])
    header = read_header(content)
    upright_wh = header.wh[::-1] if header.orientation >= 5 else header.wh
    factor, flag = _choose_scale(header, upright_wh, needed_wh(upright_wh) if needed_wh else None, margin)
    held_pixels = header.pixels / (factor**2 if header.scales else 1) * max(1.0, header.bytes_per_pixel / _BYTES_PER_PIXEL)
    _check_limits(header, held_pixels, max_pixels)
    with room(held_pixels * min(_BYTES_PER_PIXEL, max(header.bytes_per_pixel, 3.0)), header.wh):
        pixels = _decode_pixels(header, flag)
    if pixels.shape[1::-1] != tuple(math.ceil(size / factor) for size in header.wh):
        raise ImageError("decode", "corrupt", f"the header says {header.wh[0]} x {header.wh[1]} pixels, the image has other ones")
    return DecodedImage(turn_upright(pixels, header.orientation), upright_wh)


def _check_limits(header: Header, held_pixels: float, max_pixels: float) -> None:
    if held_pixels > max_pixels:
        most = f"{max_pixels * header.pixels / held_pixels / 1e6:.3g} megapixels of such {header.format}"
        raise too_large(f"{max_pixels / 1e6:g} megapixels" if held_pixels <= header.pixels else most, header.wh)
    seconds = most_seconds(max_pixels)
    if header.seconds > seconds:
        raise ImageError(
            "decode",
            "too_much_work",
            f"expected at most {seconds:g} s of decoding, got {header.format} of {header.wh[0]} x {header.wh[1]} pixels that may "
            f"take {header.seconds:.0f} s; max_megapixels sets the limit",
        )


def most_seconds(max_pixels: float) -> float:
    """Most CPU time of decoding one image."""
    return _SECONDS * max(1.0, max_pixels / _SECONDS_PIXELS)


def _choose_scale(header: Header, upright_wh: Size, needed_wh: Size | None, margin: float) -> tuple[int, int]:
    """The largest reduction that leaves the margin: (factor, OpenCV's flag)."""
    if header.format == "JPEG" and needed_wh:
        for factor, flag in _SCALED_DECODES:
            if all(have // factor >= margin * need for have, need in zip(upright_wh, needed_wh, strict=True)):
                return factor, flag | cv2.IMREAD_COLOR_RGB
    return 1, cv2.IMREAD_COLOR_RGB


def _decode_pixels(header: Header, flag: int) -> np.ndarray:
    if header.decoder == "pillow":
        return _pillow(header)
    pixels = opencv_pixels(header.content, flag)
    if pixels is None:
        reason = "truncated" if header.cut else "corrupt"
        raise ImageError("decode", reason, f"the pixels of the {header.format} cannot be decoded")
    if header.format == "JPEG" and header.cut:
        padded = opencv_pixels(header.content[:-2] + _PADDING + header.content[-2:], flag)
        if padded is None or not np.array_equal(pixels, padded):  # a decoder makes up what is missing
            raise ImageError("decode", "truncated", "the JPEG ends within its pixels (no end-of-image marker)")
    return pixels


def _pillow(header: Header) -> np.ndarray:
    """Decodes a PNG, whose size `_check_limits` has checked; so Pillow's own limit, a process-wide variable, is not needed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with PngImageFile(io.BytesIO(header.content)) as image:
                return pillow_pixels(image)
    except Exception as err:
        reason = "truncated" if header.cut or "truncated" in str(err).lower() else "corrupt"
        raise ImageError("decode", reason, f"the pixels cannot be decoded: {one_line(err)}") from err
