"""Spark runs batch jobs: the rows are those of a run on this machine alone. A stream it refuses."""

import json
import os

from tests.conftest import REPO
from tests.rows_of_files import without_age

IMAGES = 48
SCENES = sorted((REPO / "models" / "digits" / "samples").glob("scene_*.jpg"))
CONFIG = ("--config", "configs/batch_gcs_spark.yaml")


def files_of(folder):
    """All files that are the same each time, by their names; indexes without their times.

    The index of dead letters, whose rows do not name the model, is not: which it is only the process that detects knows.
    """
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name not in ("summary.json", "report.html"))
    found = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    return {name: without_age(name, content) for name, content in found.items() if not name.startswith("index/dead_letters-")}


def test_a_batch_job_on_spark_gives_the_files_of_a_run_on_this_machine(spark, tmp_path, run_job):
    """Byte for byte, also those that are made of rows, and nothing unfinished is left."""
    (tmp_path / "in").mkdir()
    for number in range(IMAGES):
        os.link(SCENES[number % len(SCENES)], tmp_path / "in" / f"{number:04d}.jpg")
    (tmp_path / "in" / "broken.jpg").write_bytes(b"none")
    asked = ["--input", tmp_path / "in", "--shards", 3, "--parquet", "--coco"]
    here, there = tmp_path / "here", tmp_path / "there"
    code, _, err = run_job(*asked, "--output", here)
    assert code == 0, err

    code, _, err = run_job(*CONFIG, *asked, "--output", there, *spark)

    assert code == 0, err
    assert files_of(there) == files_of(here)
    rows = [content for name, content in files_of(there).items() if name.startswith("detections/") and name.endswith(".jsonl")]
    assert (len(rows), sum(content.count(b"\n") for content in rows)) == (3, IMAGES)
    summary = json.loads((there / "summary.json").read_text())
    assert summary["images"] == {"read": IMAGES + 1, "detected": IMAGES, "dead": 1, "skipped": 0}
    assert summary["config"]["runner"] == "SparkRunner"


def test_a_stream_is_refused_in_one_line(spark, run_job):
    stream = [
        "--mode",
        "streaming",
        "--input",
        "projects/p-of-test/subscriptions/s01",
        "--output",
        "projects/p-of-test/topics/t01",
    ]
    code, stdout, stderr = run_job(*stream, "--runner", "SparkRunner", *spark)
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert "SparkRunner: Spark has no bundle finalization" in stderr
