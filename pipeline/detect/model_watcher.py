"""Polls a folder of model versions while a job runs: loads, warms and checks the wanted version, then swaps it in.

The version that `labels.json` calls canary runs beside it as a shadow. Each process polls for itself, so between two polls
processes may use different versions; rows name the version. A version that cannot be copied, loaded or used, for whatever reason,
is refused: the one in use stays, and the other is tried again with growing pauses, or at once if its files change.
"""

from __future__ import annotations

import atexit
import dataclasses
import threading
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.detections import check_classes
from pipeline.detect.detector import Detector
from pipeline.detect.gpus import free_bytes, take_gpu
from pipeline.detect.load_model import load
from pipeline.detect.loaded_model import LoadedModel
from pipeline.detect.tensorflow_setup import gpu_bytes
from pipeline.detect.versions import LABELS, Version, choose, folder_of, labels_in, versions_in
from pipeline.errors import DeviceFailedError, ModelAwayError, ModelError
from pipeline.limits import MEMORY, nvidia_gpus
from pipeline.log_lines import console
from pipeline.stats.canary_stats import CanaryStats

_CANARY = "canary"
_END_SECONDS = 60.0
_FIRST_REFUSAL_S, _LONGEST_REFUSAL_S = 60.0, 3600.0  # doubled in between


class _Refusal(NamedTuple):
    """Why a version is refused, until when, and for how long this time."""

    why: str
    until: float
    pause_s: float


