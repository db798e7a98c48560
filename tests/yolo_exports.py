"""SavedModels with YOLO's joined outputs, as its exporters lay them out, whose candidates depend on the image."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.tiny_models import save_model

INPUT_HW = (64, 96)
CELLS = 8 * 12 + 4 * 6 + 2 * 3  # strides 8, 16 and 32
NAMES = ("ant", "bee", "cow")


def export_yolo(folder: Path, layout: str, *, units: str = "pixels", batch: int | None = None) -> str:
    """Writes a model of that layout, and its metadata.yaml; returns its folder.

    Its candidates come in clusters, one cluster in each quarter of the input, whose size and confidence follow the image's
    brightness there: what is suppressed, and what not, differs from image to image.

    Args:
      folder: Where to.
      layout: As `models.metadata.JoinedLayout`.
      units: Of its boxes.
      batch: A fixed batch size.
    """
    import tensorflow as tf

    height, width = INPUT_HW
    many = CELLS * 3 if layout == "M,5+C" else 300 if layout == "M,6" else CELLS
    draw = np.random.default_rng(len(layout) + many)
    quarter = draw.integers(0, 4, many)
    centre = np.stack([24.0 + 48 * (quarter % 2), 16.0 + 32 * (quarter // 2)], 1) + draw.normal(0, 4, (many, 2))
    size = draw.uniform(14, 28, (many, 2))
    class_scores = draw.uniform(0, 1, (many, len(NAMES))) ** 2
    objectness = draw.uniform(0, 1, (many, 1))
    scale = np.array([1 / width, 1 / height] * 2 if units == "norm" else [1.0] * 4)

    def predict(images: Any) -> dict[str, Any]:
        light = tf.reduce_mean(tf.reshape(images, [-1, 2, height // 2, 2, width // 2, 3]), [2, 4, 5])
        light = tf.gather(tf.reshape(light, [-1, 4]), quarter, axis=1)[..., None]  # (N, M, 1), 0..1
        xy = tf.constant(centre, tf.float32) + 10.0 * light
        wh = tf.constant(size, tf.float32) * (0.5 + light)
        corners = tf.concat([xy - wh / 2, xy + wh / 2], -1) if layout == "M,6" else tf.concat([xy, wh], -1)
        boxes = corners * tf.constant(scale, tf.float32)
        scores = tf.constant(class_scores, tf.float32) * (0.2 + 0.8 * light)
        seen = tf.constant(objectness, tf.float32) + tf.zeros_like(light)
        best = tf.stack([tf.reduce_max(scores, -1), tf.cast(tf.argmax(scores, -1), tf.float32)], -1)
        parts = {"4+C,M": [boxes, scores], "M,4+C": [boxes, scores], "M,5+C": [boxes, seen, scores], "M,6": [boxes, best]}[layout]
        joined = tf.concat(parts, -1)
        return {"output_0": tf.transpose(joined, [0, 2, 1]) if layout == "4+C,M" else joined}

    saved = save_model(folder, predict, tf.TensorSpec((batch, height, width, 3), tf.float32, "images"))
    said = {"task": "detect", "imgsz": [*INPUT_HW], "stride": 32, "names": dict(enumerate(NAMES))}
    (folder / "metadata.yaml").write_text(yaml.safe_dump(said), encoding="utf-8")
    return saved


def keras_yolo() -> Any:
    """A Keras network with the joined output of YOLOv8, which is the same for all images."""
    import keras

    images = keras.Input((*INPUT_HW, 3), name="images")
    grid = keras.layers.Conv2D(4 + len(NAMES), 8, strides=8, bias_initializer="ones", kernel_initializer="zeros")(images)
    coarse = [keras.layers.MaxPooling2D(size)(grid) for size in (1, 2, 4)]
    rows = keras.layers.Concatenate(axis=1)([keras.layers.Reshape((-1, 4 + len(NAMES)))(cells) for cells in coarse])
    return keras.Model(images, keras.layers.Permute((2, 1))(rows))
