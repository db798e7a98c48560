"""The results folder: what lies where, which files are a run's own, and how they get their names.

    detections/detections-<run>-00000-of-00003.jsonl      rows of images that were detected; .parquet, .tfrecord on request
    dead_letters/dead_letters-<run>-00000-of-00001.jsonl  rows of images that were not
    index/detections-<run>-00000-of-00003.parquet         of each file of rows: whose rows they are (see `ledger`)
    coco/results.json  coco/images.json                   on request
    samples/001-<name>.jpg                                on request
    summary.json  report.html                             of the latest run; what stands beside rows
    runs/<run>/                                           the same of earlier ones (see `beside`)
    .staging-<run>/                                       unfinished files of a run; no reader looks there
    .lease-<run>  .lease                                  who works at what now (see `lease`)

The name of a run is made of its command (`3f2a9c01`), so that the same command gives the same files; with its start where it adds
to others (`3f2a9c01-20261121T020000Z`); a stream's names a window and the job (`20261121T020000Z-0a1b2c3d`), as does that of
files which many became (`20261121T020000Z-compact<id>`). Files of versions before names have none.

Whatever else lies there belongs to somebody else: it is read like any input, never counted as a result, and never deleted.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import posixpath
import re
import uuid
from typing import Annotated, Any, NamedTuple, TypedDict

from apache_beam.io.filesystems import FileSystems

from pipeline.errors import OutputError
from pipeline.records import ImageRef, identity_hash
from pipeline.storage.files import UNFINISHED, create, delete_files, list_files, make_folder
from pipeline.storage.globs import escape_glob, is_below
from pipeline.storage.state import lies_in, read_state
from pipeline.storage.waiting import waiting_for

DETECTIONS, DEAD_LETTERS = "detections", "dead_letters"
SUMMARY, REPORT, SAMPLES = "summary.json", "report.html", "samples"
RECONCILIATION = "reconcile.html"
COCO_RESULTS, COCO_IMAGES = "coco/results.json", "coco/images.json"
INDEX, RUNS = "index", "runs"
STAGING = UNFINISHED
MADE_BY = b"made by detect-objects"  # marks pages and pictures of this program


def _rows(run: str) -> str:
    """The pattern of the names of files of rows, and of what is made of them, in which `run` stands for who wrote them."""
    numbers, endings = r"\d{5,}-of-\d{5,}", "jsonl|parquet|tfrecord"
    return rf"(detections|dead_letters)/\1-{run}{numbers}\.({endings})|{INDEX}/(detections|dead_letters)-{run}{numbers}\.parquet"


_COCO = r"coco/(results|images)\.json"
_BATCH = re.compile(_rows(r"(?:[0-9a-f]{8}-(?:\d{8}T\d{6}Z-)?)?") + rf"|{_COCO}")
_STREAM = re.compile(_rows(r"\d{8}T\d{6}Z-[\w-]+-"))
_SAMPLE = r"samples/\d{3,}-[\w.-]*\.jpg"
_OTHERS = re.compile(
    rf"(runs/[\w-]+/)?(summary\.json|report\.html|{_SAMPLE})|reconcile\.html|runs/[\w-]+/{_COCO}"
    r"|((detections|dead_letters|index|coco|samples|runs/[^/]+(/coco|/samples)?)/)?\.staging-[^/]+(/.*)?"
    r"|\.spills-[^/]+(/.*)?|\.lease[^/]*",
    re.DOTALL,
)
_RUN = re.compile(r"/(?:detections|dead_letters)-(.*)-\d{5,}-of-\d{5,}\.\w+$")
_ROWS = re.compile(r"(^|/)(detections|dead_letters)-([^/]*-)?\d{5,}-of-\d{5,}\.(jsonl|parquet|tfrecord)$")
_COMPACTED = re.compile(r"-compact[0-9a-f]{12}-")
_NAMED_TIME = re.compile(r"-(\d{8}T\d{6}Z)-")
_TIME = "%Y%m%dT%H%M%SZ"
_STEM_BYTES = 120  # file systems bound a name's bytes, not its characters


def is_run_name(name: str) -> bool:
    """Whether a run may have this name; what was read from storage becomes part of a path only then."""
    return re.fullmatch(r"[\w-]*", name) is not None


RunName = Annotated[str, is_run_name]


class Settings(TypedDict, total=False):
    """A run's settings as a state file has them: those that other runs look at, and more."""

    mode: str
    input: list[str]
    only_new: bool
    write: dict[str, Any]
    model: dict[str, Any]
    detect: dict[str, Any]


