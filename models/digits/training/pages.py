"""Cluttered pages as the background of digits: paper or a photo, ruled lines, stains, shapes, scribbles and letters."""

from __future__ import annotations

from functools import cache

import cv2
import numpy as np
from numpy.typing import NDArray

from models.digits.training.ink import Split

Page = NDArray[np.uint8]
# The two photos are split by columns, so that training sees no background of a test scene.
_PHOTO_COLUMNS: dict[Split, tuple[int, int]] = {"train": (0, 400), "validation": (400, 500), "test": (500, 640)}
# Letters that never look like a digit: without B, D, G, I, J, L, O, Q, S, T, Z and letters that a rotation turns into these.
_LETTERS = "AEFHKMNRVWXY"


def compose_page(width: int, height: int, split: Split, rng: np.random.Generator) -> Page:
    """Composes a page without digits.

    Args:
        width: pixels.
        height: pixels.
        split: which part of the photos may be used.
        rng: the only source of randomness.

    Returns:
        (height, width, 3) uint8 RGB.
    """
    page = _photo(width, height, split, rng) if rng.random() < 0.3 else _paper(width, height, rng)
    for draw, chance in ((_stains, 0.5), (_shapes, 0.5), (_ruled_lines, 0.5), (_scribbles, 0.5), (_letters, 0.4)):
        if rng.random() < chance:
            draw(page, rng)
    return page


def random_colour(rng: np.random.Generator, low: int = 0, high: int = 256) -> tuple[int, int, int]:
    """An RGB colour around a random grey of `low` to `high`; most of them are nearly grey, as paper and ink are."""
    spread = rng.choice([4.0, 25.0, 60.0])
    red, green, blue = np.clip(rng.uniform(low, high) + rng.normal(0.0, spread, 3), 0, 255).astype(int).tolist()
    return red, green, blue


