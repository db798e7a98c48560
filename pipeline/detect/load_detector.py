"""Loads the detector of a process: one for all who ask with the same settings, with the best version that passes its checks."""

from __future__ import annotations

import dataclasses
import threading
import time

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import saved_model
from pipeline.detect.canary_watcher import check_canary, say_unwatched
from pipeline.detect.detections import check_classes
from pipeline.detect.detector import Detector
from pipeline.detect.loaded_model import LoadedModel, LoadModel
from pipeline.detect.versions import Version, is_watchable, wanted
from pipeline.errors import ModelError
from pipeline.stats.worker_reports import reporter_of

_TRIED = 2  # versions at the start: the newest, and what was in use before it

_shared: dict[tuple[ModelConfig | LoadModel, DetectConfig, int], Detector] = {}
_shared_lock = threading.Lock()


def shared_detector(model: ModelConfig | LoadModel, detect: DetectConfig, samples: int = 0) -> Detector:
    """The detector of this process for these settings; loaded and warmed at the first call, and kept while the process lives."""
    key = (model, detect, samples)
    with _shared_lock:
        if key not in _shared:
            _shared[key] = load_detector(model, detect, samples)
            reporter_of(_shared[key])
        return _shared[key]


def load_detector(model: ModelConfig | LoadModel, detect: DetectConfig, samples: int = 0) -> Detector:
    """Loads and checks a model; where its path is a folder of versions, watches these.

    Args:
      model: Which SavedModel, and what it does not say of itself; or what loads a model of another engine.
      detect: How to run it.
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
    """A detector of the best version, or of the one before: a bad release keeps no worker from starting."""
    refused: dict[Version, ModelError] = {}
    found = wanted(model.path, model.model_version)
    for version in found[:_TRIED]:
        alone = dataclasses.replace(model, path=version.folder, model_version=None)
        try:
            detector = _checked(saved_model.load(alone, detect), f"model {version.folder}", detect, samples)
        except ModelError as err:
            refused[version] = err
        else:
            detector.watch(model, version, found, refused)
            return detector
    raise next(iter(refused.values()))


def _checked(loaded: LoadedModel, called: str, detect: DetectConfig, samples: int) -> Detector:
    """A detector of a model that passes its checks; of another one, it is closed."""
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
