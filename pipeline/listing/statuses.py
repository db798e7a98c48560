"""The status of each image that a job's inputs name: listing minus the keys of rows, as the job asks it.

- done: a row of this generation, model version and settings
- dead: no row, but a permanent failure of the same
- stale: to be done; rows of this model version and settings are of other generations only
- missing: to be done; none of these
- orphaned: rows that the inputs' patterns would name, but whose images are gone

Memory holds hashes: 16 bytes for each listed image, 24 for each row.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress, islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from models.base.progress import shown
from pipeline.config import Config
from pipeline.failures import MAY_PASS
from pipeline.listing.containers import images_in, reading
from pipeline.listing.done_rows import DETECTED, FAILED, NEW, DoneRows
from pipeline.listing.list_images import list_images
from pipeline.listing.manifests import is_manifest
from pipeline.listing.names import file_of, is_container
from pipeline.records import ImageRef
from pipeline.results.completion import RowVersion, contains, row_keys
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.reader import ResultsFolder
from pipeline.results.row_rule import COLUMNS
from pipeline.results.rows import exact_uris, parquet_text
from pipeline.results.wanted import Wanted
from pipeline.storage.listing import MAX_PARALLEL, location_of

OF_LISTED, ORPHANED = ("done", "dead", "stale", "missing"), "orphaned"
_AT_ONCE = 65_536  # images

Images = Sequence[tuple[str, str]]  # by URI and generation: the listed one; of orphaned images, that of a row


def statuses(config: Config, output: str, version: RowVersion) -> Iterator[tuple[str, Images]]:
    """The images in parts of one status each, each image once.

    Args:
      config: The job's settings.
      output: The results folder or archive.
      version: The model, its version and the settings whose rows count.

    Raises:
      InputError: An input cannot be listed.
      FileNotFoundError: A compaction has deleted a shard meanwhile; begin anew, see `undisturbed`.
    """
    done, seen = DoneRows(output, version, run=uuid.uuid4().hex), np.zeros(0, np.uint64)
    known = np.concatenate([seen, *(_hashes(exact_uris(rows)) for rows in _rows(output, DETECTIONS, version))])
    known.sort()  # in place: a copy would take as much again
    refs = shown(_listed(config, output, done), "comparing", "images")
    with ThreadPoolExecutor(MAX_PARALLEL, "ask-generation") as pool:
        while some := list(islice(refs, _AT_ONCE)):
            hashes = _hashes([ref.uri for ref, _ in some])
            became = done.among([ref for ref, _ in some], pool)
            became[(became == NEW) & np.array([is_dead for _, is_dead in some])] = FAILED
            seen, is_new = _added(seen, hashes)  # several inputs may name one image
            found = np.select([became == DETECTED, became == FAILED, contains(known, hashes)], range(3), 3)
            for number, status in enumerate(OF_LISTED):
                if len(places := np.flatnonzero(is_new & (found == number))):
                    yield status, [(some[place][0].uri, some[place][0].generation) for place in places]
    folders = [location_of(pattern) for pattern in config.all_patterns() if not is_manifest(pattern)]
    for rows in _rows(output, DETECTIONS, version) if folders else ():
        uris = exact_uris(rows)
        seen, is_new = _added(seen, _hashes(uris))
        rest = compress(zip(uris, rows["generation"].to_pylist(), strict=True), is_new)
        if gone := [image for image in rest if any(folder.holds(file_of(image[0])) for folder in folders)]:
            yield ORPHANED, gone


def reasons(output: str, version: RowVersion, uris: Sequence[str]) -> dict[str, str]:
    """The reasons of the dead letters of some images, as far as there are any."""
    wanted, found = pa.array(map(parquet_text, uris), pa.string()), dict[str, str]()
    for rows in _rows(output, DEAD_LETTERS, version) if uris else ():
        of_uris = rows.filter(pc.is_in(rows["uri"], wanted))
        found |= zip(exact_uris(of_uris), of_uris["reason"].to_pylist(), strict=True)
    return found


def _listed(config: Config, output: str, done: DoneRows) -> Iterator[tuple[ImageRef, bool]]:
    """The images as the job lists them, those of containers too, each with whether the job does not open its container again.

    Such an image is dead if no row has its generation: damage within a container has none.
    """
    for ref in list_images(config.all_patterns(), output, allowed=config.stream.allow_uri_prefix):
        if isinstance(ref, ImageRef) and is_container(ref.uri):
            is_whole = file_of(ref.uri) == ref.uri
            known = is_whole and done.known(done.key_of_whole(ref, reading(ref.uri, config.read)))
            found = images_in(ref, config.read, config.detect.max_megapixels)
            yield from ((image.ref, bool(known)) for image in found if not isinstance(image, str))
        elif isinstance(ref, ImageRef):
            yield ref, False
        elif ref.reason in MAY_PASS:  # a folder that cannot be listed now
            yield ref.ref, False


def _rows(output: str, kind: str, version: RowVersion) -> Iterator[pa.Table]:
    """The rows of a kind, of this version."""
    wanted = Wanted(model=version.model, version=version.version, settings=version.settings)
    for _, table in ResultsFolder(output, (kind,)).tables([*COLUMNS, *wanted.columns, "reason"]):
        yield table.filter(pa.array(wanted.among(table, kind)))


def _hashes(uris: Sequence[str]) -> np.ndarray:
    return row_keys((uri, "", "", "", "") for uri in uris)


def _added(seen: np.ndarray, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted hashes with further ones, and which of these are new, of equal ones the first, `(N,) bool`."""
    new = np.zeros(len(hashes), bool)
    new[np.unique(hashes, return_index=True)[1]] = True
    new &= ~contains(seen, hashes)
    return np.sort(np.concatenate([seen, hashes[new]]), kind="stable"), new  # merges two sorted parts
