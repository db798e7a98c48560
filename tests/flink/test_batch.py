"""A batch job on a Flink cluster, one of whose machines dies midway: the rows are those of a run on one machine."""

import json
import os
import re
import sys
import time

from pipeline.codec import unpack
from pipeline.stats.job_stats import JobStats
from tests.conftest import REPO, without_stamps
from tests.flink.cluster import TASKMANAGER_NAMES, FlinkCluster, job_flags
from tests.launch.jobs import rows_of
from tests.processes import running, wait_until

IMAGES = 2400
SCENES = sorted((REPO / "models" / "digits" / "samples").glob("scene_*.jpg"))


def test_a_batch_job_that_loses_a_machine_gives_the_rows_of_a_run_on_one(flink: FlinkCluster, tmp_path, run_job):
    """Each once, and nothing unfinished is left; figures show while it works, and are what the rows say at the end."""
    (tmp_path / "in").mkdir()
    for number in range(IMAGES):
        os.link(SCENES[number % len(SCENES)], tmp_path / "in" / f"{number:04d}.jpg")
    here, there, printed = tmp_path / "here", tmp_path / "there", tmp_path / "printed"
    code, _, error = run_job("--input", tmp_path / "in", "--output", here)
    assert code == 0, error
    command = [sys.executable, "-m", "pipeline.run", "--config", "configs/batch_gcs_flink.yaml", *job_flags(flink)]
    command += ["--model=digits", "--parallelism=4", "--shard-seconds=1", f"--input={tmp_path}/in", f"--output={there}"]
    with printed.open("wb") as log, running(command, cwd=REPO, stdout=log, stderr=log) as job:
        wait_until(lambda: list(there.glob(".staging-*/*.parquet")), printed.read_text, job)
        time.sleep(json.loads((here / "summary.json").read_text())["wall_seconds"] / 3)
        reports = [path.read_bytes() for path in there.glob(".staging-*/figures/*[!w]")]  # not `.new`
        flink.kill("taskmanager0")
        assert job.poll() is None and not (there / "detections").exists()
        flink.start_taskmanagers("taskmanager0")
        assert job.wait(timeout=200) == 0
    assert rows_of(there) == rows_of(here)
    assert len(rows_of(there)) == IMAGES
    assert not list(there.glob(".*"))
    # each machine feeds one process, and so one model, from both of its slots; those that list come and go before
    assert 1 <= sum(unpack(JobStats, report).detected > 0 for report in reports) <= len(TASKMANAGER_NAMES)
    progress = re.compile(r"^ *\d+ s  (\d+) of \d+ images, [\d.]+ images/s, 0 failed$", re.MULTILINE)
    shown = [int(done) for done in progress.findall(without_stamps(printed.read_text()))]
    assert any(0 < count < IMAGES for count in shown), printed.read_text()
    summary = json.loads((there / "summary.json").read_text())
    assert summary["images"] == {"read": IMAGES, "detected": IMAGES, "dead": 0, "skipped": 0}
    assert all(summary[f"{part}_seconds"] > 0 for part in ("startup", "submission", "wall"))
