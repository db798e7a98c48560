"""From an image file to a model's input."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from models.geometry import InputTransform, fit_image, resize_plan
from pipeline.failures import Failure
from pipeline.feed.decode import DecodedImage, decode_image
from pipeline.feed.decoders import Room, any_room
from pipeline.feed.formats import Size

if TYPE_CHECKING:
    from models.metadata import DetectorMetadata, LetterboxRule, Resize


class ModelInput(NamedTuple):
    """How an image becomes a model's input; see `DetectorMetadata`, whose fields these are."""

    input_hw: tuple[int, int]
    resize: Resize
    letterbox_rule: LetterboxRule
    letterbox_value: int
    antialias: bool = False

    @classmethod
    def of(cls, metadata: DetectorMetadata) -> ModelInput:
        """The input of a model."""
        return cls(metadata.input_hw, metadata.resize, metadata.letterbox_rule, metadata.letterbox_value, metadata.antialias)

    def plan(self, image_wh: Size) -> InputTransform:
        """The place of an image in the input."""
        return _plan(image_wh, self.input_hw, self.resize, self.letterbox_rule)


_plan = functools.lru_cache(4096)(resize_plan)  # images of a job mostly have a few sizes


def fit(
    content: bytes,
    to: ModelInput,
    max_pixels: float,
    *,
    scaled_decode: bool = True,
    room: Room = any_room,
    out: np.ndarray | None = None,
) -> tuple[DecodedImage, np.ndarray] | Failure:
    """Decodes an image and fits it to a model's input.

    Args:
      content: The file's bytes.
      to: The model's input.
      max_pixels: See `decode_image`.
      scaled_decode: Whether a large JPEG may be decoded at reduced scale.
      room: See `decode_image`.
      out: Where the pixels go, `(H, W, 3) uint8`, unless the model takes images of any size.

    Returns:
      The decoded image, and its pixels in the model's input, `(H, W, 3) uint8`; or why it cannot be decoded.
    """

    def needed_wh(image_wh: Size) -> Size:
        return to.plan(image_wh).resized_wh

    decoded = decode_image(content, max_pixels, needed_wh if scaled_decode else None, room=room)
    if isinstance(decoded, Failure):
        return decoded
    if to.resize == "none":
        return decoded, decoded.pixels
    return decoded, fit_image(
        decoded.pixels, to.plan(decoded.image_wh), to.input_hw, to.letterbox_value, out, antialias=to.antialias
    )
