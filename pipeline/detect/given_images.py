"""Images as Python code has them, as the records that the detector takes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import cv2
import numpy as np
import PIL.Image
import PIL.ImageOps

from pipeline.config.paths import local_path
from pipeline.records import EncodedImage, Image, ImageRef

GivenImage = str | os.PathLike[str] | bytes | bytearray | memoryview | np.ndarray | PIL.Image.Image | Image
"""A path or URI, a file's bytes, an array `(H, W, 3) uint8`, an image of Pillow, or a record."""

_ONE = (str, os.PathLike, bytes, bytearray, memoryview, np.ndarray, PIL.Image.Image, ImageRef, EncodedImage)
_KINDS = "a path, bytes of an image file, an array (H, W, 3) uint8, an image of Pillow, an ImageRef or an EncodedImage"


def as_records(images: Iterable[GivenImage], *, bgr: bool = False) -> Iterator[Image]:
    """The record of each image, in order; reads `images` lazily.

    Args:
      images: Images of any kinds. Those without a name get `images[<place>]` as their URI.
      bgr: Whether arrays have their channels in the order of OpenCV.

    Raises:
      TypeError: `images` is one image, or none; the iterator raises it for an element that is no image.
    """
    if isinstance(images, _ONE) and getattr(images, "ndim", 0) != 4:  # an array of four axes is several images
        raise TypeError(
            f"expected several images, such as a list or a generator, got {_kind(images)}; give [image] for one image"
        )
    if not isinstance(images, Iterable):
        raise TypeError(f"expected images, such as a list or a generator, got {_kind(images)}")
    return (_record(image, f"images[{place}]", bgr=bgr) for place, image in enumerate(images))


def _record(image: Any, name: str, *, bgr: bool) -> Image:
    if isinstance(image, (ImageRef, EncodedImage)):
        return image
    if isinstance(image, (str, os.PathLike)):
        return ImageRef(local_path(os.fsdecode(image)))
    if isinstance(image, (bytes, bytearray, memoryview)):
        return EncodedImage(ImageRef(name), bytes(image))
    if isinstance(image, PIL.Image.Image):
        upright = PIL.ImageOps.exif_transpose(image).convert("RGB")
        return _encoded(np.asarray(upright)[..., ::-1], name)
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3 and image.size:
        return _encoded(image if bgr else image[..., ::-1], name)
    raise TypeError(f"{name}: expected {_KINDS}, got {_kind(image)}")


def _encoded(pixels_bgr: np.ndarray, name: str) -> EncodedImage:
    """Pixels as a file, in the format that takes the least work to write and to read: it has no compression."""
    return EncodedImage(ImageRef(name), cv2.imencode(".bmp", np.ascontiguousarray(pixels_bgr))[1].tobytes())


def _kind(image: Any) -> str:
    if image is None:
        return "None"
    kind = type(image).__name__
    if isinstance(image, np.ndarray) and image.ndim != 1:
        return f"an array {image.shape} {image.dtype}"
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
