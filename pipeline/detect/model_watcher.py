"""Polls a folder of model versions while a job runs: loads, warms and checks the wanted version, then swaps it in.

Each process polls for itself, so between two polls processes may use different versions; rows name the version.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import saved_model
from pipeline.detect.canary_watcher import CanaryWatcher
from pipeline.detect.check_model import incompatible, other_name
from pipeline.detect.detections import check_classes
from pipeline.detect.detector import Detector
from pipeline.detect.load_model import load
from pipeline.detect.loaded_model import LoadedModel, Memory
from pipeline.detect.versions import Version, wanted
from pipeline.errors import ModelError
from pipeline.limits import MEMORY

_END_SECONDS = 60.0


class ModelWatcher:
    """Keeps the wanted version in use.

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
        refused: Mapping[Version, ModelError] | None = None,
    ):
        self._model = model
        self._detect = detect
        self._detector = detector
        self._refused: set[Version] = set()
        self._in_use = in_use
        self._before = {in_use, *others}  # of the last poll
        self._said = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch the model", daemon=True)
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        count_refusal = functools.partial(self._count, "refusals")
        self._canary = CanaryWatcher(
            model, detect, detector, load=self._loaded, check_name=self._check_name, count_refusal=count_refusal, say=_say
        )
        for version, err in (refused or {}).items():
            self._refuse(version, str(err))

    def start(self) -> None:
        """Starts the polling thread."""
        self._canary.announce()
        atexit.register(self.close)  # a thread that loads a model while the interpreter ends may crash it
        self._thread.start()

    def close(self) -> None:
        """Stops polling; waits for a version that is being loaded."""
        atexit.unregister(self.close)
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def take_counts(self) -> Counter[str]:
        """`swaps` and `refusals` since the last call."""
        with self._counting:
            counts, self._counts = self._counts, Counter()
        return counts

    def look(self) -> None:
        """Polls once, for the wanted version and for the canary."""
        self._look_for_wanted()
        self._canary.look()

    def _look_for_wanted(self) -> None:
        """Skips a version without a manifest whose files changed since the last poll: another process may be writing them."""
        before = self._before
        candidates = wanted(self._model.path, self._model.model_version)
        self._before = set(candidates)
        for version in candidates:
            if version.name == self._detector.model.version:
                break
            if (version.is_whole or version in before) and version not in self._refused and self._take(version):
                break
        if not self._detector.in_use.is_lent:  # it made way for another one, and could not be loaded again
            old = self._detector.model
            self._detector.swap(self._loaded_again(old))
            _say(f"model {old.metadata.name}: version {old.version} is in use again")

    def _watch(self) -> None:
        while not self._end.wait(self._model.model_poll_s):
            try:
                self.look()
            except Exception as err:  # noqa: BLE001  the job continues while storage fails
                text = f"{err}; version {self._detector.model.version} stays"
                if text != self._said:
                    _say(text)
                self._said = text
            else:
                self._said = ""

    def _take(self, version: Version) -> bool:
        """Swaps a version in; False if it is refused, or its files changed meanwhile."""
        started, old = time.monotonic(), self._detector.model
        self._canary.end()
        try:
            self._check_name(version)
            memory = self._memory_of(version)
            waited = "" if self._has_room(memory) else self._exchange(version, memory)
            if not waited:
                self._detector.swap(self._started(version, memory))
        except ModelError as err:
            if not self._end.is_set() and self._is_still_there(version):  # else the version is not to blame
                self._refuse(version, str(err))
            return False
        self._count("swaps")
        self._in_use = version
        seconds = time.monotonic() - started
        _say(f"model {old.metadata.name}: version {old.version} -> {version.name}, loaded in {seconds:.1f} s{waited}")
        return True

    def _loaded(self, version: Version) -> LoadedModel | None:
        """Loads a version to run beside the one in use; None if the watch was closed meanwhile."""
        try:
            self._check_name(version)
            memory = self._memory_of(version)
            if not self._has_room(memory):
                current = self._detector.model.version
                raise ModelError(f"model {version.folder}: memory has no room for it beside version {current}")
            return self._started(version, memory)
        except ModelError:
            if self._end.is_set():
                return None
            raise

    def _memory_of(self, version: Version) -> Memory:
        """Estimates a version's memory: its own weights, and the working memory that the version in use took."""
        return self._detector.model.memory._replace(weights_bytes=version.size_bytes)

    def _has_room(self, memory: Memory) -> bool:
        set_mb, both = self._model.model_memory_mb, memory.used_bytes + self._detector.model.memory.used_bytes
        limit = set_mb * 1_000_000 if set_mb else memory.limit_bytes
        return (limit is None or both <= limit) and memory.used_bytes <= MEMORY.room_bytes()

    def _exchange(self, version: Version, memory: Memory) -> str:
        """Closes the version in use before it starts the next one; images wait meanwhile.

        Returns:
          A note for the user.

        Raises:
          ModelError: The next version is refused; the old one is in use again.
        """
        began, old = time.monotonic(), self._detector.model
        self._detector.in_use.unload()
        try:
            self._detector.swap(self._started(version, memory))
        except Exception as err:
            self._detector.swap(self._loaded_again(old))
            waited = f"images waited for {time.monotonic() - began:.1f} s, since memory has no room for two"
            raise ModelError(f"{err}; {waited}") from err
        return f"; images waited for {time.monotonic() - began:.1f} s of them, since memory has no room for two versions"

    def _loaded_again(self, old: LoadedModel) -> LoadedModel:
        alone = dataclasses.replace(self._model, path=self._in_use.folder, model_version=None)
        try:
            return dataclasses.replace(load(alone, self._detect), memory=old.memory)
        except ModelError as err:
            self._detector.in_use.fail_pending(f"{err}; it was in use, and made way for another version that cannot be used")
            raise

    def _started(self, version: Version, memory: Memory) -> LoadedModel:
        """Loads and checks a version, on this thread."""
        alone = dataclasses.replace(self._model, path=version.folder, model_version=None)
        loaded = dataclasses.replace(load(alone, self._detect, beside=True), memory=memory)
        try:
            if self._end.is_set():
                raise ModelError(f"model {version.folder}: the job ended while it was loaded")
            check_classes(self._detect.classes, loaded.metadata)
            if misfit := incompatible(loaded.metadata, self._detector.model.metadata):
                raise ModelError(f"model {version.folder}: {misfit}")
            problem = self._detector.check(loaded)
            if problem:
                raise ModelError(f"model {version.folder}: {problem}")
        except BaseException:
            loaded.engine.close()
            raise
        return loaded

    def _check_name(self, version: Version) -> None:
        """Refuses a version of another name before minutes go into loading it."""
        name, _ = saved_model.name_and_version(dataclasses.replace(self._model, path=version.folder, model_version=None))
        if problem := other_name(name, self._detector.model.metadata.name):
            raise ModelError(f"model {version.folder}: {problem}")

    def _is_still_there(self, version: Version) -> bool:
        return version in wanted(self._model.path, self._model.model_version)

    def _refuse(self, version: Version, why: str) -> None:
        self._refused.add(version)
        self._count("refusals")
        current = self._detector.model
        why = why.removeprefix(f"model {version.folder}: ")
        _say(f"model {current.metadata.name}: version {version.name} is refused, version {current.version} stays: {why}")

    def _count(self, name: str) -> None:
        with self._counting:
            self._counts[name] += 1


def _say(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr, flush=True)
