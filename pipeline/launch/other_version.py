"""A job says before it begins that it detects again in images that have rows of another version of its model.

It looks at the beginning of the listing only, and where no other version has rows, at none of it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import pyarrow.compute as pc

from pipeline.config import Config
from pipeline.detect.load_model import name_and_version
from pipeline.errors import ModelError
from pipeline.listing.done_rows import NEW, DoneRows
from pipeline.listing.list_images import list_images
from pipeline.log_lines import console, plural
from pipeline.records import ImageRef
from pipeline.results.completion import contains, row_keys
from pipeline.results.layout import DETECTIONS
from pipeline.results.reader import ResultsFolder, undisturbed
from pipeline.storage.listing import MAX_PARALLEL

_LOOKED_AT = 10_000  # images; the listing of a hundred million takes minutes


def tell_of_other_version(config: Config, done: DoneRows) -> None:
    """Says how many images of a job have rows of another version, and none of its own, and which flag keeps these rows.

    Only rows of the job's settings count: without them the flag would keep none. Images in containers are not looked at.

    Raises:
      UnreadableError: The results cannot be read now.
      InputError: An input cannot be listed.
    """
    rows = undisturbed(lambda: _rows_of_others(done))
    if not rows:
        return
    listed = list_images(config.all_patterns(), config.output, allowed=config.stream.allow_uri_prefix)
    looked_at = list(islice(listed, _LOOKED_AT + 1))
    images = {ref.uri: ref for ref in looked_at[:_LOOKED_AT] if isinstance(ref, ImageRef)}
    with ThreadPoolExecutor(MAX_PARALLEL, "ask-generation") as pool:
        asked = pool.map(lambda ref: ref.generation or done.generation_of(ref), images.values())
        identities = list(zip(images, asked, strict=True))
    new = [identity for identity, outcome in zip(identities, done.have(identities), strict=True) if outcome == NEW]
    again = undisturbed(lambda: _have_rows(new, done, rows)) if new else {}
    if not again:
        return
    version = max(again, key=lambda each: (again[each], each.isdecimal() and int(each)))
    number, in_all = plural(again[version], "image"), ""
    if len(looked_at) > _LOOKED_AT:
        number = f"{again[version]} of the first {_LOOKED_AT} images"
        in_all = f", as {plural(rows[version], 'image')} in {done.output},"
    name, own = done.version[:2]
    keeps = _what_keeps(config, version)
    console.info("model %s %s: %s detected by version %s%s will be detected again; %s", name, own, number, version, in_all, keeps)


def _rows_of_others(done: DoneRows) -> Counter[str]:
    """The number of rows that other versions of the model have with the same settings."""
    model, own, settings, _ = done.version
    rows: Counter[str] = Counter()
    for _, table in ResultsFolder(done.output, (DETECTIONS,)).tables(["model", "version", "settings"]):
        of_model = pc.and_(pc.equal(table["model"], model), pc.equal(table["settings"], settings))
        counts = pc.value_counts(table["version"].filter(of_model))
        rows.update(dict(zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True)))
    del rows[own]
    return rows


def _have_rows(images: Sequence[tuple[str, str]], done: DoneRows, versions: Iterable[str]) -> Counter[str]:
    """How many images, by URI and generation, have a row of detections of each version."""
    model, _, settings, _ = done.version
    keys = {version: row_keys((*image, model, version, settings) for image in images) for version in versions}
    version_of = {key: version for version, of_version in keys.items() for key in of_version.tolist()}
    wanted, found = np.array(sorted(version_of), np.uint64), set[int]()
    for _, table in ResultsFolder(done.output, (DETECTIONS,)).tables(["key"]):
        of_shard = table["key"].to_numpy().astype(np.uint64)
        found.update(of_shard[contains(wanted, of_shard)].tolist())
    return Counter(version_of[key] for key in found)


def _what_keeps(config: Config, version: str) -> str:
    try:
        known = name_and_version(dataclasses.replace(config.model, model_version=version), config.detect.engine)[1]
    except ModelError:
        known = ""
    return f"--model-version {version} keeps that one" if known == version else f"--model has no version {version} any more"
