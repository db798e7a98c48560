"""Tiny models whose answers say which version has made them: version 7 is sure to 0.07."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.batcher import Batcher
from pipeline.detect.detector import Detector
from pipeline.detect.engine import FunctionEngine, ModelFailed, OpenedModel, OutOfMemory
from pipeline.detect.loaded_model import LoadedModel
from pipeline.errors import ModelError
from pipeline.records import EncodedImage
from pipeline.storage.files import write_file
from tests.tiny_models import bright_box, png, save_model

HW = (96, 128)
TOY = "tests.detect.versioned_models:open_model"  # an engine that loads at once
FAST = DetectConfig(score_threshold=0.0, engine=TOY)
ONE = DetectConfig(batch_sizes=(1,), concurrent_batches=4)
DIES_AFTER = "TOY_DIES_AFTER"  # a variable of the environment: images after which the device of `TOY` fails on everything
METADATA = DetectorMetadata("detector", HW, "stretch", ("a",))


_open: list[None] = []  # an entry for each version that is open
_closed = _open.pop


def open_model(local: str, folder: str, _model: ModelConfig, _detect: DetectConfig) -> OpenedModel:
    """Opens what `write_version` wrote: finds the bright rectangle, or another one."""
    says = json.loads(Path(local, "model.onnx").read_text())
    if "broken" in says:
        raise ModelError(f"model {folder}: {says['broken']}")
    if "raises" in says and not os.path.exists(says["raises"]):
        raise OSError(errno.ENOSPC, "No space left on device")
    if "grows" in says and not Path(local, "part").exists():
        Path(local, "part").write_bytes(b"more")

    works = itertools.repeat(True) if DIES_AFTER not in os.environ else iter([True] * int(os.environ[DIES_AFTER]))

    def run(pixels: np.ndarray) -> dict[str, np.ndarray]:
        if "fails" in says:
            raise (OutOfMemory if "memory" in says["fails"] else ModelFailed)(says["fails"])
        if len(pixels) > says.get("beside_others", 4) and len(_open) > 1:
            raise OutOfMemory("another version has it")
        if not all(next(works, False) for _ in pixels):
            raise ModelFailed("CUDA_ERROR_ILLEGAL_ADDRESS")
        found = np.zeros((len(pixels), 1, 4), np.float32)
        for box, image in zip(found, pixels, strict=True):
            rows, columns = (np.flatnonzero((image[..., 0] > 127).any(axis)) for axis in (1, 0))
            if len(rows):
                box[0] = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        boxes = found if "box" not in says else np.broadcast_to(np.float32(says["box"]), found.shape)
        return {"boxes": boxes, "scores": np.full((len(pixels), 1), says["version"] / 100, np.float32)}

    metadata = DetectorMetadata("detector", HW, "stretch", tuple(says.get("classes", "a")), box_units="pixels")
    requests = tuple(text.encode() for text in says.get("requests", ()))
    engine = FunctionEngine(run, DetectConfig(batch_sizes=(1, 2, 4), concurrent_batches=2), gpu="gpu" in says, close=_closed)
    _open.append(None)
    return OpenedModel(engine, metadata, warmup_requests=requests)


def write_version(path: Path | str, version: int, **says: Any) -> str:
    """Writes a version of `TOY` below a folder of versions, local or on object storage; returns its folder.

    It may have `classes`, `requests` of a warm-up file and a `box` that it finds, be `broken`, fail on each image (`fails`, which
    names memory for lack of it), find no space to be loaded until a file is there (`raises`), grow when loaded (`grows`), run on
    a GPU (`gpu`), or have memory for only so many images while another version is open (`beside_others`).
    """
    write_file(f"{path}/{version}/model.onnx", json.dumps({"version": version, **says}).encode())
    return f"{path}/{version}"


def save_version(path: Path, version: int, call_ms: int = 0, values: int = 1) -> Path:
    """Writes a SavedModel below a folder of versions; returns its own folder.

    Each of its calls takes at least `call_ms`, in which it leaves the processor to others; it has learnt so many `values`.
    """
    import tensorflow as tf

    learnt = tf.constant(np.random.default_rng(version).normal(size=values).astype(np.float32))

    def predict(images: Any) -> dict[str, Any]:
        many = tf.shape(images)[0]
        first = tf.cast(tf.gather(tf.reshape(images, [-1]), 0), tf.int32)
        place = (first + (_none_after(call_ms, many) if call_ms else 0)) % values
        score = version / 100 + tf.gather(learnt, place) * 1e-12
        return {"boxes": bright_box(images)[:, None], "scores": tf.fill([many, 1], score)}

    return Path(save_model(path / str(version), predict, tf.TensorSpec((None, *HW, 3), tf.uint8, "images")))


def _none_after(call_ms: int, images: Any) -> Any:
    """0, after a while; of how many images there are it is said to depend, so that it is not computed beforehand."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import testing

    late = tf.data.Dataset.range(1).apply(testing.sleep(call_ms * 1000))
    return tf.cast(late.reduce(tf.cast(images, tf.int64), lambda _, none: none), tf.int32)


def version_of(result: Any) -> str:
    """The version that has made a result, by its confidence."""
    (confidence,) = result.detections.confidences
    return str(round(float(confidence) * 100))


def label(path: Path, **labels: int) -> None:
    """Writes the labels of a folder of versions."""
    (path / "labels.json").write_text(json.dumps(labels), encoding="utf-8")


def loaded(version: str, run: Callable[[np.ndarray], Any], detect: DetectConfig = ONE, **how: Any) -> LoadedModel:
    """A version that is this function."""
    return LoadedModel(METADATA, version, Batcher(FunctionEngine(run, detect, **how), HW))


def image(name: object = "a", bright: int = 255) -> EncodedImage:
    """An image with one rectangle."""
    pixels = np.zeros((*HW, 3), np.uint8)
    pixels[20:60, 30:90] = bright
    return png(f"{name}.png", pixels)


def look(detector: Detector, times: int = 2) -> None:
    """Has a detector look which version is wanted."""
    assert detector.watched
    for _ in range(times):
        detector.watched.poll()
