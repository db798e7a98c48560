"""The results folder: what lies where, which files are a run's own, and how they get their names.

    detections/detections-00000-of-00003.jsonl     rows of images that were detected; .parquet beside on request
    dead_letters/dead_letters-00000-of-00001.jsonl rows of images that were not
    <kind>/<kind>-<window>-<job>-00000-of-00001.jsonl  the same, archived by a stream
    coco/results.json  coco/images.json            on request
    samples/001-<name>.jpg                         on request
    summary.json  report.html
    .staging-<run>/                                unfinished files of a run; no reader looks there

Whatever else lies there belongs to somebody else: it is read like any input, never counted as a result, and never deleted.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Sequence
from typing import NamedTuple

from apache_beam.io.filesystems import FileSystems

from pipeline.errors import OutputError
from pipeline.records import ImageRef, identity_hash
from pipeline.storage.files import UNFINISHED, create, delete_files, list_files, make_folder
from pipeline.storage.globs import escape_glob, is_below
from pipeline.storage.stopping import begin_publishing

DETECTIONS, DEAD_LETTERS = "detections", "dead_letters"
SUMMARY, REPORT, SAMPLES = "summary.json", "report.html", "samples"
COCO_RESULTS, COCO_IMAGES = "coco/results.json", "coco/images.json"
STAGING = UNFINISHED

_SHARD_NAME = re.compile(r"/(detections|dead_letters)-\d{5}-of-\d{5}\.(jsonl|parquet)$|/coco/(results|images)\.json$")
_RESULTS = (f"{DETECTIONS}/", f"{DEAD_LETTERS}/", "coco/", f"{SAMPLES}/", SUMMARY, REPORT, STAGING)


class StagedFile(NamedTuple):
    """A complete file in staging and the name it will have."""

    staged: str
    final: str


def shard_of(ref: ImageRef, shards: int) -> int:
    """The shard of an image's row, by its identity alone: the same whatever else is in the run."""
    return identity_hash(ref.identity) % shards


def shard_name(kind: str, number: int, shards: int) -> str:
    """The name of one of a kind's files, without its ending."""
    return f"{kind}/{kind}-{number:05d}-of-{shards:05d}"


def archive_name(kind: str, window: str, job: str, shard: int, shards: int) -> str:
    """The name of one file of a stream's archive; `window` is its beginning, as `20261121T020000Z`."""
    return f"{kind}/{kind}-{window}-{job}-{shard:05d}-of-{shards:05d}.jsonl"


def is_result(path: str, output: str) -> bool:
    """Whether a file is a result of a run into `output`, finished or not; images that lie there are input like any other."""
    if not is_below(path, output):
        return False
    if "://" not in path:
        path, output = os.path.abspath(path), os.path.abspath(output)
    below = path[len(output.rstrip("/")) + 1 :]
    return below.startswith(_RESULTS)


def publish(output: str, staged: Sequence[StagedFile]) -> int:
    """Moves staged files under `output`; files of an earlier run of a batch job that are not among them go.

    From its beginning a signal does not stop the job any more (`stopping`).
    """
    begin_publishing()
    final = {f"{output}/{file.final}": file.staged for file in staged}
    for folder in sorted({posixpath.dirname(path) for path in final}):
        make_folder(folder)
        old = list_files(f"{escape_glob(folder)}/*")
        delete_files(path for path in old if _SHARD_NAME.search(path) and path not in final)
    FileSystems.rename(list(final.values()), list(final))
    return len(final)


def remove_staging(output: str) -> None:
    """Removes the staging folders of this and earlier runs."""
    if "://" not in output:
        import glob
        import shutil

        for folder in glob.glob(glob.escape(output) + f"/{STAGING}*"):
            shutil.rmtree(folder, ignore_errors=True)
        return
    delete_files(list_files(f"{escape_glob(output)}/{STAGING}**"))


def check_output(output: str, write: bool = True) -> None:
    """Makes sure that results can be written; without `write` only as far as that can be told without writing.

    Raises:
      OutputError: They cannot.
    """
    probe = f"{output}/{STAGING}probe"
    try:
        if not write:
            FileSystems.match([f"{escape_glob(output)}/*"], limits=[1])
            _check_local_folder(output)
            return
        make_folder(output)
        with create(probe) as file:
            file.write(b"probe")
        delete_files([probe])
    except OutputError:
        raise
    except Exception as err:
        raise OutputError(
            f"output {output}: expected a folder that can be written, but: {' '.join(str(err).split())[:300]}"
        ) from err


def _check_local_folder(output: str) -> None:
    if "://" in output:
        return
    existing = os.path.abspath(output)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if not (os.path.isdir(existing) and os.access(existing, os.W_OK)):
        raise OutputError(f"output {output}: expected a folder that can be written, {existing} is none")
