"""A version is released while jobs of either mode are at work: as a user runs them, in processes of their own."""

import contextlib
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.detect.versioned_models import save_version
from tests.forked_jobs import ForkedJob
from tests.launch.jobs import rows_of, write_work
from tests.processes import wait_until
from tests.shard_rows import rows_in
from tests.streaming_job import InlineImages, StreamingJob

QUICK = ("--model-poll-s", 0.2, "--score-threshold", 0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Version 6, which is none, version 8, and versions 7, 9 and 11, which take their time."""
    folder = tmp_path_factory.mktemp("saved")
    for version, call_ms in ((6, 0), (7, 200), (8, 0), (9, 200), (11, 200)):
        save_version(folder, version, call_ms=call_ms)
    (folder / "6" / "saved_model.pb").write_bytes(b"no model")
    return folder


@pytest.fixture
def model(tmp_path, saved):
    """A folder with version 7."""
    return release(saved, tmp_path / "detector", 7)


def release(saved: Path, model: Path, version: int, number: int = 0) -> Path:
    """Adds a version to a folder, under another number where one is given."""
    shutil.copytree(saved / str(version), model / str(number or version))
    return model


def versions_of(row: dict) -> tuple[str, str]:
    """The version that a row names, and the one that has made it."""
    (found,) = row["detections"]
    return row["model"]["version"], str(round(found["confidence"] * 100))


@contextlib.contextmanager
def batch_at_work(model: Path, folder: Path) -> Iterator[ForkedJob]:
    """Starts a job over many images, and waits for its first rows; what it prints is added to `log` in its folder."""
    command = ["--input", folder / "in", "--output", folder / "out", "--model", model, "--concurrent-batches", 1, *QUICK]
    found = {*(folder / "out").glob("detections/*.parquet")}
    with ForkedJob([*command, "--shard-seconds", 0.5], folder / "log") as job:
        wait_until(lambda: {*(folder / "out").glob("detections/*.parquet")} - found, (folder / "log").read_text, job)
        yield job


@pytest.fixture
def images(tmp_path):
    """The names of the images of a batch job."""
    write_work(tmp_path / "in", images=4000, image_wh=(64, 48))
    return [str(path) for path in sorted((tmp_path / "in").iterdir())]


def test_a_batch_job_refuses_a_version_takes_the_next_and_rolls_back(saved, tmp_path, images):
    """What was refused is not tried again when the version behind it goes.

    Each row names the version that has made it; the summary says how many images each has done.
    """
    out, log, model = tmp_path / "out", tmp_path / "log", tmp_path / "detector"
    for version in (8, 9):
        release(saved, model, version)
    with batch_at_work(model, tmp_path) as job:

        def said(line: str) -> None:
            wait_until(lambda: line in log.read_text(), log.read_text, job)

        release(saved, model, 6, number=10)
        said("model detector: version 10 is refused, version 9 stays: TensorFlow cannot load it: ")
        release(saved, model, 11)
        said("model detector: version 9 -> 11, loaded in ")
        for version in (9, 11):
            shutil.rmtree(model / str(version))
        assert job.wait() == 0, log.read_text()
    rows = rows_of(out)
    assert sorted(row["image"]["uri"] for row in rows) == images
    seen = [versions_of(row) for row in rows]
    assert set(seen) == {("9", "9"), ("11", "11"), ("8", "8")}, log.read_text()
    assert [log.read_text().count(line) for line in (" is refused", " 9 -> 11, loaded in ", " 11 -> 8, loaded in ")] == [1, 1, 1]
    counted = json.loads((out / "summary.json").read_text())["model"]["images_by_version"]
    assert counted == {version: seen.count((version, version)) for version in ("8", "9", "11")}


@pytest.mark.matrix
def test_a_batch_job_killed_during_a_swap_ends_with_the_version_that_was_released(model, saved, tmp_path, images):
    """By the same command; rows of the version before stay beside those of the newer one."""
    log = tmp_path / "log"
    with batch_at_work(model, tmp_path) as job:
        release(saved, model, 8)
        job.kill()
    with batch_at_work(model, tmp_path) as job:
        assert job.wait() == 0, log.read_text()
    rows = rows_in(str(tmp_path / "out"))
    by_version = {made: [row["image"]["uri"] for row in rows if versions_of(row) == made] for made in map(versions_of, rows)}
    assert sorted(by_version.pop(("8", "8"))) == images
    assert [*by_version] == [("7", "7")] and 0 < len(by_version["7", "7"]) == len({*by_version["7", "7"]}) < len(images)
    assert "Traceback" not in log.read_text()


@pytest.mark.matrix
def test_a_stream_killed_during_a_swap_answers_all_after_its_restart(pubsub_emulator, model, saved, tmp_path, bright_png):
    """Killed while the next version is prepared beside it; what was released is in use after the restart, and rolls back.

    One that is no model is refused then.
    """
    job = StreamingJob(pubsub_emulator, tmp_path, str(model), *QUICK, killed=True)
    images = InlineImages(job, bright_png)
    try:
        job.start()
        images.publish(range(20))
        wait_until(lambda: images.answered(20), job.output)
        images.publish(range(20, 40))
        release(saved, model, 8)
        assert job.signal(signal.SIGKILL) == -signal.SIGKILL  # while it looks at the version, or loads it
        job.start()
        wait_until(lambda: images.answered(40), job.output)
        images.publish(range(40, 60))
        wait_until(lambda: images.answered(60), job.output)
        shutil.rmtree(model / "8")
        wait_until(lambda: "model detector: version 8 -> 7, loaded in " in job.output(), job.output)
        images.publish(range(60, 80))
        wait_until(lambda: images.answered(80), job.output)
        release(saved, model, 6, number=8)
        wait_until(lambda: "model detector: version 8 is refused, version 7 stays: TensorFlow cannot" in job.output(), job.output)
        images.publish(range(80, 100))
        wait_until(lambda: images.answered(100), job.output)
        assert job.signal(signal.SIGTERM) == 0, job.output()
    finally:
        job.__exit__()
    seen = [versions_of(images.rows[f"inline:{n}"]) for n in range(100)]
    assert set(seen[:20]) == {("7", "7")} and set(seen[20:40]) <= {("7", "7"), ("8", "8")}
    assert set(seen[40:60]) == {("8", "8")} and set(seen[60:]) == {("7", "7")}
    assert "Traceback" not in job.output()
    assert job.output().count(" is refused") == 1
