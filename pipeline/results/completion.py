"""Completion rule: whether a row is the one that a run would write, by its image generation, model and settings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.failures import FOR_GOOD
from pipeline.records import row_bytes
from pipeline.results.layout import DETECTIONS

# The settings of the detector that decide which rows come out. Precision and reduced decoding change only their last digits.
ROW_SETTINGS = ("score_threshold", "iou_threshold", "classes", "max_detections", "labels_per_box")
_EARLIER = {"labels_per_box": "best"}  # what runs did before there was such a setting
# All settings of the model decide on rows, except these: they change from release to release, or with the machine.
_OF_RELEASES = ("model_version", "model_poll_s", "model_memory_mb")


class RowSettings(NamedTuple):
    """The settings of a job that decide which rows come out; settings that the job does not name are left out.

    Attributes:
      model: Settings of the model.
      detect: Settings of the detector.
    """

    model: dict[str, Any]
    detect: dict[str, Any]

    @staticmethod
    def of(settings: Mapping[str, Any]) -> RowSettings:
        """Selects them from all settings of a job, nested."""
        model, detect = settings.get("model", {}), settings.get("detect", {})
        detect = _EARLIER | detect if detect else {}
        return RowSettings(
            {name: value for name, value in model.items() if name not in _OF_RELEASES},
            {name: detect[name] for name in ROW_SETTINGS if name in detect},
        )


class Entry(NamedTuple):
    """The facts of a row that decide whether it counts as done.

    Attributes:
      uri: The image.
      generation: Its version; empty if reading failed before it was known.
      kind: `detections` or `dead_letters`.
      model: Name of the model; empty if not known.
      version: The model's version.
      settings: Hash of the settings that change rows; empty if not known.
      reason: Why it is a dead letter; empty for detections.
      made_at: Start of its job or window, seconds since the epoch; 0 if only the time of the row's file is known.
    """

    uri: str
    generation: str
    kind: str
    model: str
    version: str
    settings: str
    reason: str
    made_at: float = 0.0


class Provenance(NamedTuple):
    """Provenance of rows: model and settings, as far as they decide whether the rows would be made again.

    Attributes:
      detections: Hash of the settings that change rows of detections.
      dead_letters: The same with the limits at which images are refused.
      model: Name of the model; empty if not known yet. Rows of detections have their own.
      version: Its version.
    """

    detections: str = ""
    dead_letters: str = ""
    model: str = ""
    version: str = ""

    @staticmethod
    def of(settings: Mapping[str, Any], model: tuple[str, str] = ("", "")) -> Provenance:
        """The provenance of a job's rows.

        Args:
          settings: All settings of the job, nested.
          model: Its name and version.
        """
        model_settings, detect_settings = RowSettings.of(settings)
        of_rows = dict.fromkeys(ROW_SETTINGS) | detect_settings
        for name, value in _EARLIER.items():  # rows from before such a setting keep their hash
            if of_rows[name] in (None, value):
                del of_rows[name]
        of_rows["classes"] = sorted(of_rows["classes"] or ())
        # A setting without a value is left out, so that a new setting keeps the hash of jobs that do not use it.
        of_rows |= {key: value for key, value in model_settings.items() if key not in ("path", "name") and value is not None}
        limits = {
            "max_megapixels": settings.get("detect", {}).get("max_megapixels"),
            "max_file_mb": settings.get("read", {}).get("max_file_mb"),
        }
        return Provenance(_hash(of_rows), _hash(of_rows | limits), *model)

    def settings(self, kind: str) -> str:
        """The hash of the settings that change rows of a kind."""
        return self.detections if kind == DETECTIONS else self.dead_letters


UNKNOWN = Provenance()


class CompletionRule(NamedTuple):
    """The rows that count as done for a run.

    Attributes:
      provenance: Only rows of this model and these settings.
      reasons: Only dead letters with one of these reasons.
    """

    provenance: Provenance
    reasons: frozenset[str] = FOR_GOOD

    def is_complete(self, entry: Entry) -> bool:
        """Whether an image generation with this row is complete."""
        if not entry.settings or entry.settings != self.provenance.settings(entry.kind):
            return False
        return (entry.model, entry.version) == self.provenance[2:] and (entry.kind == DETECTIONS or entry.reason in self.reasons)


def _hash(settings: Mapping[str, Any]) -> str:
    return hashlib.blake2b(row_bytes(sorted(settings.items())), digest_size=4).hexdigest()
