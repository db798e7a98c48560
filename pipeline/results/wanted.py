"""Which rows of a results folder a command takes: the flags that choose, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.results.completion import row_keys
from pipeline.results.layout import DETECTIONS, time_in_name
from pipeline.results.rows import exact_uris
from pipeline.results.shards import COMPACTED, Shard


class Wanted(NamedTuple):
    """Which rows are wanted, before the rule of the current row chooses among them; empty: all.

    Attributes:
      run: Only rows that this run wrote.
      model: Only rows of the model with this name.
      version: Only those of this version.
      settings: Only those of these settings, as `RowVersion` has them.
      since: Only those that were made from this moment on, in seconds since the epoch.
      every: The newest row of each image generation, version and settings, not only the current one of each image and model.
    """

    run: str = ""
    model: str = ""
    version: str = ""
    settings: str = ""
    since: float = 0.0
    every: bool = False

    def may_be_in(self, shard: Shard) -> bool:
        """Whether a shard may hold such rows, by its name."""
        return not self.run or shard.run in (self.run, COMPACTED)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `among` needs."""
        return (*(name for name, value in self._texts() if value), *(("generation", "model", "version") if self.settings else ()))

    def among(self, rows: pa.Table | pa.RecordBatch, kind: str) -> np.ndarray:
        """Which of some rows are wanted, `(N,) bool`.

        Args:
          rows: With `columns` and those of the rule.
          kind: Theirs. A dead letter has another hash in its column `settings`, and the settings of detections in its key.
        """
        found = rows["made_at"].cast(pa.int64()).to_numpy() >= self.since * 1e6
        for name, value in self._texts():
            if value and (name != "settings" or kind == DETECTIONS):
                found &= pc.equal(rows[name], value).to_numpy(zero_copy_only=False)
        if self.settings and kind != DETECTIONS:
            named = (rows[name].to_pylist() for name in ("generation", "model", "version"))
            found &= (
                row_keys((*each, self.settings) for each in zip(exact_uris(rows), *named, strict=True)) == rows["key"].to_numpy()
            )
        return np.asarray(found)

    def _texts(self) -> Sequence[tuple[str, str]]:
        return (("run", self.run), ("model", self.model), ("version", self.version), ("settings", self.settings))

    def flags(self) -> str:
        """The flags that choose these rows, for a line that finds none."""
        texts = {"run": self.run, "model": self.model, "model-version": self.version, "settings": self.settings}
        day = time_in_name(self.since)[:8] if self.since else ""
        texts["since"] = f"{day[:4]}-{day[4:6]}-{day[6:]}" if day else ""
        return "".join(f", --{name} {value}" for name, value in texts.items() if value)


ALL = Wanted()


def add_row_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose among rows; `wanted_rows` reads them."""
    add = parser.add_argument
    add("--model", default="", metavar="NAME", help="only rows of the model with this name")
    text = "only rows of this version of the model (default: of each image that of its newest row)"
    add("--model-version", default="", metavar="VERSION", help=text)
    text = "only rows of these settings, as the column settings has them (default: of each image those of its newest row)"
    add("--settings", default="", metavar="HASH", help=text)
    text = "the newest row of each image generation, model version and settings, not only the current one of each image and model"
    add("--all", dest="every", action="store_true", help=text)


def wanted_rows(flags: argparse.Namespace) -> Wanted:
    """Which rows the flags of `add_row_flags` choose."""
    return Wanted(model=flags.model, version=flags.model_version, settings=flags.settings, every=flags.every)
