"""Watches which version is the canary, brings it up beside the version in use, and where asked promotes or drops it.

`labels.json` beside the versions says which one it is: `{"stable": 7, "canary": 8}`. To promote or to drop it is to write that
file, so that all processes of a job, and all jobs, do the same. Who comes first decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.canary import Canary
from pipeline.detect.loaded_model import LoadedModel
from pipeline.detect.versions import LABELS, Version, folder_of, labels_in, versions_in
from pipeline.errors import ModelError
from pipeline.storage.files import write_file

if TYPE_CHECKING:
    from pipeline.detect.detector import Detector

_CANARY = "canary"


def check_canary(model: ModelConfig, detect: DetectConfig) -> None:
    """Refuses to promote a canary by itself where that can't be.

    Raises:
      ModelError: It can't.
    """
    if not detect.canary_auto:
        return
    if detect.canary_mode == "live":
        raise ModelError("canary_auto: expected canary_mode shadow, since a live canary's images meet no version to agree with")
    if not model.model_version or model.model_version.isdigit():
        raise ModelError(f"canary_auto: expected a label as model_version, such as stable, which then moves in {LABELS}")


class CanaryWatch:
    """Looks again and again which version is the canary.

    Args:
      model: The model, whose path is a folder of versions.
      detect: How it runs.
      detector: Has the version in use, and takes the canary.
      load: Loads a version and checks it; raises `ModelError`.
      say: Says a line.
    """

    def __init__(
        self,
        model: ModelConfig,
        detect: DetectConfig,
        detector: Detector,
        load: Callable[[Version], LoadedModel],
        say: Callable[[str], None],
    ):
        self._path = folder_of(model.path)
        self._label = model.model_version
        self._detect = detect
        self._detector = detector
        self._load = load
        self._say = say
        self._before: Version | None = None  # what the last look has found
        self._refused: set[Version] = set()

    def look(self) -> None:
        """Looks once; a version that is not as it was at the last look is left alone."""
        if not self._detect.canary_share:
            return
        labels = labels_in(self._path)
        wanted = versions_in(self._path).get(labels[_CANARY]) if _CANARY in labels else None
        before, self._before = self._before, wanted
        canary = self._detector.canary
        if wanted and wanted.name == self._detector.model.version:
            wanted = None
        if canary and (not wanted or canary.model.version != wanted.name):
            self.end("dropped")
            canary = None
        if canary:
            self._judge(canary)
        elif wanted and wanted == before and wanted not in self._refused:
            self._bring_up(wanted)

    def end(self, outcome: str) -> None:
        """Ends the canary where there is one, so that there are never three versions in memory.

        Args:
          outcome: `promoted` or `dropped`; empty: undecided.
        """
        canary = self._detector.canary
        if canary:
            self._detector.use_canary(None)
            line = canary.decide(outcome).line()
            self._say(f"model {self._detector.model.metadata.name}: canary {outcome or 'put aside'}; {line}")

    def _bring_up(self, version: Version) -> None:
        current = self._detector.model
        try:
            loaded = self._load(version)
        except ModelError as err:
            self._refused.add(version)
            self._say(f"model {current.metadata.name}: canary {version.name} is refused: {err}")
            return
        self._detector.try_canary(loaded)
        share, mode = self._detect.canary_share, self._detect.canary_mode
        self._say(f"model {current.metadata.name}: {share:.1%} of the images meet canary {version.name}, {mode}")

    def _judge(self, canary: Canary) -> None:
        verdict = canary.verdict() if self._detect.canary_auto else ""
        labels = labels_in(self._path) if verdict else {}
        if str(labels.get(_CANARY)) != canary.model.version:
            return  # or somebody else has decided
        kept = {label: number for label, number in labels.items() if label != _CANARY}
        if verdict == "promoted" and self._label:
            kept[self._label] = labels[_CANARY]
        write_file(f"{self._path}/{LABELS}", json.dumps(kept).encode())
        self.end(verdict)
