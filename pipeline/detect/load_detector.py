"""Loads and checks the detector of a process: one for all callers with the same settings."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.config import DetectConfig, ModelConfig, ReadConfig, check_model_is_named
from pipeline.detect.detections import check_classes
from pipeline.detect.detector import Detector, feeder_of
from pipeline.detect.load_model import load
from pipeline.detect.loaded_model import LoadModel
from pipeline.detect.model_watcher import ModelWatcher
from pipeline.detect.process_memory import freeze_gc
from pipeline.detect.versions import Version, is_watchable, opens_as_given, resolve_versions
from pipeline.errors import FAILED, WRONG, ConfigError, DeviceFailedError, ModelError
from pipeline.limits import MEMORY, resident_bytes
from pipeline.process import PROCESS
from pipeline.stats.counted import COUNTED

_ROOM_MB = 64  # for a few decoded images and their batch
_TRIED = 2  # the newest version and the one before it, so that a bad release does not keep a worker from starting


class DetectorSpec(NamedTuple):
    """What a worker needs to detect, made once by the launcher; steps take it along, and a process keeps its detector by it.

    Attributes:
      model: The model, or a function that loads one.
      detect: How to run it.
      samples: How many samples the job wants; images that may be among them get a thumbnail.
      read: How images are read that have no bytes yet.
    """

    model: ModelConfig | LoadModel
    detect: DetectConfig = DetectConfig()
    samples: int = 0
    read: ReadConfig = ReadConfig()


_loading = threading.Lock()
_detectors: dict[DetectorSpec, Detector] = {}
_steps: dict[DetectorSpec, int] = {}  # that use a detector; 0 once all have ended


def shared_detector(spec: DetectorSpec) -> Detector:
    """The process's detector: the first call loads and warms it, and the process keeps it.

    Others whose steps have all ended are closed first, as in a notebook that tries one threshold after the other.

    Raises:
      ModelError: The model cannot be used.
    """
    if spec not in _detectors:
        with _loading:
            if spec not in _detectors:
                for idle in [each for each in _detectors if _steps.get(each) == 0]:
                    _detectors.pop(idle).close()
                try:
                    detector = load_detector(*spec)
                except DeviceFailedError as err:
                    PROCESS.fail(err)
                    raise
                COUNTED.model_stats = detector.model_stats
                freeze_gc()
                _detectors[spec] = detector
    return _detectors[spec]


def count_steps(spec: DetectorSpec, change: int) -> None:
    """Notes that a step begins to use the process's detector, 1, or has ended, -1."""
    with _loading:
        _steps[spec] = _steps.get(spec, 0) + change


def detector_in_use(spec: DetectorSpec) -> Detector | None:
    """The process's detector; None if no image has needed it."""
    return _detectors.get(spec)


def checked_settings(
    model: str | os.PathLike[str] | ModelConfig | LoadModel, detect: DetectConfig | None, settings: Mapping[str, Any]
) -> tuple[ModelConfig | LoadModel, DetectConfig]:
    """A model as Python code gives it, and how to run it: `detect`, with fields of it laid over.

    Raises:
      ConfigError: A setting is unknown, its value is not allowed, or no model is given.
    """
    if isinstance(model, (str, os.PathLike)):
        model = ModelConfig(path=os.fspath(model))
    if not isinstance(model, ModelConfig) and not callable(model):
        raise ConfigError(f"model: expected a path, a ModelConfig or a function, got {model!r}")
    detect = dataclasses.replace(detect or DetectConfig(), **settings)
    if isinstance(model, ModelConfig):
        check_model_is_named(model, detect)
    return model, detect


def load_detector(
    model: str | os.PathLike[str] | ModelConfig | LoadModel,
    detect: DetectConfig | None = None,
    samples: int = 0,
    read: ReadConfig | None = None,
    **settings: Any,
) -> Detector:
    """Loads and checks a model; watches the folder if it has versions.

    Args:
      model: A model's path, a `ModelConfig` for a model that does not describe itself, or a function that loads a model of
        another engine (`loaded_model`).
      detect: How to run the model; the keyword arguments override its fields.
      samples: How many samples the job wants; images that may be among them get a thumbnail.
      read: How images are read that have no bytes yet.
      **settings: Any field of `DetectConfig`, e.g. `score_threshold=0.4`.

    Raises:
      ConfigError: A setting is unknown, or its value is not allowed.
      ModelError: The model cannot be used.
    """
    model, detect = checked_settings(model, detect, settings)
    MEMORY.narrow(detect.memory_mb)
    if not isinstance(model, ModelConfig) or opens_as_given(model, detect.engine) or not is_watchable(model):
        return _checked(model, detect, samples, read)
    refused: dict[Version, Exception] = {}
    found = resolve_versions(model.path, model.model_version)
    for version in found[:_TRIED]:
        alone = dataclasses.replace(model, path=version.folder, model_version=None)
        try:
            detector = _checked(alone, detect, samples, read)
        except Exception as err:  # noqa: BLE001  an older version may do until this one can be copied and loaded
            refused[version] = err
        else:
            detector.watched = watch = ModelWatcher(model, detect, detector, in_use=version, others=found, refused=refused)
            watch.start()
            return detector
    raise min(refused.values(), key=lambda err: getattr(err, "exit_code", FAILED) == WRONG)  # one that may pass, if there is one


def _checked(model: ModelConfig | LoadModel, detect: DetectConfig, samples: int, read: ReadConfig | None) -> Detector:
    """A detector with a model; the feeder processes start while the model loads. All is closed if it fails its checks."""
    with contextlib.ExitStack() as failed:
        feeder = failed.enter_context(contextlib.closing(feeder_of(detect)))
        loaded = load(model, detect) if isinstance(model, ModelConfig) else model(detect)
        failed.enter_context(contextlib.closing(loaded.batcher))
        check_classes(detect.classes, loaded.metadata)
        detector = Detector(loaded, detect, samples, read, feeder)
        if problem := detector.check(loaded) or _no_room():
            name = model.path if isinstance(model, ModelConfig) else loaded.metadata.name
            raise ModelError(f"model {name}: {problem}")
        failed.pop_all()
    detector.ready_at = time.time()
    return detector


def _no_room() -> str:
    """Why the memory limit leaves no room for images beside the loaded model; empty if it does."""
    needed_mb = -(-resident_bytes() // 10**6) + _ROOM_MB
    if MEMORY.limit_bytes is None or MEMORY.limit_bytes >= needed_mb * 10**6:
        return ""
    limit_mb = MEMORY.limit_bytes // 10**6
    return f"this process with it needs at least {needed_mb} MB; memory_mb or the container allows {limit_mb} MB"
