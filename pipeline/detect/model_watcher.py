"""Watches a model's versions while a job runs: what is wanted is prepared, warmed, checked, and put into use.

Each process watches for itself, so two versions may be in use side by side for the time between two looks; rows say which.
"""

from __future__ import annotations

import atexit
import dataclasses
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import saved_model
from pipeline.detect.canary_watcher import CanaryWatcher
from pipeline.detect.check_model import incompatible, other_name
from pipeline.detect.detections import check_classes
from pipeline.detect.load_in_subprocess import Preparation
from pipeline.detect.loaded_model import LoadedModel, Memory
from pipeline.detect.prepared_model import PreparedModel, start
from pipeline.detect.tensorflow_setup import uses_gpu
from pipeline.detect.versions import Version, wanted
from pipeline.errors import ModelError

if TYPE_CHECKING:
    from pipeline.detect.detector import Detector

_END_SECONDS = 10.0


class ModelWatcher:
    """Looks again and again which version is wanted.

    Args:
      model: The model, whose path is a folder of versions.
      detect: How it runs.
      detector: Has the version in use, and takes another one.
      in_use: That version.
      others: Those that lie there beside it.
      refused: Of these, the ones that were tried in vain.
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
        self._before = {in_use, *others}  # what the last look has found
        self._said = ""
        self._preparation: Preparation | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch the model", daemon=True)
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._canary = CanaryWatcher(model, detect, detector, load=self._loaded, check_name=self._check_canary, say=_say)
        for version, err in (refused or {}).items():
            self._refuse(version, str(err))

    def start(self) -> None:
        """Starts the thread that looks."""
        self._canary.announce()
        atexit.register(self.close)  # a thread that still loads when the interpreter ends may crash it
        self._thread.start()

    def close(self) -> None:
        """Ends it; a version that is on its way is dropped."""
        atexit.unregister(self.close)
        self._end.set()
        if self._preparation:
            self._preparation.stop()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def take_counts(self) -> Counter[str]:
        """`swaps` and `refusals` since this was last asked."""
        if not self._counts:
            return self._counts
        with self._counting:
            counts, self._counts = self._counts, Counter()
        return counts

    def look(self) -> None:
        """Looks once: which version is wanted, and which is the canary."""
        self._look_for_wanted()
        self._canary.look()

    def _look_for_wanted(self) -> None:
        """A version whose files are not those of the last look is left alone: somebody may be writing them."""
        before = self._before
        candidates = wanted(self._model.path, self._model.model_version)
        self._before = set(candidates)
        for version in candidates:
            if version.name == self._detector.model.version:
                return
            if version in before and version not in self._refused and self._take(version):
                return

    def _watch(self) -> None:
        while not self._end.wait(self._model.model_poll_s):
            try:
                self.look()
            except Exception as err:  # noqa: BLE001  storage may fail, and the job goes on meanwhile
                self._say_once(f"{err}; version {self._detector.model.version} stays")
            else:
                self._said = ""

    def _take(self, version: Version) -> bool:
        """Puts a version into use; False where it is refused, or is not there any more as it was."""
        started, old = time.monotonic(), self._detector.model
        canary = self._detector.canary
        self._canary.end("promoted" if canary and canary.model.version == version.name else "")
        try:
            prepared = self._prepared(version)
            if not self._is_still_there(version):
                return False
            memory = self._memory_of(prepared)
            waited = "" if self._has_room(memory) else self._exchange(prepared, memory)
            if not waited:
                self._detector.swap(self._started(prepared, memory))
        except ModelError as err:
            if not self._end.is_set() and self._is_still_there(version):  # else nobody is to blame
                self._refuse(version, str(err))
            return False
        self._count("swaps")
        self._in_use = version
        seconds = time.monotonic() - started
        _say(f"model {old.metadata.name}: version {old.version} -> {version.name}, loaded in {seconds:.1f} s{waited}")
        return True

    def _loaded(self, version: Version) -> LoadedModel | None:
        """A version that is to run beside the one in use; None where this has ended meanwhile.

        Raises:
          ModelError: It must not be used, or memory has no room for both.
        """
        try:
            prepared = self._prepared(version)
            memory = self._memory_of(prepared)
            if not self._has_room(memory):
                current = self._detector.model.version
                raise ModelError(f"model {version.folder}: memory has no room for it beside version {current}")
            return self._started(prepared, memory)
        except ModelError:
            if self._end.is_set():
                return None
            self._count("refusals")
            raise

    def _memory_of(self, prepared: PreparedModel) -> Memory:
        """What a version will take: its own weights, and beside them as much as the one in use when it was loaded."""
        return self._detector.model.memory._replace(weights_bytes=prepared.optimised.weights_bytes)

    def _has_room(self, memory: Memory) -> bool:
        set_mb, both = self._model.model_memory_mb, memory.used_bytes + self._detector.model.memory.used_bytes
        limit = set_mb * 1_000_000 if set_mb else memory.limit_bytes
        return limit is None or both <= limit

    def _exchange(self, prepared: PreparedModel, memory: Memory) -> str:
        """Closes the version in use before the next one is started; images wait meanwhile. Returns what to say of that.

        Raises:
          ModelError: The next one is refused; the one before is in use again.
        """
        began, old = time.monotonic(), self._detector.model
        self._detector.unload()
        try:
            self._detector.swap(self._started(prepared, memory))
        except Exception as err:
            self._detector.swap(self._loaded_again(old))
            waited = f"images waited for {time.monotonic() - began:.1f} s, since memory has no room for two"
            raise ModelError(f"{err}; {waited}") from err
        return f"; images waited for {time.monotonic() - began:.1f} s of them, since memory has no room for two versions"

    def _loaded_again(self, old: LoadedModel) -> LoadedModel:
        alone = dataclasses.replace(self._model, path=self._in_use.folder, model_version=None)
        try:
            return dataclasses.replace(saved_model.load(alone, self._detect), memory=old.memory)
        except ModelError as err:
            self._detector.fail_pending(f"{err}; it was in use, and made way for another version that cannot be used")
            raise

    def _started(self, prepared: PreparedModel, memory: Memory) -> LoadedModel:
        loaded = dataclasses.replace(start(prepared, self._detect, beside=True), memory=memory)
        problem = self._detector.check(loaded)
        if problem:
            loaded.engine.close()
            raise ModelError(f"model {prepared.folder}: {problem}")
        return loaded

    def _check_canary(self, version: Version) -> None:
        try:
            self._check_name(version)
        except ModelError:
            self._count("refusals")
            raise

    def _check_name(self, version: Version) -> None:
        """Refuses a version of another name before minutes are spent on loading it.

        Raises:
          ModelError: It has another name, or it cannot be understood.
        """
        name, _ = saved_model.name_and_version(dataclasses.replace(self._model, path=version.folder, model_version=None))
        if problem := other_name(name, self._detector.model.metadata.name):
            raise ModelError(f"model {version.folder}: {problem}")

    def _prepared(self, version: Version) -> PreparedModel:
        self._check_name(version)
        self._preparation = Preparation(version.folder, version.name, self._model, self._detect, gpu=uses_gpu())
        try:
            prepared = self._preparation.result()
        finally:
            self._preparation = None
        problem = incompatible(prepared.metadata, self._detector.model.metadata)
        if problem:
            raise ModelError(f"model {version.folder}: {problem}")
        check_classes(self._detect.classes, prepared.metadata)
        return prepared

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

    def _say_once(self, text: str) -> None:
        if text != self._said:
            _say(text)
        self._said = text


def _say(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr, flush=True)
