"""What counts as done: what a row says of an image generation, by what it was made, and whether that is what a run would make."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.config import OF_RELEASES
from pipeline.failures import FOR_GOOD
from pipeline.records import row_bytes
from pipeline.storage.results import DETECTIONS

# of the detector's settings those that decide which rows come out; precision and reduced decoding change their last digits
_OF_DETECTIONS = ("score_threshold", "iou_threshold", "classes", "max_detections")


class Entry(NamedTuple):
    """What a row says is done.

    Attributes:
      uri: The image.
      generation: Its version; empty where its reader did not come that far.
      kind: `detections` or `dead_letters`.
      model: Name of the model; empty where it is not known.
      version: The model's version.
      settings: Hash of the settings that change rows; empty where they are not known.
      reason: Why it is a dead letter; empty for detections.
      made_at: When the job or window began that made it, seconds since the epoch; 0 where only the row's file tells.
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
    """By what rows are made, as far as it decides whether they would be made again.

    Attributes:
      detections: Hash of the settings that change rows of detections.
      dead_letters: The same with the limits by which images are refused.
      model: Name of the model; empty where it is not known yet. Rows of detections say their own.
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
        detect, read = settings.get("detect", {}), settings.get("read", {})
        of_rows = {name: detect.get(name) for name in _OF_DETECTIONS}
        of_rows["classes"] = sorted(of_rows["classes"] or ())
        # what is not set is left out, so that a setting of a later version leaves the hash of those who do not use it
        of_no_row = {"path", "name", *OF_RELEASES}
        of_rows |= {key: value for key, value in settings.get("model", {}).items() if key not in of_no_row and value is not None}
        limits = {"max_megapixels": detect.get("max_megapixels"), "max_file_mb": read.get("max_file_mb")}
        return Provenance(_hash(of_rows), _hash(of_rows | limits), *model)

    def settings(self, kind: str) -> str:
        """The hash of the settings that change rows of a kind."""
        return self.detections if kind == DETECTIONS else self.dead_letters


UNKNOWN = Provenance()


class CompletionRule(NamedTuple):
    """What counts as done for a run.

    Attributes:
      provenance: Rows of this model and these settings.
      reasons: Of dead letters, those that failed for one of these reasons.
    """

    provenance: Provenance
    reasons: frozenset[str] = FOR_GOOD

    def is_complete(self, entry: Entry) -> bool:
        """Whether an image generation with this entry need not be done again."""
        if not entry.settings or entry.settings != self.provenance.settings(entry.kind):
            return False
        return (entry.model, entry.version) == self.provenance[2:] and (entry.kind == DETECTIONS or entry.reason in self.reasons)


def _hash(settings: Mapping[str, Any]) -> str:
    return hashlib.blake2b(row_bytes(sorted(settings.items())), digest_size=4).hexdigest()
