"""From an image file to a model's input."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from models.geometry import InputTransform, fit_image, resize_plan
from pipeline.failures import Failure
from pipeline.feed.decode import DecodedImage, decode_image
from pipeline.feed.decoders import Room, any_room
from pipeline.feed.readable_formats import Size
from pipeline.feed.tiles import Tile, Tiles, cut_up

if TYPE_CHECKING:
    from models.metadata import DetectorMetadata, LetterboxRule, Resize


class ModelInput(NamedTuple):
    """How an image becomes a model's input; see `DetectorMetadata`, whose fields these are, and `Tiles`."""

    input_hw: tuple[int, int]
    resize: Resize
    letterbox_rule: LetterboxRule
    letterbox_value: int
    antialias: bool = False
    tiles: Tiles | None = None

    @classmethod
    def of(cls, metadata: DetectorMetadata, tiles: Tiles | None = None) -> ModelInput:
        """The input of a model."""
        of_model = metadata.input_hw, metadata.resize, metadata.letterbox_rule, metadata.letterbox_value, metadata.antialias
        return cls(*of_model, tiles)

    @property
    def is_any_size(self) -> bool:
        """Whether the model gets each image at its own size, so that nobody knows before what its pixels take."""
        return self.resize == "none" and not self.tiles

    @property
    def most_hw(self) -> tuple[int, int]:
        """Height and width of the input; the most that a tile has, for a model that takes it at its own size."""
        return (self.tiles.size, self.tiles.size) if self.tiles and self.resize == "none" else self.input_hw

    def plan_tile(self, tile: Tile) -> InputTransform:
        """The place in the input of an image of which the input shows this tile."""
        return dataclasses.replace(self.plan(tile.wh), left=tile.left, top=tile.top)

    def tiles_of(self, image_wh: Size) -> tuple[Tile, ...]:
        """The tiles of an image; itself if it is no larger than the input."""
        height, width = self.most_hw
        if not self.tiles or (image_wh[0] <= width and image_wh[1] <= height):
            return (Tile(0, 0, *image_wh),)
        return _cut_up(image_wh, self.tiles)

    def plan(self, image_wh: Size) -> InputTransform:
        """The place of an image in the input."""
        return _plan(image_wh, self.input_hw, self.resize, self.letterbox_rule)


_plan = functools.lru_cache(4096)(resize_plan)  # images of a job mostly have a few sizes
_cut_up = functools.lru_cache(16)(cut_up)


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
      The decoded image, and its pixels in the model's input, `(H, W, 3) uint8`, or all of them if it is to be cut into tiles; or
      why it cannot be decoded.
    """

    def needed_wh(image_wh: Size) -> Size:
        return to.plan(image_wh).resized_wh

    decoded = decode_image(content, max_pixels, needed_wh if scaled_decode and not to.tiles else None, room=room)
    if isinstance(decoded, Failure):
        return decoded
    if to.resize == "none" or to.tiles:
        return decoded, decoded.pixels
    return decoded, fit_image(
        decoded.pixels, to.plan(decoded.image_wh), to.input_hw, to.letterbox_value, out, antialias=to.antialias
    )


def fit_tile(pixels: np.ndarray, tile: Tile, to: ModelInput, out: np.ndarray) -> None:
    """Fits a tile of an image to a model's input.

    Args:
      pixels: All pixels of the image, `(h, w, 3) uint8`.
      tile: The part.
      to: The model's input.
      out: Where the pixels go, `(H, W, 3) uint8`.
    """
    part = pixels[tile.top : tile.top + tile.height, tile.left : tile.left + tile.width]
    if to.resize == "none":
        out[:] = part
    else:
        fit_image(part, to.plan(tile.wh), to.input_hw, to.letterbox_value, out, antialias=to.antialias)
