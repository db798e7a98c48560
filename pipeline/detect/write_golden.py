"""Writes golden images, with what a trusted version finds in them, into a version."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from models.manifest import MANIFEST, write_manifest
from pipeline.config import DetectConfig, load_config
from pipeline.detect.golden import GOLDEN, ROWS
from pipeline.detect.load_detector import load_detector
from pipeline.errors import InputError
from pipeline.listing.list_images import check_inputs, list_images
from pipeline.log_lines import plural
from pipeline.records import DeadLetter, DetectedImage, ImageRef, detection_row, row_bytes

_JOBS = DetectConfig()


class NoObjectError(InputError):
    """The model finds no object in the images, so they would show nothing."""


def write_golden(
    model: str,
    images: Sequence[str],
    out: str,
    score_threshold: float = _JOBS.score_threshold,
    iou_threshold: float = _JOBS.iou_threshold,
    *,
    config: str | None = None,
) -> list[DetectedImage]:
    """Writes the golden images of a version, all or none.

    Args:
      model: The trusted version, or a folder of versions, whose newest counts.
      images: Files, folders or globs on this machine.
      out: The version to write them into.
      score_threshold: Least confidence of an expected detection.
      iou_threshold: For suppression.
      config: A job's config with the settings of the model.

    Returns:
      What the trusted version finds.

    Raises:
      UserError: The model or an image cannot be used, no image has an object, or the version has golden images already.
      OSError: A file cannot be read or written.
    """
    target = Path(out, GOLDEN)
    if "://" in out or not any(Path(out, name).is_file() for name in ("saved_model.pb", "model.onnx")):
        raise InputError(f"{out}: expected the folder of a model on this machine as --out, such as /models/yolov4/8")
    if target.exists():
        raise InputError(f"{target} is there already; remove it first")
    thresholds = {"score_threshold": score_threshold, "iou_threshold": iou_threshold}
    found = _detected(model, images, {**thresholds, "min_agreement": 0}, config)  # its detections become the expected ones
    with tempfile.TemporaryDirectory(prefix=".golden-", dir=out) as scratch:
        ready = Path(scratch, "golden")
        ready.mkdir()
        with (ready / ROWS).open("wb") as file:
            for number, image in enumerate(found, 1):
                name = f"{number:04}-{os.path.basename(image.ref.uri)}"
                shutil.copyfile(image.ref.uri, ready / name)
                row = {**detection_row(image), "image": {"uri": name, "width": image.width, "height": image.height}, **thresholds}
                file.write(row_bytes(row) + b"\n")
        target.parent.mkdir(exist_ok=True)
        ready.rename(target)
    if Path(out, MANIFEST).exists():
        write_manifest(out)
    return found


def _detected(model: str, images: Sequence[str], detect: dict[str, float], config: str | None) -> list[DetectedImage]:
    settings = load_config([config] if config else [], {"model.path": model, **{f"detect.{k}": v for k, v in detect.items()}})
    check_inputs({pattern: (pattern,) for pattern in images})
    listed = list(list_images(images))
    refs = sorted((each for each in listed if isinstance(each, ImageRef)), key=lambda ref: ref.uri)
    with contextlib.closing(load_detector(settings.model, settings.detect.without_tiles())) as detector:
        results = detector.detect(refs)
    if dead := [each for each in (*listed, *results) if isinstance(each, DeadLetter)]:
        raise InputError(f"{plural(len(dead), 'image')} cannot be used, such as {dead[0].ref.uri}: {dead[0].message}")
    found = [each for each in results if isinstance(each, DetectedImage)]
    if not any(len(each.detections) for each in found):
        raise NoObjectError(
            f"{model} finds no object in {plural(len(found), 'image')}, which would show nothing; give images with objects"
        )
    return found
