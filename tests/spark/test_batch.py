"""Spark runs batch jobs: the rows are those of a run on this machine alone."""

import json
import os

import pytest

from pipeline.write.exports import export
from tests.conftest import REPO
from tests.flink.cluster import RunnerMissing
from tests.launch.jobs import files_of, rows_of, without_run
from tests.spark.job_server import running_spark

IMAGES = 48
SCENES = sorted((REPO / "models" / "digits" / "samples").glob("scene_*.jpg"))
CONFIG = ("--config", "configs/batch_gcs_spark.yaml")


@pytest.fixture
def spark(tmp_path):
    """The flags of a job on Spark."""
    try:
        with running_spark(tmp_path / "spark") as flags:
            yield flags
    except RunnerMissing as err:
        pytest.skip(str(err))  # also in CI: `make test-spark` is where it is fetched


def test_a_batch_job_on_spark_gives_the_rows_of_a_run_on_this_machine(spark, tmp_path, run_job):
    """And exports of them byte for byte, and nothing unfinished is left."""
    (tmp_path / "in").mkdir()
    for number in range(IMAGES):
        os.link(SCENES[number % len(SCENES)], tmp_path / "in" / f"{number:04d}.jpg")
    (tmp_path / "in" / "broken.jpg").write_bytes(b"none")
    asked = ["--input", tmp_path / "in", "--export", "csv,coco"]
    here, there = tmp_path / "here", tmp_path / "there"
    for command in ([*asked, "--output", here], [*CONFIG, *asked, "--output", there, *spark]):
        code, _, error = run_job(*command)
        assert code == 0, error
    for kind, count in (("detections", IMAGES), ("dead_letters", 1)):
        assert rows_of(there, kind) == rows_of(here, kind)
        assert len(rows_of(there, kind)) == count
    for out in (here, there):
        export(str(out), ("csv", "coco"), sort=True)
    assert files_of(there / "exports") == files_of(here / "exports") != {}
    assert without_run(files_of(there)) == sorted([*without_run(files_of(here)), "runs/<run>/job.json"])
    summary = json.loads((there / "summary.json").read_text())
    assert summary["images"] == {"read": IMAGES + 1, "detected": IMAGES, "dead": 1, "skipped": 0}
    assert summary["config"]["runner"] == "SparkRunner"
