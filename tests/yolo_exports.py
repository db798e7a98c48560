"""SavedModels with YOLO's joined outputs, as its exporters lay them out, whose candidates depend on the image."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml

from tests.tiny_models import save_model

INPUT_HW = (96, 128)
CELLS = 12 * 16 + 6 * 8 + 3 * 4  # strides 8, 16 and 32
NAMES = ("ant", "bee", "cow")


def export_yolo(
    folder: Path,
    layout: str,
    *,
    units: str = "pixels",
    names: tuple[str, ...] = NAMES,
    batch: int | None = None,
    metadata: dict[str, Any] | None = None,
) -> str:
    """Writes a model of that layout; returns its folder.

    Its candidates come in clusters, one cluster in each quarter of the input, whose size and confidence follow the image's
    brightness there: what is suppressed, and what not, differs from image to image.

    Args:
      folder: Where to.
      layout: As `models.metadata.JoinedLayout`.
      units: Of its boxes.
      names: Of its classes, in metadata.yaml.
      batch: A fixed batch size.
      metadata: More of metadata.yaml; None for no such file.
    """
    import tensorflow as tf

    height, width = INPUT_HW
    many = CELLS * 3 if layout == "M,5+C" else 300 if layout == "M,6" else CELLS
    draw = np.random.default_rng(len(layout) + many)
    quarter = draw.integers(0, 4, many)
    centre = np.stack([32.0 + 64 * (quarter % 2), 24.0 + 48 * (quarter // 2)], 1) + draw.normal(0, 6, (many, 2))
    size = draw.uniform(20, 40, (many, 2))
    class_scores = draw.uniform(0, 1, (many, len(names))) ** 2
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
        parts = {
            "4+C,M": [boxes, scores],
            "M,4+C": [boxes, scores],
            "M,5+C": [boxes, seen, scores],
            "M,6": [boxes, best],
        }[layout]
        joined = tf.concat(parts, -1)
        return {"output_0": tf.transpose(joined, [0, 2, 1]) if layout == "4+C,M" else joined}

    saved = save_model(folder, predict, tf.TensorSpec((batch, height, width, 3), tf.float32, "images"))
    if metadata is not None:
        said = {"task": "detect", "imgsz": [*INPUT_HW], "stride": 32, "names": dict(enumerate(names)), **metadata}
        (folder / "metadata.yaml").write_text(yaml.safe_dump(said), encoding="utf-8")
    return saved


def letterboxed(pixels_rgb: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """An image as Ultralytics' `LetterBox` fits it, written out: `(H, W, 3) float32` in 0..1 with grey 114 around it.

    Returns:
      (pixels, input pixels for each image pixel in x and y, where the image begins in x and y).
    """
    height, width = pixels_rgb.shape[:2]
    r = min(INPUT_HW[0] / height, INPUT_HW[1] / width)
    new_unpad = round(width * r), round(height * r)
    dw, dh = (INPUT_HW[1] - new_unpad[0]) / 2, (INPUT_HW[0] - new_unpad[1]) / 2
    top, bottom, left, right = round(dh - 0.1), round(dh + 0.1), round(dw - 0.1), round(dw + 0.1)
    small = cv2.resize(pixels_rgb, new_unpad, interpolation=cv2.INTER_LINEAR)
    boxed = cv2.copyMakeBorder(small, top, bottom, left, right, cv2.BORDER_CONSTANT, value=(114, 114, 114))
    return boxed.astype(np.float32) / 255, np.array([new_unpad[0] / width, new_unpad[1] / height]), (left, top)


def plain_detections(
    joined: np.ndarray,
    layout: str,
    units: str,
    scale: np.ndarray,
    offset_xy: tuple[int, int],
    score: float,
    iou: float,
    most: int,
) -> list[tuple[list[float], int, float]]:
    """What a joined output `(…, …)` of one image says, box by box in plain steps: (xyxy in the image, class, confidence)."""
    rows = joined.T if layout == "4+C,M" else joined
    found = []
    for row in rows.astype(np.float64):
        if layout == "M,6":
            box, confidence, class_id = row[:4], row[4], int(row[5])
        else:
            x, y, w, h = row[:4]
            box = np.array([x - w / 2, y - h / 2, x + w / 2, y + h / 2])
            scores = row[4] * row[5:] if layout == "M,5+C" else row[4:]
            class_id = int(scores.argmax())
            confidence = scores[class_id]
        if units == "norm":
            box = box * np.array([INPUT_HW[1], INPUT_HW[0]] * 2)
        if confidence > score:
            found.append((box, class_id, confidence))
    found.sort(key=lambda one: -one[2])
    kept: list[tuple[np.ndarray, int, float]] = []
    for box, class_id, confidence in found:
        rivals = [other for other, of_class, _ in kept if of_class == class_id] if layout != "M,6" else []
        if all(_overlap(box, other) <= iou for other in rivals):
            kept.append((box, class_id, confidence))
    shift = np.array([*offset_xy] * 2)
    return [
        (((box - shift) / np.tile(scale, 2)).tolist(), class_id, float(confidence)) for box, class_id, confidence in kept[:most]
    ]


def _overlap(a: np.ndarray, b: np.ndarray) -> float:
    wh = np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])
    both = max(wh[0], 0) * max(wh[1], 0)
    return both / (np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2]) - both)


def keras_yolo() -> Any:
    """A Keras network with the joined output of YOLOv8, which is the same for all images."""
    import keras

    images = keras.Input((*INPUT_HW, 3), name="images")
    grid = keras.layers.Conv2D(4 + len(NAMES), 8, strides=8, bias_initializer="ones", kernel_initializer="zeros")(images)
    coarse = [keras.layers.MaxPooling2D(size)(grid) for size in (1, 2, 4)]
    rows = keras.layers.Concatenate(axis=1)([keras.layers.Reshape((-1, 4 + len(NAMES)))(cells) for cells in coarse])
    return keras.Model(images, keras.layers.Permute((2, 1))(rows))
