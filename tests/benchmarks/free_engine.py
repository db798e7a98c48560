"""An engine that costs nothing, of the pipeline: `--engine tests.benchmarks.free_engine:open_model`."""

from __future__ import annotations

import time

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.detect.engine import OpenedModel

HW = (416, 416)
OBJECTS = 10
METADATA = DetectorMetadata("free", HW, "stretch", tuple(f"class {n}" for n in range(80)), box_units="pixels", count_output="")
_CORNERS = np.random.default_rng(0).uniform(0, 200, (OBJECTS, 2))
BOXES = np.concatenate([_CORNERS, _CORNERS + 50], axis=1).astype(np.float32)
_SCORES = np.linspace(0.9, 0.5, OBJECTS, dtype=np.float32)


class FreeEngine:
    """An engine that finds ten objects in no time, or in a given one."""

    batch_sizes = (1, 2, 4, 8, 16, 32)
    concurrent_batches = 1

    def __init__(self) -> None:
        self.seconds = 0.0  # of 32 images
        self.raw: dict[str, np.ndarray] = {}  # outputs without suppression for 32 images, in place of the ten objects
        self.worked: list[tuple[float, float]] = []  # begin and end of each batch, by the monotonic clock

    def run(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """Finds the objects."""
        began, n = time.monotonic(), len(pixels)
        time.sleep(self.seconds * n / 32)
        self.worked.append((began, time.monotonic()))
        if self.raw:
            return {name: array[:n] for name, array in self.raw.items()}
        classes = np.arange(OBJECTS)
        return {"boxes": np.stack([BOXES] * n), "scores": np.stack([_SCORES] * n), "classes": np.stack([classes] * n)}

    def close(self) -> None:
        """Does nothing."""


def open_model(*_given: object) -> OpenedModel:
    """Opens it; nothing of what is given changes it."""
    return OpenedModel(FreeEngine(), METADATA)
