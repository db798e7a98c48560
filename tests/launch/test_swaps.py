"""A version is released while jobs of either mode are at work: as a user runs them, in processes of their own."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.detect.versioned_models import save_version
from tests.forked_jobs import ForkedJob
from tests.launch.jobs import rows_of, write_work
from tests.processes import wait_until
from tests.streaming_job import InlineImages, StreamingJob

QUICK = ("--model-poll-s", 0.2, "--score-threshold", 0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Version 6, which is none, version 8, and versions 7, 9 and 11, which take their time.

    Those of the batch job take long enough that a busy machine has loaded the next version before it has no image left.
    """
    folder = tmp_path_factory.mktemp("saved")
    for version, call_ms in ((6, 0), (7, 200), (8, 0), (9, 600), (11, 600)):
        save_version(folder, version, call_ms=call_ms)
    (folder / "6" / "saved_model.pb").write_bytes(b"no model")
    return folder


def release(saved: Path, model: Path, version: int, number: int = 0) -> None:
    """Adds a version to a folder, under another number where one is given."""
    shutil.copytree(saved / str(version), model / str(number or version))


def versions_of(row: dict) -> tuple[str, str]:
    """The version that a row names, and the one that has made it."""
    (found,) = row["detections"]
    return row["model"]["version"], str(round(found["confidence"] * 100))


def test_a_batch_job_refuses_a_version_takes_the_next_and_rolls_back(saved, tmp_path, out):
    """What was refused is not tried again when the version behind it goes.

    Each row names the version that has made it; the summary says how many images each has done.
    """
    log, model = tmp_path / "log", tmp_path / "detector"
    write_work(tmp_path / "in", images=4000, image_wh=(64, 48))
    for version in (8, 9):
        release(saved, model, version)
    arguments = ["--input", tmp_path / "in", "--output", out, "--model", model, "--batch-sizes=32", "--concurrent-batches=1"]
    with ForkedJob([*arguments, *QUICK, "--shard-seconds=0.5"], log) as job:

        def said(line: str) -> None:
            wait_until(lambda: line in log.read_text(), log.read_text, job)

        wait_until(lambda: list(out.glob("detections/*.parquet")), log.read_text, job)
        release(saved, model, 6, number=10)
        said("model detector: version 10 is refused, version 9 stays: TensorFlow cannot load it: ")
        release(saved, model, 11)
        said("model detector: version 9 -> 11, loaded in ")
        for version in (9, 11):
            shutil.rmtree(model / str(version))
        assert job.wait() == 0, log.read_text()
    rows = rows_of(out)
    assert sorted(row["image"]["uri"] for row in rows) == sorted(str(path) for path in (tmp_path / "in").iterdir())
    seen = [versions_of(row) for row in rows]
    assert set(seen) == {("9", "9"), ("11", "11"), ("8", "8")}, log.read_text()
    assert [log.read_text().count(line) for line in (" is refused", " 9 -> 11, loaded in ", " 11 -> 8, loaded in ")] == [1, 1, 1]
    counted = json.loads((out / "summary.json").read_text())["model"]["images_by_version"]
    assert counted == {version: seen.count((version, version)) for version in ("8", "9", "11")}


@pytest.mark.matrix
def test_a_stream_killed_during_a_swap_answers_all_after_its_restart(pubsub_emulator, saved, tmp_path, bright_png):
    """Killed while the next version is prepared beside it; what was released is in use after the restart, and rolls back.

    One that is no model is refused then.
    """
    model = tmp_path / "detector"
    release(saved, model, 7)
    job = StreamingJob(pubsub_emulator, tmp_path, str(model), *QUICK, killed=True)
    images = InlineImages(job, bright_png)

    def said(line: str) -> None:
        wait_until(lambda: line in job.output(), job.output)

    def answers_twenty_more(last: int) -> None:
        images.publish(range(last - 20, last))
        wait_until(lambda: images.answered(last), job.output)

    try:
        job.start()
        answers_twenty_more(20)
        images.publish(range(20, 40))
        release(saved, model, 8)
        assert job.signal(signal.SIGKILL) == -signal.SIGKILL  # while it looks at the version, or loads it
        job.start()
        wait_until(lambda: images.answered(40), job.output)
        answers_twenty_more(60)
        shutil.rmtree(model / "8")
        said("model detector: version 8 -> 7, loaded in ")
        answers_twenty_more(80)
        release(saved, model, 6, number=8)
        said("model detector: version 8 is refused, version 7 stays: TensorFlow cannot")
        answers_twenty_more(100)
        assert job.signal(signal.SIGTERM) == 0, job.output()
    finally:
        job.__exit__()
    seen = [versions_of(images.rows[f"inline:{n}"]) for n in range(100)]
    assert set(seen[:20]) == {("7", "7")} and set(seen[20:40]) <= {("7", "7"), ("8", "8")}
    assert set(seen[40:60]) == {("8", "8")} and set(seen[60:]) == {("7", "7")}
    assert "Traceback" not in job.output() and job.output().count(" is refused") == 1