class ModelWatcher:
    """Keeps the wanted version and the labelled canary in use.

    Args:
      model: The model, whose path is a folder of versions.
      detect: How to run it.
      detector: Uses the versions.
      in_use: The version that the detector has now.
      others: All versions that were in the folder when this one was chosen.
      refused: Versions that were tried and failed, with their errors.
    """

    def __init__(
        self,
        model: ModelConfig,
        detect: DetectConfig,
        detector: Detector,
        *,
        in_use: Version,
        others: Iterable[Version] = (),
        refused: Mapping[Version, Exception] | None = None,
    ):
        self._model = model
        self._folder = folder_of(model.path)
        self._detect = detect
        self._detector = detector
        self._in_use = in_use
        self._before = {in_use, *others}  # of the last poll
        self._refused: dict[Version, _Refusal] = {}
        self._said = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch the model", daemon=True)
        for version, err in (refused or {}).items():
            self._refuse(version, err, f"version {version.name} is refused, version {in_use.name} stays")

    def start(self) -> None:
        """Prints why there is no canary yet, and starts the polling thread."""
        try:
            versions = versions_in(self._folder)
            self._poll_canary(versions, before=set())
            self._before |= {*versions.values()}
        except Exception as err:  # noqa: BLE001  the next poll may reach storage
            self._say_once(str(err))
        atexit.register(self.close)  # a thread that loads a model while the interpreter ends may crash it
        self._thread.start()

    def close(self) -> None:
        """Stops polling; waits for a version that is being loaded."""
        atexit.unregister(self.close)
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def poll(self) -> None:
        """Looks once for the wanted version and for the canary.

        A version without a manifest is used once two polls have found the same files: another process may be writing them.
        """
        before, versions = self._before, versions_in(self._folder)
        self._before = set(versions.values())
        try:
            self._poll_wanted(versions, before)
        finally:
            if not self._detector.in_use.is_lent:  # it made way for another one that cannot be used
                self._reload()
        self._poll_canary(versions, before)

    def _watch(self) -> None:
        while not self._end.wait(self._model.model_poll_s):
            try:
                self.poll()
            except Exception as err:  # noqa: BLE001  the job continues while storage fails
                self._say_once(f"{err}; version {self._detector.model.version} stays")
            else:
                self._said = ""

    def _poll_wanted(self, versions: Mapping[int, Version], before: set[Version]) -> None:
        for version in choose(self._folder, versions, self._model.model_version):
            if version.name == self._detector.model.version:
                break
            if (version.manifest or version in before) and not self._is_refused(version) and self._switch_to(version):
                break

    def _switch_to(self, version: Version) -> bool:
        """Swaps a version in; False if it is refused, or its files changed meanwhile."""
        began, old = time.monotonic(), self._detector.model
        self._end_canary()
        has_room = self._has_room(version)
        if not has_room:
            self._detector.in_use.unload()
        try:
            loaded = self._load(version)
            if has_room and loaded.batcher.has_shrunk:  # memory had no room for both, and alone it runs larger batches
                loaded.batcher.close()
                has_room = False
                self._detector.in_use.unload()
                loaded = self._load(version)
            self._detector.in_use.swap(loaded)
        except Exception as err:  # noqa: BLE001  of a disk, of storage, of a library
            if self._is_there(version):  # else it is not to blame
                self._refuse(version, err, f"version {version.name} is refused, version {old.version} stays")
            return False
        self._detector.note_event("swaps")
        self._in_use = version
        waited = "" if has_room else "; images waited meanwhile, since memory has no room for two versions"
        self._say(f"version {old.version} -> {version.name}, loaded in {time.monotonic() - began:.1f} s{waited}")
        return True

    def _reload(self) -> None:
        """Loads the version again that made way for another one; it has run, so what is in the way may pass."""
        old = self._detector.model
        try:
            loaded = load(self._config_of(self._in_use), self._detect)
        except Exception as err:
            kind = DeviceFailedError if isinstance(err, DeviceFailedError) else ModelAwayError
            self._detector.in_use.fail_pending(
                kind(f"{err}; it was in use, and made way for another version that cannot be used")
            )
            raise
        self._detector.in_use.swap(dataclasses.replace(loaded, memory_bytes=old.memory_bytes))
        self._say(f"version {old.version} is in use again; images waited, since memory has no room for two versions")

    def _poll_canary(self, versions: Mapping[int, Version], before: set[Version]) -> None:
        number = labels_in(self._folder).get(_CANARY) if self._detect.canary_share else None
        version = None if number is None else versions.get(number)
        current, running = self._detector.model.version, self._detector.canary
        if running and (version is None or running.model.version != version.name):
            self._end_canary()
        if number is None:
            self._detector.no_canary = None
        elif version is None or version.missing:
            self._note_canary(number, f"{LABELS} calls it canary, and it is not there")
        elif version.name == current:
            self._note_canary(
                number, f"{LABELS} calls it canary, and it is in use; --model-version names another one to be in use"
            )
        elif self._detector.canary or self._is_refused(version):
            pass
        elif version not in before:
            self._note_canary(number, "it is not loaded yet")
        elif not self._has_room(version):
            self._note_canary(number, f"memory has no room for it beside version {current}")
        else:
            self._try_canary(version)

    def _try_canary(self, version: Version) -> None:
        try:
            loaded = self._load(version)
        except Exception as err:  # noqa: BLE001  as for the version to be in use
            self._refuse(version, err, f"canary {version.name} is refused")
            self._detector.no_canary = CanaryStats(version.name, self._detector.model.version, not_up=f"it is refused: {err}")
            return
        self._detector.no_canary = None
        self._detector.use_canary(loaded)
        self._say(f"canary {version.name} also gets {self._detect.canary_share:.1%} of the images")

    def _end_canary(self) -> None:
        """Stops the canary, if any; memory never holds three versions."""
        if canary := self._detector.canary:
            self._detector.use_canary(None)
            self._say(f"the canary ends; {canary.figures().line()}")

    def _note_canary(self, number: int, why: str) -> None:
        """Keeps for the report why the canary gets no images, and prints it where that is new."""
        note = CanaryStats(str(number), self._detector.model.version, not_up=why)
        if note != self._detector.no_canary:
            self._say(note.line())
        self._detector.no_canary = note

    def _has_room(self, version: Version) -> bool:
        """Whether memory has room for a version beside the one in use; it is taken to need as much, or more by its files."""
        current = self._detector.model.memory_bytes
        needed = max(current, version.size_bytes)
        limit = gpu_bytes(self._detect)
        has_room = limit is None or current + needed <= limit
        if limit is None and getattr(self._detector.model.batcher.engine, "gpu", False):  # of ONNX Runtime
            gpus = nvidia_gpus()
            free = free_bytes(take_gpu(gpus, self._detect.device), gpus)
            has_room = free is None or needed <= free
        return has_room and needed <= MEMORY.room_bytes()

    def _load(self, version: Version) -> LoadedModel:
        current = self._detector.model
        loaded = load(self._config_of(version), self._detect, beside=True)
        try:
            check_classes(self._detect.classes, loaded.metadata)
            problem = incompatible(loaded.metadata, current.metadata) or self._detector.check(loaded)
            if problem or self._end.is_set():
                raise ModelError(f"model {version.folder}: {problem or 'the job ended while it was loaded'}")
        except BaseException:
            loaded.batcher.close()
            raise
        return dataclasses.replace(loaded, memory_bytes=max(current.memory_bytes, version.size_bytes))

    def _config_of(self, version: Version) -> ModelConfig:
        return dataclasses.replace(self._model, path=version.folder, model_version=None)

    def _is_there(self, version: Version) -> bool:
        """Whether the folder has these files of a version, as far as it can be told now."""
        try:
            return version in versions_in(self._folder).values()
        except Exception:  # noqa: BLE001  storage fails
            return True

    def _is_refused(self, version: Version) -> bool:
        return version in self._refused and time.monotonic() < self._refused[version].until

    def _refuse(self, version: Version, err: Exception, said: str) -> None:
        """Refuses a version for a while, longer each time; counts and prints it only where the reason is new."""
        if self._end.is_set():  # the job ended while it was loaded
            return
        before = self._refused.get(version, _Refusal("", 0.0, _FIRST_REFUSAL_S / 2))
        why, pause_s = str(err).removeprefix(f"model {version.folder}: "), min(2 * before.pause_s, _LONGEST_REFUSAL_S)
        why = why or type(err).__name__
        self._refused[version] = _Refusal(why, time.monotonic() + pause_s, pause_s)
        if why != before.why:
            self._detector.note_event("refusals")
            self._say(f"{said}: {why}")

    def _say(self, text: str) -> None:
        console.info("model %s: %s", self._detector.model.metadata.name, " ".join(text.split()))

    def _say_once(self, text: str) -> None:
        if text != self._said:
            console.info("%s", " ".join(text.split()))
        self._said = text


def incompatible(new: DetectorMetadata, old: DetectorMetadata) -> str | None:
    """Why rows of two versions would not fit together, in one line; None if they do.

    The name and the meaning of each class number must stay; new classes may follow. The input may change.
    """
    if new.name != old.name:
        return f"its name is {new.name}, that of the version in use is {old.name}; set model.name if they are one"
    if len(new.class_names) < len(old.class_names):
        return f"it has {len(new.class_names)} classes, the version in use has {len(old.class_names)}"
    for number, (now, before) in enumerate(zip(new.class_names, old.class_names, strict=False)):
        if now != before:
            return f"its class {number} is {now}, that of the version in use is {before}"
    return None
