"""A batch job on a Flink cluster, one of whose machines dies midway: the rows are those of a run on one machine."""

import json
import os
import re
import sys
import time

from pipeline.codec import unpack
from pipeline.stats.job_stats import JobStats
from tests.conftest import REPO, without_stamps
from tests.flink.cluster import START_SECONDS, TASKMANAGERS, FlinkCluster, job_flags
from tests.launch.jobs import rows_of
from tests.processes import running

IMAGES = 2400
SCENES = sorted((REPO / "models" / "digits" / "samples").glob("scene_*.jpg"))


def test_a_batch_job_that_loses_a_machine_gives_the_rows_of_a_run_on_one(flink: FlinkCluster, tmp_path, run_job):
    """Each once, and nothing unfinished is left."""
    (tmp_path / "in").mkdir()
    for number in range(IMAGES):
        os.link(SCENES[number % len(SCENES)], tmp_path / "in" / f"{number:04d}.jpg")
    code, _, err = run_job("--input", tmp_path / "in", "--output", tmp_path / "here")
    seconds = json.loads((tmp_path / "here" / "summary.json").read_text())["wall_seconds"]
    assert code == 0, err
    command = [sys.executable, "-m", "pipeline.run", "--config", "configs/batch_gcs_flink.yaml", *job_flags(flink)]
    command += ["--model=digits", "--parallelism=4", "--shard-seconds=1", f"--input={tmp_path}/in", f"--output={tmp_path}/there"]
    began = time.monotonic()
    with (tmp_path / "said").open("wb") as said, running(command, cwd=REPO, stdout=said, stderr=said) as job:
        while not list((tmp_path / "there").glob(".staging-*/*.parquet")):
            assert job.poll() is None and time.monotonic() < began + START_SECONDS
            time.sleep(0.05)
        time.sleep(seconds / 3)
        reports = [path.read_bytes() for path in (tmp_path / "there").glob(".staging-*/figures/*[!w]")]  # not `.new`
        flink.kill("taskmanager0")
        assert job.poll() is None and not (tmp_path / "there" / "detections").exists()
        flink.start_taskmanager(0)
        assert job.wait(timeout=200) == 0
    assert rows_of(tmp_path / "there") == rows_of(tmp_path / "here")
    assert len(rows_of(tmp_path / "there")) == IMAGES
    assert not list((tmp_path / "there").glob(".*"))
    # each machine feeds one process, and so one model, from both of its slots; those that list come and go before
    assert 1 <= sum(unpack(JobStats, report).detected > 0 for report in reports) <= TASKMANAGERS
    check_figures((tmp_path / "said").read_text(), json.loads((tmp_path / "there" / "summary.json").read_text()))


def check_figures(said: str, summary: dict) -> None:
    """How far it is shows while it works; at the end it is what the rows say, whatever was done twice."""
    said = without_stamps(said)
    shown = [int(done) for done in re.findall(r"^ *\d+ s  (\d+) of \d+ images, [\d.]+ images/s, 0 failed$", said, re.MULTILINE)]
    assert shown and 0 < shown[0] < IMAGES, said
    assert summary["images"] == {"read": IMAGES, "detected": IMAGES, "dead": 0, "skipped": 0}
    parts = {part: summary[f"{part}_seconds"] for part in ("startup", "submission", "wall")}
    assert all(seconds > 0 for seconds in parts.values())
