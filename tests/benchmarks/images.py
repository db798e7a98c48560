"""Makes the benchmarks' images, the same on every machine: crops of scikit-learn's two sample photos, mirrored and scaled.

Light noise like a sensor's gives the JPEGs the entropy of a photo, and so its cost to decode. What they show does not matter
here: the benchmark's detector has random weights.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

BENCH = Path(".bench")
SMALL, LARGE = "images", "images12mp"
COUNTS = {SMALL: 512, LARGE: 256}
_SEEDS = {SMALL: 20240601, LARGE: 20240602}
_NOISE = 4.0  # standard deviation, of 255
_QUALITY = 90


def make_images(kind: str) -> Path:
    """The folder of `SMALL` or `LARGE` images; made if it is not there."""
    folder = BENCH / kind
    if not folder.exists():
        unfinished = BENCH / f"{kind}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        rng, photos = random.Random(_SEEDS[kind]), _photos()
        for number in range(COUNTS[kind]):
            _crop(rng, rng.choice(photos), _size_wh(kind, rng)).save(unfinished / f"{number:04d}.jpg", quality=_QUALITY)
        unfinished.rename(folder)
    return folder


def link_images(source: Path, target: Path, count: int, per_folder: int = 0) -> Path:
    """A folder with `count` hard links to images, again and again, in subfolders of `per_folder`; made if it is not there."""
    if not target.exists():
        images = sorted(source.glob("*.jpg"))
        for number in range(count):
            folder = target / f"{number // per_folder:04d}" if per_folder else target
            folder.mkdir(parents=True, exist_ok=True)
            os.link(images[number % len(images)], folder / f"{number:06d}.jpg")
    return target


def _photos() -> list[Image.Image]:
    from sklearn.datasets import load_sample_image

    return [Image.fromarray(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")]


def _size_wh(kind: str, rng: random.Random) -> tuple[int, int]:
    if kind == SMALL:
        return int(640 * rng.uniform(0.9, 1.1)), int(480 * rng.uniform(0.9, 1.1))
    return (4000, 3000) if rng.random() < 0.7 else (3000, 4000)


def _crop(rng: random.Random, photo: Image.Image, wh: tuple[int, int]) -> Image.Image:
    """A crop of 35 to 100 % of the photo's side with the wanted aspect ratio, scaled, half of them mirrored, with noise."""
    share, aspect = rng.uniform(0.35, 1.0), wh[1] / wh[0]
    width = min(photo.width * share, photo.height * share / aspect)
    height = width * aspect
    x, y = rng.uniform(0, photo.width - width), rng.uniform(0, photo.height - height)
    image = photo.resize(wh, Image.Resampling.BICUBIC, box=(x, y, x + width, y + height))
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = np.asarray(image).astype(np.int16)
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, _NOISE, pixels.shape)
    return Image.fromarray(np.clip(pixels + noise.astype(np.int16), 0, 255).astype(np.uint8))
