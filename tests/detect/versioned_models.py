"""Tiny models whose answers say which version has made them: version 7 is sure to 0.07."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny_models import bright_box, save_model

HW = (96, 128)


def save_version(path: Path, version: int, hw: tuple[int, int] = HW, batch: int | None = None, outputs: Any = None) -> Path:
    """Writes one version below a folder of versions; returns its own folder."""
    import tensorflow as tf

    def predict(images: Any) -> dict[str, Any]:
        return {"boxes": bright_box(images)[:, None], "scores": tf.fill([tf.shape(images)[0], 1], version / 100)}

    folder = path / str(version)
    save_model(folder, outputs or predict, tf.TensorSpec((batch, *hw, 3), tf.uint8, "images"))
    return folder


def version_of(result: Any) -> str:
    """The version that has made a result, by its confidence."""
    (confidence,) = result.detections.confidences
    return str(round(float(confidence) * 100))
