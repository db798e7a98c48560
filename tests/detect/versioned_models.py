"""Tiny models whose answers say which version has made them: version 7 is sure to 0.07."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.detector import Detector
from pipeline.detect.load_detector import load_detector
from pipeline.storage.files import write_file
from tests.tiny_models import bright_box, save_model

HW = (96, 128)
NEVER = 1e6  # seconds: tests look themselves


def save_version(path: Path, version: int, call_ms: int = 0, values: int = 1, outputs: Any = None) -> Path:
    """Writes one version below a folder of versions; returns its own folder.

    Args:
      path: The folder of versions.
      version: Its number.
      call_ms: How long each of its calls takes at least; it waits, and leaves the processor to others.
      values: How many it has learnt.
      outputs: What it computes instead: a traced function from images to outputs by name.
    """
    import tensorflow as tf

    learnt = tf.constant(np.random.default_rng(version).normal(size=values).astype(np.float32))

    def predict(images: Any) -> dict[str, Any]:
        many = tf.shape(images)[0]
        place = (
            tf.cast(tf.gather(tf.reshape(images, [-1]), 0), tf.int32) + (_none_after(call_ms, many) if call_ms else 0)
        ) % values
        return {
            "boxes": bright_box(images)[:, None],
            "scores": tf.fill([many, 1], version / 100 + tf.gather(learnt, place) * 1e-12),
        }

    folder = path / str(version)
    save_model(folder, outputs or predict, tf.TensorSpec((None, *HW, 3), tf.uint8, "images"))
    return folder


def _none_after(call_ms: int, images: Any) -> Any:
    """0, after a while; of how many images there are it is said to depend, so that it is not computed beforehand."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import testing

    late = tf.data.Dataset.range(1).apply(testing.sleep(call_ms * 1000))
    return tf.cast(late.reduce(tf.cast(images, tf.int64), lambda _, none: none), tf.int32)


def elsewhere(images: Any) -> dict[str, Any]:
    """What a version computes that finds another box than the others, and is sure of it."""
    import tensorflow as tf

    many = tf.shape(images)[0]
    return {"boxes": tf.tile([[[0.0, 0.0, 0.1, 0.1]]], [many, 1, 1]), "scores": tf.fill([many, 1], 0.9)}


def upload_version(saved: Path, folder: Path | str, *, without: str = "") -> None:
    """Copies a SavedModel to a folder, local or on object storage, but for files of a name."""
    for path in saved.rglob("*"):
        if path.is_file() and path.name != without:
            write_file(f"{folder}/{path.relative_to(saved)}", path.read_bytes())


def version_of(result: Any) -> str:
    """The version that has made a result, by its confidence."""
    (confidence,) = result.detections.confidences
    return str(round(float(confidence) * 100))


@contextlib.contextmanager
def opened_detectors() -> Iterator[Callable[[Path | str, str | None, DetectConfig], Detector]]:
    """Loads detectors that look for versions only when told to (`look`); closes them all."""
    with contextlib.ExitStack() as stack:

        def load(path: Path | str, version: str | None, detect: DetectConfig) -> Detector:
            model = ModelConfig(path=str(path), model_version=version, model_poll_s=NEVER)
            return stack.enter_context(contextlib.closing(load_detector(model, detect)))

        yield load


def look(detector: Detector, times: int = 2) -> None:
    """Has a detector look which version is wanted."""
    assert detector.watched
    for _ in range(times):
        detector.watched.look()
