"""Which rows count as done: the version of a row (its model and settings), and its key.

The key of a row is a 64-bit hash of (uri, generation, model, version, settings). `run`, resume, compaction, reconciliation and
loading all use this one number: an image generation with a row of the same key is done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from pipeline.config import settings
from pipeline.records import name_bytes, row_bytes
from pipeline.results.layout import DETECTIONS

# The settings of the detector that decide which rows come out. Precision and reduced decoding change only their last digits.
_ROW_SETTINGS = tuple(each.name for each in settings() if each.schema.get("rows"))
# All settings of the model decide on rows, except these: they change from release to release, or with the machine.
_OF_RELEASES = ("model_version", "model_poll_s", "path", "name")
_OF_0_1_0 = {"server_timeout_s": 30.0, "server_wait_s": 600.0}  # they decide on no row, but stand in the hash of its rows


class RowVersion(NamedTuple):
    """Model and settings, as far as they decide whether rows would be made again.

    Attributes:
      model: Name of the model; empty if not known yet. Rows of detections have their own.
      version: Its version.
      settings: Hash of the settings that change detections; part of every key.
      limits: The same with the limits at which images are refused: a dead letter counts as done only for the same limits.
    """

    model: str = ""
    version: str = ""
    settings: str = ""
    limits: str = ""

    @staticmethod
    def of(settings: Mapping[str, Any], model: tuple[str, str] = ("", "")) -> RowVersion:
        """The version of a job's rows.

        Args:
          settings: All settings of the job, nested.
          model: Name and version of its model.
        """
        detect, of_model = settings.get("detect", {}), settings.get("model", {})
        of_rows = {name: value for name in _ROW_SETTINGS if (value := detect.get(name)) is not None}
        if of_rows.get("labels_per_box") == "best":  # rows from before there was this setting keep their hash
            del of_rows["labels_per_box"]
        of_rows["classes"] = sorted(of_rows.get("classes", ()))
        # A setting without a value is left out, so that a new setting keeps the hash of jobs that do not use it.
        of_rows |= {name: value for name, value in of_model.items() if name not in _OF_RELEASES and value is not None}
        of_rows |= _OF_0_1_0
        limits = {"max_megapixels": detect.get("max_megapixels"), "max_file_mb": settings.get("read", {}).get("max_file_mb")}
        return RowVersion(*model, _hash(of_rows), _hash(of_rows | limits))

    def settings_of(self, kind: str) -> str:
        """The hash in the column `settings` of a kind of rows."""
        return self.settings if kind == DETECTIONS else self.limits


UNKNOWN = RowVersion()


def row_keys(rows: Iterable[tuple[str, str, str, str, str]]) -> np.ndarray:
    """The keys of rows by URI, generation, model, version and settings, `(N,) uint64`: 63 bits of a 64-bit hash.

    >>> first, second = row_keys([("gs://b/a.jpg", "17", "yolov4", "7", "ab12"), ("gs://b/a.jpg", "18", "yolov4", "7", "ab12")])
    >>> bool(first == second)
    False
    """
    digests = b"".join([hashlib.blake2b(name_bytes("\0".join(parts)), digest_size=8).digest() for parts in rows])
    return np.frombuffer(digests, ">u8").astype(np.uint64) >> np.uint64(1)  # fits into the signed integers of BigQuery


def contains(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Which of some keys are among sorted keys, `(N,) bool`.

    >>> contains(np.array([3, 7], np.uint64), np.array([7, 8, 2], np.uint64)).tolist()
    [True, False, False]
    """
    if not len(keys):
        return np.zeros(len(wanted), bool)
    return np.asarray(np.take(keys, np.searchsorted(keys, wanted), mode="clip") == wanted)


def _hash(settings: Mapping[str, Any]) -> str:
    return hashlib.blake2b(row_bytes(sorted(settings.items())), digest_size=4).hexdigest()
