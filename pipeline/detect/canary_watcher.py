"""Polls which version is labelled canary, and loads it beside the version in use.

The label stands in `labels.json` beside the versions: `{"stable": 7, "canary": 8}`. Only people write this file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from pipeline.config import BUNDLED, DetectConfig, ModelConfig
from pipeline.detect.detector import Detector
from pipeline.detect.loaded_model import LoadedModel
from pipeline.detect.versions import LABELS, Version, folder_of, is_remote, labels_in, versions_in
from pipeline.errors import ModelError
from pipeline.stats.canary import CanaryStats

_CANARY = "canary"


def say_unwatched(model: ModelConfig, detect: DetectConfig, detector: Detector) -> None:
    """Prints why the labelled canary gets no images, for a model that is not polled."""
    labels = {} if model.path == BUNDLED or is_remote(model.path) or not detect.canary_share else labels_in(folder_of(model.path))
    if _CANARY not in labels:
        return
    why = (
        f"model_version {model.model_version} is a number; give a label such as stable"
        if model.model_poll_s
        else "model_poll_s is 0, so nobody looks for it"
    )
    detector.no_canary = CanaryStats(str(labels[_CANARY]), detector.model.version, not_up=why)
    print(f"model {detector.model.metadata.name}: {detector.no_canary.line()}", file=sys.stderr, flush=True)


class CanaryWatcher:
    """Keeps the labelled canary running.

    Args:
      model: The model, whose path is a folder of versions.
      detect: How to run it.
      detector: Uses the canary.
      load: Loads and checks a version; raises `ModelError`. Returns None once the job has ended.
      check_name: Raises `ModelError` for a version whose name is not that of the one in use.
      count_refusal: Counts a refused version.
      say: Prints a line.
    """

    def __init__(
        self,
        model: ModelConfig,
        detect: DetectConfig,
        detector: Detector,
        *,
        load: Callable[[Version], LoadedModel | None],
        check_name: Callable[[Version], None],
        count_refusal: Callable[[], None],
        say: Callable[[str], None],
    ):
        self._path = folder_of(model.path)
        self._detect = detect
        self._detector = detector
        self._load = load
        self._check_name = check_name
        self._count_refusal = count_refusal
        self._poll_s = model.model_poll_s
        self._say = say
        self._before: Version | None = None  # of the last poll
        self._not_tried = ""  # why the version of the last poll cannot be the canary
        self._refused: set[Version] = set()

    def announce(self) -> None:
        """Prints which version will be the canary and when, or why it will not run."""
        try:
            wanted = self._wanted(labels_in(self._path)) if self._detect.canary_share else None
        except Exception:  # noqa: BLE001  the first poll reports it
            return
        if not wanted:
            return
        try:
            self._check_name(wanted)
        except ModelError as err:
            self._refuse(wanted, err)
            return
        self._note(wanted.name, "it is not loaded yet")
        self._say(
            f"model {self._detector.model.metadata.name}: canary {wanted.name} gets {self._detect.canary_share:.1%} of the "
            f"images once it is loaded, after two looks at its files, {self._poll_s:g} s apart"
        )

    def look(self) -> None:
        """Polls once; skips a version whose files changed since the last poll."""
        if not self._detect.canary_share:
            return
        canary = self._detector.canary
        wanted = self._wanted(labels_in(self._path))
        before, self._before = self._before, wanted
        if canary and (not wanted or canary.model.version != wanted.name):
            self.end()
        elif not canary and wanted and wanted == before and wanted not in self._refused:
            self._bring_up(wanted)

    def _wanted(self, labels: Mapping[str, int]) -> Version | None:
        """The version labelled canary; None if it is missing or is the one in use, which is printed once."""
        if _CANARY not in labels:
            self._detector.no_canary, self._not_tried = None, ""
            return None
        found, named = versions_in(self._path).get(labels[_CANARY]), f"{LABELS} calls version {labels[_CANARY]} canary"
        before, self._not_tried = self._not_tried, ""
        if found and found.name != self._detector.model.version:
            return found
        self._not_tried = f"{named}, which is not there"
        if found:
            self._not_tried = (
                f"{named}, which is the one in use: there is no canary; --model-version names the one to be in use beside it"
            )
        self._note(str(labels[_CANARY]), self._not_tried)
        if self._not_tried != before:
            self._say(f"model {self._detector.model.metadata.name}: {self._not_tried}")
        return None

    def _note(self, version: str, why: str) -> None:
        self._detector.no_canary = CanaryStats(version, self._detector.model.version, not_up=why)

    def _refuse(self, version: Version, err: ModelError) -> None:
        self._refused.add(version)
        self._count_refusal()
        self._note(version.name, f"it is refused: {err}")
        self._say(f"model {self._detector.model.metadata.name}: canary {version.name} is refused: {err}")

    def end(self) -> None:
        """Stops the canary, if any, so that memory never holds three versions."""
        canary = self._detector.canary
        if canary:
            self._detector.use_canary(None)
            self._say(f"model {self._detector.model.metadata.name}: the canary ends; {canary.figures().line()}")

    def _bring_up(self, version: Version) -> None:
        current = self._detector.model
        try:
            loaded = self._load(version)
        except ModelError as err:
            self._refuse(version, err)
            return
        if not loaded:
            return
        self._detector.no_canary = None
        self._detector.try_canary(loaded)
        share = self._detect.canary_share
        self._say(f"model {current.metadata.name}: canary {version.name} also gets {share:.1%} of the images")
