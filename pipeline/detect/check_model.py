"""Checks a model version before it is used."""

from __future__ import annotations

import itertools

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.detect.golden import DetectIn, disagreement
from pipeline.detect.loaded_model import LoadedModel
from pipeline.records import DeadLetter, EncodedImage, ImageRef


def check(model: LoadedModel, detect_in: DetectIn, detect: DetectConfig) -> str | None:
    """Why a version must not be used, in one line; None if it passes.

    Args:
      model: The version, warm.
      detect_in: Detects with it.
      detect: How it runs.
    """
    return _failing_request(model, detect_in) or disagreement(model.golden, detect_in, detect)


def _failing_request(model: LoadedModel, detect_in: DetectIn) -> str | None:
    """Runs the model's warm-up requests: an encoded image through the whole detector, an array through the model alone."""
    for request in model.warmup_requests:
        if isinstance(request, bytes):
            found = detect_in([EncodedImage(ImageRef("warm-up request"), request)])
            failures = [result.message for result in found if isinstance(result, DeadLetter)]
        else:
            failures = [str(part.error) for part in model.engine.run(request) if part.error]
        if failures:
            return f"fails on a request of its warm-up file: {failures[0]}"
    return None


def other_name(new: str, old: str) -> str | None:
    """Why a version must not replace one of another name; None if the names are equal."""
    return None if new == old else f"its name is {new}, that of the version in use is {old}; set model.name if they are one"


def incompatible(new: DetectorMetadata, old: DetectorMetadata) -> str | None:
    """Why rows of two versions would not fit together, in one line; None if they do.

    The name and the meaning of each class number must stay; new classes may follow. The input may change.
    """
    if problem := other_name(new.name, old.name):
        return problem
    if old.class_names and len(new.class_names) < len(old.class_names):
        return f"it has {len(new.class_names)} classes, the version in use has {len(old.class_names)}"
    pairs = itertools.zip_longest(new.class_names, old.class_names)
    for number, (now, before) in enumerate(pairs):
        if before is not None and now != before:
            return f"its class {number} is {now}, that of the version in use is {before}"
    return None
