"""What tests of batch jobs share: images to work at, and what stands in a results folder."""

import contextlib
import glob
import hashlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import REPO, without_progress, write_bright_image
from tests.forked_jobs import ForkedJob, Moment
from tests.processes import wait_until
from tests.shard_rows import rows_in

needs_prism = pytest.mark.skipif(
    not (REPO / ".tools" / "prism").exists(), reason="no Prism binary; `make prism` builds it where Go is installed"
)
RUNNERS = ["DirectRunner", pytest.param("PrismRunner", marks=needs_prism)]
WORK_IMAGES = 2000


def rows_of(output: Path, kind: str = "detections") -> list[dict]:
    """The rows as the shards have them, sorted."""
    return rows_in(str(output), kind)


def rows_written(output: Path) -> int:
    """The number of rows of detections in a folder to which a job still writes; a row that was written twice counts twice."""
    return sum(pq.read_metadata(path).num_rows for path in Path(output).glob("detections/*.parquet"))


def files_of(output: Path) -> dict[str, str]:
    """Every result file but the two that hold times, with a hash of its content."""
    files = [path for path in output.rglob("*") if path.is_file() and path.name not in ("summary.json", "report.html")]
    return {str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def without_run(names) -> list[str]:
    """The names of files, sorted and each once, without what each run puts into them."""
    rows = (re.sub(r"/\d{8}T\d{6}Z-[\w-]+-[0-9a-f]{32}\.", "/<shard>.", name) for name in names)
    return sorted({re.sub(r"\bruns/[\w-]+/", "runs/<run>/", name) for name in rows})


def write_work(folder: Path, images: int = WORK_IMAGES, image_wh: tuple[int, int] = (1200, 900)) -> None:
    """Images enough for a second or more of work: one, under many names."""
    write_bright_image(folder / "0.jpg", image_wh, (10, 10, image_wh[0] // 4, image_wh[1] // 3))
    for n in range(1, images):
        os.link(folder / "0.jpg", folder / f"{n}.jpg")


def signal_at_work(sent: signal.Signals, arguments: list, out: Path) -> tuple[int, str]:
    """Sends a job a signal when its first rows are there; its exit code and what it printed on standard error."""
    printed, errors = out.parent / "printed", out.parent / "errors"
    with ForkedJob([*arguments, "--shard-seconds", 0.1], printed, errors=errors) as job:
        wait_until(lambda: glob.glob(f"{out}/detections/*.parquet"), errors.read_text, job)
        job.send_signal(sent)
        return job.wait(), without_progress(errors.read_text())


def write_images(folder: Path, *names: str) -> None:
    for name in names:
        write_bright_image(folder / name, (64, 48), (10, 10, 30, 30))


def images_of(out: Path) -> dict[str, int]:
    return json.loads((out / "summary.json").read_text())["images"]


def rows_by_name(out: Path, kind: str = "detections") -> list[str]:
    return sorted(row["image"]["uri"].rpartition("/")[2] for row in rows_of(out, kind))


@contextlib.contextmanager
def paused_with_lock(arguments: list, log: Path) -> Iterator[ForkedJob]:
    """A job that has its lock and is paused then; SIGCONT lets it go on."""
    at = Moment("pipeline.launch.batch:_run_to_end", sent=signal.SIGSTOP)
    with ForkedJob(arguments, log, at) as job:
        wait_until(lambda: Path(f"/proc/{job.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", log.read_text, job)
        yield job
