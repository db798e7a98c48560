"""What speaks against using a version of a model, before any image meets it."""

from __future__ import annotations

import itertools

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.detect.golden import DetectIn, disagreement
from pipeline.detect.loaded_model import LoadedModel, ModelFailed
from pipeline.records import DeadLetter, EncodedImage, ImageRef


def check(model: LoadedModel, detect_in: DetectIn, detect: DetectConfig) -> str | None:
    """Why a version must not be used, in one line; None where nothing speaks against it.

    Args:
      model: The version, warm.
      detect_in: Detects with it.
      detect: How it runs.
    """
    return _failing_request(model, detect_in) or disagreement(model.golden, detect_in, detect)


def _failing_request(model: LoadedModel, detect_in: DetectIn) -> str | None:
    """Runs the requests that come with the model: an encoded image goes all the way, an array to the model alone."""
    for request in model.warmup_requests:
        if isinstance(request, bytes):
            found = detect_in([EncodedImage(ImageRef("warm-up request"), request)])
            failures = [result.message for result in found if isinstance(result, DeadLetter)]
        else:
            failures = [str(output) for output in model.engine(list(request)) if isinstance(output, ModelFailed)]
        if failures:
            return f"fails on a request of its warm-up file: {failures[0]}"
    return None


def other_name(new: str, old: str) -> str | None:
    """Why a version of a name must not be used beside one of another, or after it; None where it may."""
    return None if new == old else f"its name is {new}, that of the version in use is {old}; set model.name if they are one"


def incompatible(new: DetectorMetadata, old: DetectorMetadata) -> str | None:
    """Why rows of one version would not go with those of another, in one line; None where they do.

    The name and each class number keep their meaning; classes may come behind those that there are. How the input is fed is
    each version's own.
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
