"""The class names of the models that have written into a results folder, as the summaries of its runs have them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

import msgspec

from pipeline.results.layout import RUNS, SUMMARY, read_summary_as
from pipeline.storage.globs import escape_glob
from pipeline.storage.listing import files_in, location_of

_MOST_RUNS = 100  # whose summaries are read; each takes a request where the folder is on object storage


class _Model(msgspec.Struct):
    name: str
    version: str
    class_names: list[str] = []


class _Summary(msgspec.Struct):
    model: _Model


def class_names_of(output: str, models: Collection[tuple[str, str]]) -> dict[int, str]:
    """The names of all classes of models, by number; none of a model whose runs are all of 0.1.0, which did not note them.

    Args:
      output: The results folder.
      models: Name and version of each.
    """
    names: dict[int, str] = {}
    missing = {*models}
    for model in itertools.islice(_models_of_runs(output), _MOST_RUNS):
        if (version := (model.name, model.version)) in missing:
            missing.remove(version)
            names = dict(enumerate(model.class_names)) | names
        if not missing:
            break
    return names


def _models_of_runs(output: str) -> Iterator[_Model]:
    """The model of the newest run, then those of all runs, as far as their summaries have its class names."""
    runs = (file.path for file in files_in(location_of(f"{escape_glob(output)}/{RUNS}/*/{SUMMARY}")))
    for path in itertools.chain([f"{output}/{SUMMARY}"], runs):
        summary = read_summary_as(_Summary, path)
        if summary and summary.model.class_names:
            yield summary.model
