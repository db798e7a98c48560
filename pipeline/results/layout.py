"""The layout of the results folder: which file lies where, and which names are this program's.

    detections/detections-<run>-00000-of-00003.jsonl      rows of detected images; .parquet, .csv and more on request
    dead_letters/dead_letters-<run>-00000-of-00001.jsonl  rows of images that failed
    index/detections-<run>-00000-of-00003.parquet         index of a file of rows (see `ledger`)
    runs/<run>/                                           reports of a run:
        summary.json  report.html
        coco/results.json  coco/images.json               on request
        samples/001-<name>.jpg                            on request
    summary.json  report.html  coco/  samples/            copies of the latest run's
    .staging-<run>/                                       a run's unfinished files (see `run`); no reader looks there
        run.json  lock                                    its state; shows that it is alive
        spill/  merge/  resumed-<run>/  <id>/             of a batch job: sorted rows, resume points, files to be committed
        archive/                                          of a stream: rows on their way to files (see `stream.archive`)
    bigquery/<table>-<time>/                              which rows are in a table (see `bigquery_loader`)
    .lease-<run>  .lease                                  which run works at which images now (see `lease`)

Results are additive, by one rule: a file carries the name of its run, and a commit deletes

- the copies at the top, for the new run's take their place,
- files of the same name that the new run does not write again, since the same command has the same name,
- with `--replace`, the rows, indexes and reports of all other batch runs.

A run's name is a hash of its command (`3f2a9c01`), and with `--only-new` also its start (`3f2a9c01-20261121T020000Z`), so that it
replaces nothing. Names of a stream's files have the window and the job (`20261121T020000Z-0a1b2c3d`), names of compacted files
the start and an id (`20261121T020000Z-compact<id>`). Files may also have no run in their names.

All other files are not this program's: it reads them like any input, and never counts, replaces or deletes them.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import posixpath
import re
import uuid
from typing import Annotated, Any, NamedTuple, TypedDict

from apache_beam.io.filesystems import FileSystems

from pipeline.config.paths import local_path
from pipeline.errors import ConfigError, FullError, OutputError
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
BIGQUERY = "bigquery"  # the state of loads, by table
STAGING, ARCHIVE = UNFINISHED, "archive"
MADE_BY = b"made by detect-objects"  # marks pages and pictures of this program


_ENDINGS = r"jsonl|parquet|tfrecord|csv|yolo\.zip|voc\.zip|cvat\.xml|label-studio\.json"


def _rows(run: str) -> str:
    """The pattern of the names of files of rows and of files made from them; `run` is the pattern of the run's part."""
    numbers = r"\d{5,}-of-\d{5,}"
    return rf"(detections|dead_letters)/\1-{run}{numbers}\.({_ENDINGS})|{INDEX}/(detections|dead_letters)-{run}{numbers}\.parquet"


_COCO = r"coco/(results|images)\.json"
_BATCH = re.compile(_rows(r"(?:[0-9a-f]{8}-(?:\d{8}T\d{6}Z-)?)?") + rf"|{_COCO}")
_STREAM = re.compile(_rows(r"\d{8}T\d{6}Z-[\w-]+-"))
_SAMPLE = r"samples/\d{3,}-[\w.-]*\.jpg"
_OTHERS = re.compile(
    rf"(runs/[\w-]+/)?(summary\.json|report\.html|{_SAMPLE})|reconcile\.html|runs/[\w-]+/{_COCO}"
    r"|((detections|dead_letters|index|coco|samples|runs/[^/]+(/coco|/samples)?)/)?\.staging-[^/]+(/.*)?"
    rf"|\.lease[^/]*|{BIGQUERY}/.*",
    re.DOTALL,
)
_RUN = re.compile(r"/(?:detections|dead_letters)-(.*)-\d{5,}-of-\d{5,}\.[\w.-]+$")
_ROWS = re.compile(rf"(^|/)(detections|dead_letters)-([^/]*-)?\d{{5,}}-of-\d{{5,}}\.({_ENDINGS})$")
_COMPACTED = re.compile(r"-compact[0-9a-f]{12}-")
_NAMED_TIME = re.compile(r"-(\d{8}T\d{6}Z)-")
_TIME = "%Y%m%dT%H%M%SZ"
_STEM_BYTES = 120  # file systems bound a name's bytes, not its characters


def is_run_name(name: str) -> bool:
    """Whether a run may have this name; only then may a name that was read from storage become part of a path."""
    return re.fullmatch(r"[\w-]*", name) is not None


RunName = Annotated[str, is_run_name]


class Settings(TypedDict, total=False):
    """A run's settings in a state file: those that other runs compare, and more."""

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
    """The shard of an image's row; it depends on the image's identity alone."""
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
    """The name of one file of a stream's archive; `window` is the start of its window, as `20261121T020000Z`."""
    return f"{kind}/{kind}-{window}-{job}-{shard:05d}-of-{shards:05d}.jsonl"


