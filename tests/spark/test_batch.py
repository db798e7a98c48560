"""Spark runs batch jobs: the rows are those of a run on this machine alone."""

import json
import os

import pytest

from pipeline.exports.exports import export
from tests.conftest import REPO
from tests.flink.cluster import RunnerMissing
from tests.launch.jobs import files_of, rows_of, without_run
from tests.spark import image
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


@pytest.mark.skipif(not image.BOOT.exists(), reason="no entry point of Beam's image; `make test-spark` builds it where Go is")
def test_the_entry_point_of_the_image_runs_a_job(tmp_path, monkeypatch, request, run_job):
    """Beam's own program boots the workers from what the runner's services for provisioning, artifacts, logs and control give."""
    root = tmp_path / "image"
    monkeypatch.setenv("PATH", f"{image.lay_out(root)}:{os.environ['PATH']}")
    endpoint, *_ = request.getfixturevalue("spark")  # its server finds `docker` on the path
    (tmp_path / "in").mkdir()
    for scene in SCENES[:8]:
        os.link(scene, tmp_path / "in" / scene.name)
    flags = [endpoint, "--environment_type=DOCKER", f"--environment_config={image.IMAGE}"]
    code, printed, error = run_job(*CONFIG, "--input", tmp_path / "in", "--output", tmp_path / "out", *flags)
    assert code == 0 and "8 detected" in printed, (error, (root / "log").read_text())
    assert len(rows_of(tmp_path / "out")) == 8
    boot, *arguments = image.started(root)[0]
    assert boot == "/opt/apache/beam/boot" and {each.partition("=")[0] for each in arguments} >= {"--id", "--provision_endpoint"}
