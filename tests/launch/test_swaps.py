"""A version is released while jobs of either mode are at work: as a user runs them, in processes of their own."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import REPO, write_bright_image
from tests.detect.versioned_models import save_version
from tests.launch.test_batch_job import write_work
from tests.streaming_job import InlineImages, StreamingJob

_SECONDS = 300
QUICK = ("--model-poll-s", 0.2, "--score-threshold", 0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Version 7, which takes its time, and version 8."""
    folder = tmp_path_factory.mktemp("saved")
    save_version(folder, 7, work=16)
    save_version(folder, 8)
    return folder


@pytest.fixture
def model(tmp_path, saved):
    """A folder with version 7."""
    return release(saved, tmp_path / "detector", 7)


def release(saved: Path, model: Path, version: int) -> Path:
    shutil.copytree(saved / str(version), model / str(version))
    return model


def versions_of(row: dict) -> tuple[str, str]:
    """The version that a row names, and the one that has made it."""
    (found,) = row["detections"]
    return row["model"]["version"], str(round(found["confidence"] * 100))


def until(holds, job_output):
    end = time.monotonic() + _SECONDS
    while not holds():
        assert time.monotonic() < end, job_output()
        time.sleep(0.05)


def rows_in(folder: Path) -> list[dict]:
    return [json.loads(line) for path in folder.glob("detections/*.jsonl") for line in path.read_text().splitlines()]


def test_a_batch_job_goes_on_with_a_version_that_comes_while_it_works(model, saved, tmp_path):
    """Each row names the version that has made it, and so does its index; the summary says how many images each has done."""
    from pipeline.storage.ledger import list_files_of_rows, read_entries

    write_work(tmp_path / "in")
    out, log = tmp_path / "out", tmp_path / "log"
    names = [str(path) for path in sorted((tmp_path / "in").iterdir())]
    command = ["-m", "pipeline.run", "--input", tmp_path / "in", "--output", out, "--model", model, "--streams", 1, *QUICK]
    with log.open("wb") as said:
        job = subprocess.Popen([sys.executable, *map(str, command)], cwd=REPO, stdout=said, stderr=said)
    try:
        until(lambda: list(out.glob(".staging-*/**/*")) or job.poll() is not None, log.read_text)
        release(saved, model, 8)
        assert job.wait(_SECONDS) == 0, log.read_text()
    finally:
        job.kill()
        job.wait()
    rows = rows_in(out)
    assert sorted(row["image"]["uri"] for row in rows) == names
    seen = [versions_of(row) for row in rows]
    assert set(seen) == {("7", "7"), ("8", "8")}, log.read_text()
    (file,) = [file for file in list_files_of_rows(str(out)) if file.kind == "detections"]
    assert {entry.uri: entry.version for entry in read_entries(file)} == {
        row["image"]["uri"]: row["model"]["version"] for row in rows
    }
    counted = json.loads((out / "summary.json").read_text())["model"]["images_by_version"]
    assert counted == {version: seen.count((version, version)) for version in "78"}
    assert log.read_text().count("model detector: version 7 -> 8, loaded in ") == 1


def test_a_stream_killed_during_a_swap_answers_all_after_its_restart(pubsub_emulator, model, saved, tmp_path):
    """Killed while the next version is prepared beside it; what was released is in use after the restart, and rolls back."""
    write_bright_image(tmp_path / "bright.png", (64, 48), (10, 12, 30, 36))
    job = StreamingJob(pubsub_emulator, tmp_path, str(model), *QUICK)
    images = InlineImages(job, (tmp_path / "bright.png").read_bytes())

    def beside() -> list[Path]:
        asked = Path(f"/proc/{job.pid}/task").glob("*/children")
        return [child for path in asked for child in path.read_text().split() if _prepares(child)]

    try:
        job.start()
        images.publish(range(0, 100))
        until(lambda: images.answered(100), job.output)
        images.publish(range(100, 200))
        release(saved, model, 8)
        until(beside, job.output)
        (child,) = beside()
        assert job.signal(signal.SIGKILL) == -signal.SIGKILL
        until(lambda: not _prepares(child), job.output)  # it does not outlive the job
        job.start()
        until(lambda: images.answered(200), job.output)
        images.publish(range(200, 300))
        until(lambda: images.answered(300), job.output)
        shutil.rmtree(model / "8")
        until(lambda: "model detector: version 8 -> 7, loaded in " in job.output(), job.output)
        images.publish(range(300, 400))
        until(lambda: images.answered(400), job.output)
        assert job.signal(signal.SIGTERM) == 0, job.output()
    finally:
        job.__exit__()
    seen = [versions_of(images.rows[f"inline:{n}"]) for n in range(400)]
    assert set(seen[:100]) == {("7", "7")} and set(seen[100:200]) <= {("7", "7"), ("8", "8")}
    assert set(seen[200:300]) == {("8", "8")} and set(seen[300:]) == {("7", "7")}
    assert "Traceback" not in job.output()


def _prepares(process: str) -> bool:
    try:
        return b"prepare_apart" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False
