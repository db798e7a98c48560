"""How a large image is cut into overlapping tiles, each of which is an image for the model.

The grid is that of SAHI (`get_slice_bboxes`) and supervision (`InferenceSlicer`): tiles of one size, a fixed step apart; the last
one of a row or column is moved back to end with the image. Akyon, Altinuc, Temizel: Slicing Aided Hyper Inference, ICIP 2022.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.feed.readable_formats import Size


class Tiles(NamedTuple):
    """How images are cut.

    Attributes:
      size: Width and height of a tile, pixels.
      overlap: Pixels that neighbours share.
      whole: Whether the whole image is one more tile, the last one.
    """

    size: int
    overlap: int
    whole: bool = False


class Tile(NamedTuple):
    """A part of an image, in its pixels."""

    left: int
    top: int
    width: int
    height: int

    @property
    def wh(self) -> Size:
        """Width and height."""
        return self.width, self.height


def cut_up(image_wh: Size, tiles: Tiles) -> tuple[Tile, ...]:
    """The tiles of an image, row by row; one of a smaller image.

    >>> [tile.left for tile in cut_up((1500, 480), Tiles(640, 128))]
    [0, 512, 860]
    """
    columns, rows = (_starts(length, tiles) for length in image_wh)
    width, height = (min(length, tiles.size) for length in image_wh)
    grid = tuple(Tile(left, top, width, height) for top in rows for left in columns)
    return (*grid, Tile(0, 0, *image_wh)) if tiles.whole and len(grid) > 1 else grid


def _starts(length: int, tiles: Tiles) -> list[int]:
    last = max(0, length - tiles.size)
    return [*range(0, last, tiles.size - tiles.overlap), last]