class _SummaryOfAll(TypedDict):
    images: dict[str, Any]
    config: Settings
    mode: str


class _Summary(_SummaryOfAll, total=False):
    run: RunName
    name: RunName
    samples: list[str]


class StagedFile(NamedTuple):
    """A complete file in staging and the name it will have."""

    staged: str
    final: str


def shard_of(ref: ImageRef, shards: int) -> int:
    """The shard of an image's row, by its identity alone: the same whatever else is in the run."""
    return identity_hash(ref.identity) % shards


def shard_name(kind: str, number: int, shards: int, run: str = "") -> str:
    """The name of one of a kind's files, without its ending."""
    return f"{kind}/{kind}-{f'{run}-' if run else ''}{number:05d}-of-{shards:05d}"


def run_of_rows(name: str) -> str:
    """The run whose name a file of rows carries, or its index; empty where it has none.

    >>> run_of_rows("detections/detections-3f2a9c01-00000-of-00001.jsonl")
    '3f2a9c01'
    >>> run_of_rows("index/detections-00000-of-00001.parquet")
    ''
    """
    match = _RUN.search(name)
    return match[1] if match else ""


def archive_name(kind: str, window: str, job: str, shard: int, shards: int) -> str:
    """The name of one file of a stream's archive; `window` is its beginning, as `20261121T020000Z`."""
    return f"{kind}/{kind}-{window}-{job}-{shard:05d}-of-{shards:05d}.jsonl"


def time_in_name(seconds: float) -> str:
    """A moment, in seconds since the epoch, as the names of files have it.

    >>> time_in_name(1795226400.5)
    '20261121T020000Z'
    """
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime(_TIME)


def seconds_in_name(path: str) -> float:
    """When the job or window began whose rows a file has, in seconds since the epoch; 0 where its name does not say.

    >>> seconds_in_name("detections/detections-20261121T020000Z-0a1b2c3d-00000-of-00001.jsonl")
    1795226400.0
    """
    named = _NAMED_TIME.search(posixpath.basename(path))
    try:
        moment = datetime.datetime.strptime(named[1] if named else "", _TIME)
    except ValueError:
        return 0.0
    return moment.replace(tzinfo=datetime.timezone.utc).timestamp()


def index_name(rows: str) -> str:
    """The name of the index of a file of rows, by its path or name.

    >>> index_name("detections/detections-00000-of-00001.jsonl")
    'index/detections-00000-of-00001.parquet'
    """
    return f"{INDEX}/{posixpath.basename(rows).removesuffix('.jsonl')}.parquet"


def sample_name(number: int, uri: str) -> str:
    """The name of an annotated image.

    >>> sample_name(1, "gs://bucket/some/photo one.png")
    'samples/001-photo_one.jpg'
    """
    stem = re.sub(r"[^\w.-]+", "_", posixpath.splitext(posixpath.basename(uri))[0])
    return f"{SAMPLES}/{number:03d}-{stem.encode()[:_STEM_BYTES].decode('utf-8', 'ignore')}.jpg"


def is_result(path: str, output: str) -> bool:
    """Whether a file in an output folder has a name that this program gives, finished or not; others are somebody else's."""
    if not is_below(path, output):
        return False
    if "://" not in path:
        path, output = os.path.abspath(path), os.path.abspath(output)
    return is_result_name(path[len(output.rstrip("/")) + 1 :])


def is_result_name(name: str) -> bool:
    """Whether this program gives a name, relative to its results folder, to a file, finished or not."""
    return any(pattern.fullmatch(name) for pattern in (_BATCH, _STREAM, _OTHERS))


