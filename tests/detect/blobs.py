"""A real detector without weights, exact to a pixel: each bright blob of an image is an object, its class is its colour."""

import cv2
import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.detect.batcher import Batcher
from pipeline.detect.engine import FunctionEngine, ModelFailed
from pipeline.detect.loaded_model import LoadedModel
from pipeline.records import EncodedImage
from tests.tiny_models import png

HW = (128, 128)
_MOST = 50
UNLUCKY = 13  # a pixel of this value makes the model fail


def blobs_in(pixels: np.ndarray) -> np.ndarray:
    """Of RGB pixels `(H, W, 3) uint8`: `(N, 6)` xyxy, confidence (grows with brightness and area), class (0: red, 1: green)."""
    found = []
    for class_id in (0, 1):
        count, _, stats, _ = cv2.connectedComponentsWithStats((pixels[..., class_id] > 127).astype(np.uint8))
        for x, y, w, h, area in stats[1:count]:
            sure = pixels[y : y + h, x : x + w, class_id].max() / 300 + area / 1e5
            found.append([x, y, x + w, y + h, sure, class_id])
    return np.array(sorted(found, key=lambda one: -one[4]), np.float32).reshape(-1, 6)


def _run(pixels: np.ndarray) -> dict[str, np.ndarray]:
    if (pixels == UNLUCKY).any():
        raise ModelFailed("unlucky pixel")
    found = np.zeros((len(pixels), _MOST, 6), np.float32)
    for place, image in enumerate(pixels):
        blobs = blobs_in(image)[:_MOST]
        found[place, : len(blobs)] = blobs
    return {"boxes": found[..., :4], "scores": found[..., 4], "classes": found[..., 5]}


def blob_model(detect: DetectConfig) -> LoadedModel:
    """The model; it suppresses nothing itself."""
    described = {"nms": "pipeline", "count_output": "", "box_units": "pixels"}
    metadata = DetectorMetadata("blobs", HW, "letterbox", ("red", "green"), letterbox_value=0, **described)
    return LoadedModel(metadata, "1", Batcher(FunctionEngine(_run, detect), HW))


def blob_image(name: str, wh: tuple[int, int], count: int, seed: int, most_side: int = 24) -> tuple[EncodedImage, np.ndarray]:
    """An image with blobs at random places, and its RGB pixels."""
    draw = np.random.default_rng(seed)
    pixels = np.zeros((wh[1], wh[0], 3), np.uint8)
    for _ in range(count):
        w, h = draw.integers(2, most_side, 2)
        x, y = draw.integers(0, wh[0] - w), draw.integers(0, wh[1] - h)
        pixels[y : y + h, x : x + w, draw.integers(0, 2)] = draw.integers(130, 255)
    return png(name, pixels), pixels