def time_in_name(seconds: float) -> str:
    """A moment, in seconds since the epoch, as file names have it.

    >>> time_in_name(1795226400.5)
    '20261121T020000Z'
    """
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime(_TIME)


def seconds_in_name(path: str) -> float:
    """The start in a file's name, of its job or window, in seconds since the epoch; 0 if the name has none.

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
    """Whether a file in an output folder has a name that this program gives to files, finished or not."""
    if not is_below(path, output):
        return False
    if "://" not in path:
        path, output = os.path.abspath(path), os.path.abspath(output)
    return is_result_name(path[len(output.rstrip("/")) + 1 :])


def is_result_name(name: str) -> bool:
    """Whether this program gives this name, relative to the results folder, to files, finished or not."""
    return any(pattern.fullmatch(name) for pattern in (_BATCH, _STREAM, _OTHERS))


def is_replaceable(name: str, output: str) -> bool:
    """Whether a name in a state file is that of a result in the output folder, which may be moved or deleted."""
    return not name.startswith(".") and is_result(f"{output}/{name}", output) and lies_in(f"{output}/{name}", output)


def kind_of_rows(path: str) -> str:
    """Which rows a file has, by its name, in any folder: `detections`, `dead_letters`, or empty for other files."""
    found = _ROWS.search(path)
    return found[2] if found else ""


def is_of_stream(path: str) -> bool:
    """Whether a stream wrote a file of rows, by its path; False for compacted files, which may have rows of any run.

    >>> [
    ...     is_of_stream(f"detections/detections-20261121T020000Z-{of}-00000-of-00001.jsonl")
    ...     for of in ("0a1b", "compact0123456789ab")
    ... ]
    [True, False]
    """
    name = "/".join(path.split("/")[-2:])
    return _STREAM.fullmatch(name) is not None and _COMPACTED.search(name) is None


class Rows(NamedTuple):
    """The names of the files of rows, and of files made from them, in an output folder.

    Attributes:
      of_batch: Files of batch jobs.
      of_streams: Files of archives.
    """

    of_batch: list[str]
    of_streams: list[str]


def list_rows(output: str) -> Rows:
    """The files in an output folder whose names are those of rows."""
    folders = [f"{output}/{kind}" for kind in (DETECTIONS, DEAD_LETTERS, INDEX, posixpath.dirname(COCO_RESULTS))]
    names = [path[len(output) + 1 :] for folder in folders for path in list_files(f"{escape_glob(folder)}/*")]
    return Rows(*([name for name in names if pattern.fullmatch(name)] for pattern in (_BATCH, _STREAM)))


def read_summary(output: str) -> dict[str, Any]:
    """The summary in a folder of results or reports; empty if there is none of this program."""
    summary: dict[str, Any] = read_state(f"{output}/{SUMMARY}", _Summary) or {}
    return summary


def check_output(output: str, write: bool = True) -> None:
    """Makes sure that results can be written; without `write`, as far as possible without writing.

    Raises:
      OutputError: They cannot.
    """
    with waiting_for(f"output {output}"):
        _check_output(output, write)


def check_exists(output: str) -> None:
    """Makes sure that a local results folder is there, since a mistyped one must not be made.

    Raises:
      OutputError: It is not.
    """
    if "://" not in output and not os.path.isdir(output):
        raise OutputError(f"output {output!r}: expected a results folder, found none there; check --output")


def results_folder(given: str) -> str:
    """The existing results folder that a flag names.

    Raises:
      ConfigError: It is no path.
      OutputError: A local one is not there.
    """
    try:
        output = local_path(given.strip())
    except ValueError as err:
        raise ConfigError(f"--output: {err}") from err
    check_exists(output)
    return output.rstrip("/") or "/"


def _check_output(output: str, write: bool) -> None:
    probe = f"{output}/{STAGING}{uuid.uuid4().hex[:12]}"  # two jobs may check at the same time
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
        kind = FullError if getattr(err, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else OutputError
        raise kind(f"output {output}: expected a folder that can be written, but: {' '.join(str(err).split())[:300]}") from err


def _refuse_links(output: str) -> None:
    for name in (DETECTIONS, DEAD_LETTERS, INDEX, SAMPLES, posixpath.dirname(COCO_RESULTS), RUNS):
        if os.path.islink(f"{output}/{name}"):
            raise OutputError(f"output {output}: expected {name} to be a folder of its own, it is a link to another one")


def _write_and_delete(path: str) -> None:
    try:
        with create(path) as file:
            file.write(b"probe")
        delete_files([path])
    except (KeyboardInterrupt, OSError):  # a full disk takes the file, but not its content
        with contextlib.suppress(Exception):  # the first error is what matters
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
