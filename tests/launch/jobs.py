"""What tests of batch jobs share: images to work at, and what stands in a results folder."""

import glob
import hashlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.conftest import REPO, without_progress, write_bright_image
from tests.forked_jobs import ForkedJob
from tests.processes import wait_until
from tests.rows_of_files import without_age

needs_prism = pytest.mark.skipif(
    not (REPO / ".tools" / "prism").exists(), reason="no Prism binary; `make prism` builds it where Go is installed"
)
RUNNERS = ["DirectRunner", pytest.param("PrismRunner", marks=needs_prism)]
WORK_IMAGES = 2000


def rows_of(output: Path, kind: str = "detections") -> list[dict]:
    return [json.loads(line) for path in sorted(glob.glob(f"{output}/{kind}/*.jsonl")) for line in open(path, encoding="utf-8")]


def files_of(output: Path) -> dict[str, str]:
    """Every result file but the two that hold times, with a hash of its content; of an index without its times."""
    files = [path for path in output.rglob("*") if path.is_file() and path.name not in ("summary.json", "report.html")]
    contents = {str(path.relative_to(output)): path.read_bytes() for path in files}
    return {name: hashlib.sha256(without_age(name, content)).hexdigest() for name, content in contents.items()}


def without_run(names) -> list[str]:
    """The names of files, sorted, without what each run puts into them."""
    rows = (re.sub(r"-[0-9a-f]{8}(-\d{8}T\d{6}Z)?(-\d{5}-of)", r"\2", name) for name in names)
    return sorted(re.sub(r"\bruns/[\w-]+/", "runs/<run>/", name) for name in rows)


def write_work(folder: Path, images: int = WORK_IMAGES, image_wh: tuple[int, int] = (1200, 900)) -> None:
    """Images enough for a second or more of work: one, under many names."""
    width, height = image_wh
    write_bright_image(folder / "0.jpg", image_wh, (10, 10, width // 4, height // 3))
    for n in range(1, images):
        os.link(folder / "0.jpg", folder / f"{n}.jpg")


def signal_at_work(sent: signal.Signals, arguments: list, out: Path) -> tuple[int, str]:
    """Sends a job a signal when its first rows are spilled; its exit code and what it printed on standard error."""
    printed, errors = out.parent / "printed", out.parent / "errors"
    with ForkedJob(arguments, printed, errors=errors) as job:
        wait_until(lambda: glob.glob(f"{out}/.staging-*/spill/*"), errors.read_text, job)
        job.send_signal(sent)
        return job.wait(), without_progress(errors.read_text())


def write_images(folder: Path, *names: str) -> None:
    for name in names:
        write_bright_image(folder / name, (64, 48), (10, 10, 30, 30))


def images_of(out: Path) -> dict[str, int]:
    return json.loads((out / "summary.json").read_text())["images"]


def rows_by_name(out: Path, kind: str = "detections") -> list[str]:
    return sorted(row["image"]["uri"].rpartition("/")[2] for row in rows_of(out, kind))
