"""Scenes with known objects: handwritten digits and numbers on cluttered pages.

A scene is a pure function of its split, a seed and an index.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cv2
import numpy as np
from numpy.typing import NDArray

from models.digits.training.ink import DigitImages, InkStyle, Split, load_digit_images, render_digit
from models.digits.training.pages import Page, add_noise, compose_page, random_colour

CLASS_NAMES = tuple("0123456789")
_SIDE_PX = (480, 901)
# height of a digit as a share of the scene's longer side: 25 to 90 pixels when that side is resized to 320
_HEIGHT_SHARE = (0.08, 0.28)
_MIN_CONTRAST = 55.0
_MAX_OVERLAP = 0.02


@dataclass(frozen=True, slots=True)
class Scene:
    """An image and its ground truth.

    Attributes:
        image: (H, W, 3) uint8 RGB.
        boxes_xyxy: (N, 4) float32, pixels, half-open: the extent of each digit's ink.
        labels: (N,) int64 in 0..9.
    """

    image: NDArray[np.uint8]
    boxes_xyxy: NDArray[np.float32]
    labels: NDArray[np.int64]


def compose_scene(split: Split, seed: int, index: int, *, with_digits: bool | None = None, max_numbers: int = 12) -> Scene:
    """Composes the scene number `index` of a split.

    Args:
        split: which digits and which part of the photos are used.
        seed: scenes of different seeds are independent.
        index: number of the scene, from 0.
        with_digits: whether the scene has digits; None leaves it to chance (6 % have none).
        max_numbers: the scene tries two to so many numbers of one to four digits, and leaves out those without room or contrast.

    Returns:
        The scene; the same arguments give the same scene.
    """
    rng = np.random.default_rng([seed, index])
    width, height = (int(side) for side in rng.integers(*_SIDE_PX, 2))
    page = compose_page(width, height, split, rng)
    none = rng.random() < 0.06
    boxes: list[tuple[int, int, int, int]] = []
    labels: list[int] = []
    if not none if with_digits is None else with_digits:
        for _ in range(rng.integers(2, max_numbers + 1)):
            _write_number(page, load_digit_images(split), boxes, labels, rng)
        while not boxes:
            _write_number(page, load_digit_images(split), boxes, labels, rng)
    if rng.random() < 0.3:
        page = np.asarray(cv2.GaussianBlur(page, (0, 0), rng.uniform(0.5, 1.6)), np.uint8)
    page = add_noise(page, rng.uniform(0.0, 9.0), rng)
    return Scene(page, np.array(boxes, np.float32).reshape(-1, 4), np.array(labels, np.int64))


def _random_style(page: Page, rng: np.random.Generator) -> InkStyle:
    low, high = np.log(_HEIGHT_SHARE)
    return InkStyle(
        height_px=float(np.exp(rng.uniform(low, high))) * max(page.shape[:2]),
        aspect=rng.uniform(0.8, 1.3),
        rotation_deg=float(np.clip(rng.normal(0.0, 9.0), -25, 25)),
        shear=rng.normal(0.0, 0.1),
        threshold=rng.uniform(0.42, 0.62),
        softness=rng.uniform(0.08, 0.22),
        wobble_px=rng.uniform(0.0, 0.25),
    )


def _write_number(
    page: Page, digits: DigitImages, boxes: list[tuple[int, int, int, int]], labels: list[int], rng: np.random.Generator
) -> None:
    """Draws one to four digits in a row, in one style and colour, and appends their boxes and labels.

    It stops early if the next digit would leave the page, touch another digit, or have too little contrast.
    """
    style = _random_style(page, rng)
    colour = np.array(random_colour(rng), np.float32)
    opacity = rng.uniform(0.8, 1.0)
    x, y = rng.uniform(0, page.shape[1]), rng.uniform(0, page.shape[0])
    gap = rng.uniform(0.05, 0.35) * style.height_px
    for _ in range(rng.choice([1, 1, 1, 2, 3, 4])):
        choice = int(rng.integers(len(digits.labels)))
        if not _fits(_nominal_box(x, y, style), page, boxes):
            return
        hand = replace(
            style, height_px=style.height_px * rng.uniform(0.9, 1.1), rotation_deg=style.rotation_deg + rng.normal(0.0, 2.0)
        )
        alpha = render_digit(digits.images[choice], hand, rng)
        box = _box_at(x, y + rng.normal(0.0, 0.04) * style.height_px, alpha)
        if not _fits(box, page, boxes):
            return
        region = page[box[1] : box[3], box[0] : box[2]]
        if _contrast(region, alpha, colour) * opacity < _MIN_CONTRAST:
            return
        cover = alpha[..., None] * opacity
        region[:] = region * (1 - cover) + colour * cover
        boxes.append(box)
        labels.append(int(digits.labels[choice]))
        x = box[2] + gap


def _nominal_box(x: float, y: float, style: InkStyle) -> tuple[int, int, int, int]:
    """The area that even a slim digit covers; a check of it saves drawing most digits that do not fit."""
    left, top, height = int(x), int(y - 0.35 * style.height_px), int(0.7 * style.height_px)
    return left, top, left + max(1, height // 5), top + height


def _box_at(x: float, y: float, alpha: NDArray[np.float32]) -> tuple[int, int, int, int]:
    left, top = int(x), int(y - alpha.shape[0] / 2)
    return left, top, left + alpha.shape[1], top + alpha.shape[0]


def _fits(box: tuple[int, int, int, int], page: Page, boxes: list[tuple[int, int, int, int]]) -> bool:
    """Whether the box lies on the page, is at least 8 pixels high, and overlaps each other box by at most `_MAX_OVERLAP`."""
    if box[0] < 0 or box[1] < 0 or box[2] > page.shape[1] or box[3] > page.shape[0] or box[3] - box[1] < 8:
        return False
    for other in boxes:
        width, height = min(box[2], other[2]) - max(box[0], other[0]), min(box[3], other[3]) - max(box[1], other[1])
        if width > 0 and height > 0 and width * height > _MAX_OVERLAP * min(_area(box), _area(other)):
            return False
    return True


def _area(box: tuple[int, int, int, int]) -> int:
    return (box[2] - box[0]) * (box[3] - box[1])


def _contrast(region: Page, alpha: NDArray[np.float32], colour: NDArray[np.float32]) -> float:
    """The difference of luma (ITU-R BT.601) between ink and page: 10th percentile over the inked pixels."""
    weights = np.array([0.299, 0.587, 0.114], np.float32)
    below = region[alpha >= 0.5] @ weights
    return float(np.percentile(np.abs(below - colour @ weights), 10))