def add_noise(page: Page, strength: float, rng: np.random.Generator) -> Page:
    """Returns a page with sensor noise of `strength` grey levels (standard deviation), the same in all channels."""
    height, width = page.shape[:2]
    grey = np.rint(rng.normal(0.0, strength, (192, 192, 1))).astype(np.int16)
    tiled = np.tile(grey.repeat(3, axis=2), (height // 192 + 1, width // 192 + 1, 1))[:height, :width]
    return np.asarray(cv2.add(page, tiled, dtype=cv2.CV_8U), np.uint8)


def _paper(width: int, height: int, rng: np.random.Generator) -> Page:
    low, high = (150, 250) if rng.random() < 0.75 else (10, 110)
    corners = np.clip(random_colour(rng, low, high) + rng.normal(0.0, 14.0, (2, 2, 1)), 0, 255).astype(np.uint8)
    return np.asarray(cv2.resize(corners, (width, height), interpolation=cv2.INTER_LINEAR), np.uint8)


@cache
def _photos() -> tuple[Page, ...]:
    from sklearn.datasets import load_sample_images

    return tuple(load_sample_images().images)


def _photo(width: int, height: int, split: Split, rng: np.random.Generator) -> Page:
    """A crop of a photo, faded towards one colour like a printed background."""
    first, end = _PHOTO_COLUMNS[split]
    photo = _photos()[int(rng.integers(2))][:, first:end]
    side = rng.uniform(0.5, 1.0) * min(photo.shape[0] / height, photo.shape[1] / width)
    crop_wh = max(8, int(width * side)), max(8, int(height * side))
    left, top = int(rng.integers(photo.shape[1] - crop_wh[0] + 1)), int(rng.integers(photo.shape[0] - crop_wh[1] + 1))
    crop = photo[top : top + crop_wh[1], left : left + crop_wh[0]]
    page = cv2.resize(crop, (width, height), interpolation=cv2.INTER_LINEAR)
    if rng.random() < 0.5:
        page = cv2.flip(page, 1)
    fade = rng.uniform(0.0, 0.7)
    return np.asarray(cv2.addWeighted(page, 1 - fade, np.full_like(page, random_colour(rng)), fade, 0.0), np.uint8)


def _point(page: Page, rng: np.random.Generator) -> tuple[int, int]:
    return int(rng.integers(page.shape[1])), int(rng.integers(page.shape[0]))


def _stains(page: Page, rng: np.random.Generator) -> None:
    """Blurred blots, drawn at an eighth of their size, since they have no detail."""
    for _ in range(rng.integers(1, 4)):
        x, y = _point(page, rng)
        small = np.zeros((40, 40), np.float32)
        axes = int(rng.integers(3, 16)), int(rng.integers(3, 16))
        cv2.ellipse(small, (20, 20), axes, float(rng.uniform(0, 180)), 0, 360, float(rng.uniform(0.1, 0.5)), -1)
        alpha = cv2.resize(cv2.GaussianBlur(small, (5, 5), 0), (320, 320), interpolation=cv2.INTER_LINEAR)
        left, top = max(x - 160, 0), max(y - 160, 0)
        region = page[top : y + 160, left : x + 160]
        cover = alpha[top - y + 160 :, left - x + 160 :][: region.shape[0], : region.shape[1], None]
        region[:] = region * (1 - cover) + np.array(random_colour(rng), np.float32) * cover


def _shapes(page: Page, rng: np.random.Generator) -> None:
    for _ in range(rng.integers(1, 6)):
        (x, y), size, colour = _point(page, rng), int(rng.integers(20, 160)), random_colour(rng)
        kind = rng.integers(4)
        if kind == 0:
            cv2.rectangle(page, (x, y), (x + size, y + int(size * rng.uniform(0.4, 2.0))), colour, -1)
        elif kind == 1:
            cv2.rectangle(
                page, (x, y), (x + 2 * size, y + int(2 * size * rng.uniform(0.7, 1.5))), colour, int(rng.integers(1, 5))
            )
        elif kind == 2:
            axes = size // 2, int(size * rng.uniform(0.25, 0.8))
            cv2.ellipse(page, (x, y), axes, float(rng.uniform(0, 180)), 0, 360, colour, -1, cv2.LINE_AA)
        else:
            corners = np.array([x, y]) + rng.integers(-size, size + 1, (3, 2))
            cv2.fillPoly(page, [corners.astype(np.int32)], colour, cv2.LINE_AA)


def _ruled_lines(page: Page, rng: np.random.Generator) -> None:
    height, width = page.shape[:2]
    gap, colour, thickness = int(rng.integers(22, 90)), random_colour(rng), int(rng.integers(1, 3))
    tilt = int(rng.normal(0.0, 6.0))
    for y in range(int(rng.integers(gap)), height, gap):
        cv2.line(page, (0, y), (width, y + tilt), colour, thickness, cv2.LINE_AA)
    if rng.random() < 0.4:
        for x in range(int(rng.integers(gap)), width, gap):
            cv2.line(page, (x, 0), (x - tilt, height), colour, thickness, cv2.LINE_AA)


def _scribbles(page: Page, rng: np.random.Generator) -> None:
    for _ in range(rng.integers(1, 6)):
        colour, thickness = random_colour(rng), int(rng.integers(1, 6))
        if rng.random() < 0.4:
            cv2.line(page, _point(page, rng), _point(page, rng), colour, thickness, cv2.LINE_AA)
        else:
            reach = int(rng.integers(15, 90))
            corners = np.array(_point(page, rng)) + np.cumsum(rng.integers(-reach, reach + 1, (rng.integers(4, 9), 2)), axis=0)
            cv2.polylines(page, [corners.astype(np.int32)], False, colour, thickness, cv2.LINE_AA)


def _letters(page: Page, rng: np.random.Generator) -> None:
    for _ in range(rng.integers(1, 5)):
        word = "".join(rng.choice(list(_LETTERS), rng.integers(1, 7)))
        font = int(rng.choice([cv2.FONT_HERSHEY_SIMPLEX, cv2.FONT_HERSHEY_COMPLEX, cv2.FONT_HERSHEY_DUPLEX]))
        scale = float(rng.uniform(0.5, 3.5))
        cv2.putText(
            page, word, _point(page, rng), font, scale, random_colour(rng), max(1, int(scale * rng.uniform(1, 3))), cv2.LINE_AA
        )
