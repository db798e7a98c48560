"""Which rows count as done: the version of a row (its model and settings), and its key.

The key of a row is a 64-bit hash of (uri, generation, model, version, settings). `run`, resume, compaction, reconciliation and
loading all use this one number: an image generation with a row of the same key is done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from pipeline.config import settings
from pipeline.records import name_bytes, row_bytes
from pipeline.results.layout import DETECTIONS

# A setting that has its default stays out of the hash, so that a new one changes no row; but these stand in each since 0.1.0.
_ALWAYS = frozenset({"score_threshold", "iou_threshold", "classes", "max_detections", "max_megapixels", "max_file_mb"})
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
        of_rows = {name: value for name, value in _deciding(settings, "rows") if value is not None} | _OF_0_1_0
        of_rows["classes"] = sorted(of_rows.get("classes", ()))
        return RowVersion(*model, _hash(of_rows), _hash(of_rows | dict(_deciding(settings, "limits"))))

    def settings_of(self, kind: str) -> str:
        """The hash in the column `settings` of a kind of rows."""
        return self.settings if kind == DETECTIONS else self.limits


def _deciding(values: Mapping[str, Any], identity: str) -> Iterator[tuple[str, Any]]:
    """The names and values of the settings of all sections that decide on rows, or on limits."""
    for each in settings():
        section, _, name = each.key.rpartition(".")
        value = (values.get(section, {}) if section else values).get(name)
        if each.identity == identity and (name in _ALWAYS or value != each.default):
            yield name, value


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