def is_replaceable(name: str, output: str) -> bool:
    """Whether a name that a state file gives is one of a result that may be moved or deleted, and lies in the output folder."""
    return not name.startswith(".") and is_result(f"{output}/{name}", output) and lies_in(f"{output}/{name}", output)


def kind_of_rows(path: str) -> str:
    """Which rows a file holds by its name, in whatever folder: `detections` or `dead_letters`; else empty."""
    found = _ROWS.search(path)
    return found[2] if found else ""


def is_of_stream(path: str) -> bool:
    """Whether a stream wrote a file of rows, by its path; of compacted rows it may be any one's.

    >>> [
    ...     is_of_stream(f"detections/detections-20261121T020000Z-{of}-00000-of-00001.jsonl")
    ...     for of in ("0a1b", "compact0123456789ab")
    ... ]
    [True, False]
    """
    name = "/".join(path.split("/")[-2:])
    return _STREAM.fullmatch(name) is not None and _COMPACTED.search(name) is None


class Rows(NamedTuple):
    """The names of the files of rows, and of what is made of them, in an output folder.

    Attributes:
      of_batch: Those of batch jobs.
      of_streams: Those of archives.
    """

    of_batch: list[str]
    of_streams: list[str]


def list_rows(output: str) -> Rows:
    """What lies in an output folder under names that this program gives to files of rows."""
    folders = [f"{output}/{kind}" for kind in (DETECTIONS, DEAD_LETTERS, INDEX, posixpath.dirname(COCO_RESULTS))]
    names = [path[len(output) + 1 :] for folder in folders for path in list_files(f"{escape_glob(folder)}/*")]
    return Rows(*([name for name in names if pattern.fullmatch(name)] for pattern in (_BATCH, _STREAM)))


def read_summary(output: str) -> dict[str, Any]:
    """The summary of the latest run in an output folder; empty where there is none, or none of this program."""
    summary: dict[str, Any] = read_state(f"{output}/{SUMMARY}", _Summary) or {}
    return summary


def earlier_samples(output: str, run: str) -> list[str]:
    """The names of the samples that a run before this one wrote, as its summary lists them."""
    summary = read_summary(output)
    if summary.get("run") == run:
        return []
    return [name for name in summary.get("samples", ()) if is_replaceable(name, output)]


def check_output(output: str, write: bool = True) -> None:
    """Makes sure that results can be written; without `write` only as far as that can be told without writing.

    Raises:
      OutputError: They cannot.
    """
    with waiting_for(f"output {output}"):
        _check_output(output, write)


def _check_output(output: str, write: bool) -> None:
    probe = f"{output}/{STAGING}{uuid.uuid4().hex[:12]}"  # two jobs may look at once
    try:
        if not write:
            FileSystems.match([f"{escape_glob(output)}/*"], limits=[1])
            _check_local_folder(output)
            return
        make_folder(output)
        _write_and_delete(probe)
        _refuse_links(output)
    except OutputError:
        raise
    except Exception as err:
        raise OutputError(
            f"output {output}: expected a folder that can be written, but: {' '.join(str(err).split())[:300]}"
        ) from err


def _refuse_links(output: str) -> None:
    for name in (DETECTIONS, DEAD_LETTERS, INDEX, SAMPLES, posixpath.dirname(COCO_RESULTS), RUNS):
        if os.path.islink(f"{output}/{name}"):
            raise OutputError(f"output {output}: expected {name} to be a folder of its own, it is a link to another one")


def _write_and_delete(path: str) -> None:
    try:
        with create(path) as file:
            file.write(b"probe")
        delete_files([path])
    except KeyboardInterrupt:
        with contextlib.suppress(Exception):  # that it was stopped is what matters
            delete_files([path])
        raise


def _check_local_folder(output: str) -> None:
    if "://" in output:
        return
    existing = os.path.abspath(output)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if not (os.path.isdir(existing) and os.access(existing, os.W_OK)):
        raise OutputError(f"output {output}: expected a folder that can be written, {existing} is none")
