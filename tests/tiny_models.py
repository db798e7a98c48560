"""Tiny SavedModels of other people's making: no description inside, other names, types and box formats; and what models find."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.detector import Detector, Result
from pipeline.detect.load_detector import load_detector
from pipeline.records import EncodedImage, ImageRef


def png(name: str, pixels: np.ndarray) -> EncodedImage:
    """An image of these RGB pixels `(H, W, 3) uint8`, without loss."""
    return EncodedImage(ImageRef(name), cv2.imencode(".png", pixels[..., ::-1])[1].tobytes())


def detected(
    path: str | Path, images: Sequence[EncodedImage], detect: DetectConfig, **config: Any
) -> tuple[list[Result], Detector]:
    """What a model finds in images, and its detector, which is closed then."""
    with contextlib.closing(load_detector(ModelConfig(path=str(path), **config), detect)) as detector:
        return detector.detect(images), detector


def save_model(folder: Path, predict: Callable[..., Mapping[str, Any]], *specs: Any, signature: str = "serving_default") -> str:
    """Writes a SavedModel whose one signature is `predict`; returns its folder."""
    import tensorflow as tf

    module = tf.Module()
    module.predict = tf.function(predict, input_signature=specs, autograph=False)
    tf.saved_model.save(module, str(folder), signatures={signature: module.predict})
    return str(folder)


def bright_box(images: Any) -> Any:
    """The box `(N, 4)` around all pixels that are brighter than the mean of the darkest and the brightest: xyxy, shares."""
    import tensorflow as tf

    green = tf.cast(images[..., 1], tf.float32)
    return box_around(green > (tf.reduce_max(green, [1, 2], keepdims=True) + tf.reduce_min(green, [1, 2], keepdims=True)) / 2)


def box_around(chosen: Any) -> Any:
    """The box `(N, 4)` around the chosen pixels `(N, H, W)` of each image: xyxy, shares."""
    import tensorflow as tf

    x0, x1 = _span(tf, tf.reduce_any(chosen, 1))
    y0, y1 = _span(tf, tf.reduce_any(chosen, 2))
    return tf.stack([x0, y0, x1, y1], -1)


def _span(tf: Any, any_chosen: Any) -> tuple[Any, Any]:
    size = tf.shape(any_chosen)[1]
    places = tf.range(size)
    first = tf.reduce_min(tf.where(any_chosen, places, size), 1)
    last = tf.reduce_max(tf.where(any_chosen, places + 1, 0), 1)
    return first / size, last / size
