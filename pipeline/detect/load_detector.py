"""Loads and checks the detector of a process: one for all callers with the same settings."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import saved_model
from pipeline.detect.canary_watcher import check_canary, say_unwatched
from pipeline.detect.detections import check_classes
from pipeline.detect.detector import Detector
from pipeline.detect.loaded_model import LoadedModel, LoadModel
from pipeline.detect.model_watcher import ModelWatcher
from pipeline.detect.versions import Version, is_watchable, wanted
from pipeline.errors import ModelError
from pipeline.stats.worker_reports import reporter_of

_TRIED = 2  # versions at the start: the newest and the one before it

_loading = threading.Lock()


def shared_detector(model: ModelConfig | LoadModel, detect: DetectConfig, samples: int = 0) -> Detector:
    """The process's detector for these settings: the first call loads and warms it, and the process keeps it.

    Raises:
      ModelError: The model cannot be used.
    """
    with _loading:  # a cache alone would let two threads load the same model
        return _cached(model, detect, samples)


@functools.cache
def _cached(model: ModelConfig | LoadModel, detect: DetectConfig, samples: int) -> Detector:
    detector = load_detector(model, detect, samples)
    reporter_of(detector)
    return detector


def load_detector(model: ModelConfig | LoadModel, detect: DetectConfig, samples: int = 0) -> Detector:
    """Loads and checks a model; watches the folder if it has versions.

    Args:
      model: Path and description of a SavedModel, or a function that loads a model of another engine.
      detect: How to run the model.
      samples: How many images get a thumbnail for the report: those with the smallest hashes of their identity.

    Raises:
      ModelError: The model cannot be used.
    """
    if not isinstance(model, ModelConfig):
        loaded = model(detect)
        return _checked(loaded, f"model {loaded.metadata.name}", detect, samples)
    check_canary(model, detect)
    if not is_watchable(model):
        detector = _checked(saved_model.load(model, detect), f"model {model.path}", detect, samples)
        say_unwatched(model, detect, detector)
        return detector
    return _watching(model, detect, samples)


def _watching(model: ModelConfig, detect: DetectConfig, samples: int) -> Detector:
    """Falls back to the version before, so that a bad release does not keep a worker from starting."""
    refused: dict[Version, ModelError] = {}
    found = wanted(model.path, model.model_version)
    for version in found[:_TRIED]:
        alone = dataclasses.replace(model, path=version.folder, model_version=None)
        try:
            detector = _checked(saved_model.load(alone, detect), f"model {version.folder}", detect, samples)
        except ModelError as err:
            refused[version] = err
        else:
            detector.watched = watch = ModelWatcher(model, detect, detector, in_use=version, others=found, refused=refused)
            watch.start()
            return detector
    raise next(iter(refused.values()))


def _checked(loaded: LoadedModel, called: str, detect: DetectConfig, samples: int) -> Detector:
    """A detector with this model; closes a model that fails its checks."""
    try:
        check_classes(detect.classes, loaded.metadata)
        detector = Detector(loaded, detect, samples)
    except BaseException:
        loaded.engine.close()
        raise
    if problem := detector.check(loaded):
        detector.close()
        raise ModelError(f"{called}: {problem}")
    detector.ready_at = time.time()
    return detector
