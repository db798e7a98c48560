"""The batch job, and all commands that work in a results folder, on object storage."""

import json
from pathlib import Path

from pipeline import run
from pipeline.commands import check, compact, export, reconcile
from pipeline.commands import report as report_folder
from pipeline.commands import rows as rows_of_folder
from pipeline.config import Config
from pipeline.outcome import conclude
from pipeline.outcome.conclude import Conclusion
from pipeline.results.reader import list_shards
from pipeline.results.run_folder import Run
from pipeline.stats.job_stats import JobStats
from pipeline.stats.summary import RunFacts
from pipeline.storage.files import read_file
from pipeline.storage.listing import files_of
from tests.launch.jobs import without_run, write_images
from tests.shard_rows import rows_in


def test_images_model_and_output_may_all_be_on_cloud_storage(gcs_bucket, tmp_path, bright_model, capsys):
    """Every object of a folder is read with its generation; the results, and nothing else, are in the bucket."""
    bucket, images = f"gs://{gcs_bucket.name}", [f"2026/{n // 4}/{n}.png" for n in range(12)]

    def upload(name: str, content: bytes) -> str:
        gcs_bucket.blob(name).upload_from_string(content)
        return f"{bucket}/{name}"

    write_images(tmp_path, "bright.png")
    uris = [upload(name, (tmp_path / "bright.png").read_bytes()) for name in images]
    empty = upload("2026/empty.jpg", b"")
    for path in Path(bright_model).rglob("*"):
        if path.is_file():
            upload(f"models/bright/{path.relative_to(bright_model)}", path.read_bytes())
    gone = f"{bucket}/gone.png"
    manifest = upload("list.txt", f"{gone}\n".encode())
    places = ["--input", f"{bucket}/2026/**", manifest, "--output", f"{bucket}/detections", "--model", f"{bucket}/models/bright"]
    # in this process nobody would end the watch, which would look in a bucket of another test
    assert run.main([*places, "--model-poll-s", "0"]) == 0, capsys.readouterr()
    rows = rows_in(f"{bucket}/detections")
    assert sorted(row["image"]["uri"] for row in rows) == sorted(uris)
    generations = {f"{bucket}/{blob.name}": str(blob.generation) for blob in gcs_bucket.list_blobs(prefix="2026/")}
    assert {row["image"]["uri"]: row["image"]["generation"] for row in rows} == {uri: generations[uri] for uri in uris}
    assert {row["model"]["version"] for row in rows} == {"3"}
    dead = {(row["image"]["uri"], row["reason"]) for row in rows_in(f"{bucket}/detections", "dead_letters")}
    assert dead == {(empty, "empty"), (gone, "not_found")}
    assert without_run(blob.name for blob in gcs_bucket.list_blobs(prefix="detections/")) == [
        "detections/dead_letters/<shard>.parquet",
        "detections/detections/<shard>.parquet",
        "detections/report.html",
        "detections/runs/<run>/outcome.json",
        "detections/runs/<run>/report.html",
        "detections/runs/<run>/summary.json",
        "detections/summary.json",
    ]


def test_every_command_works_in_a_results_folder_on_object_storage(bucket, tmp_path, bright_model, capsys):
    """And leaves nothing there but results."""
    output = f"{bucket}/out"
    write_images(tmp_path, "a.png", "b.png")
    (tmp_path / "broken.png").write_bytes(b"")
    job = ["--input", f"{tmp_path}", "--output", output, "--model", bright_model]

    def said(main, *argv):
        assert main([*argv]) == 0, capsys.readouterr().err
        return capsys.readouterr()

    assert "3 images read" in said(run.main, *job, "--export", "csv").out
    write_images(tmp_path, "c.png")
    assert "3 of them done before" in said(run.main, *job).out
    assert "complete" in said(reconcile.main, *job, "--write-missing", f"{output}/missing.jsonl").out
    rows = [json.loads(line)["image"]["uri"].rpartition("/")[2] for line in said(rows_of_folder.main, output).out.splitlines()]
    assert sorted(rows) == ["a.png", "b.png", "c.png"]
    said(compact.main, output)
    said(check.main, output)
    said(export.main, output, "--format", "coco", "--format", "jsonl")
    assert len(json.loads(read_file(f"{output}/exports/coco/images.json"))["images"]) == 3
    said(report_folder.main, output)
    assert without_run(file.path.removeprefix(f"{output}/") for file in files_of(output, "**")) == [
        "dead_letters/<shard>.parquet",
        "detections/<shard>.parquet",
        *("exports/coco/annotations.json", "exports/coco/images.json", "exports/coco/results.json"),
        *("exports/detections.csv", "exports/detections.jsonl"),
        "missing.jsonl",
        "report.html",
        *("runs/<run>/outcome.json", "runs/<run>/report.html", "runs/<run>/summary.json"),
        "summary.json",
    ]
    assert len(list_shards(output)) == 2


def test_a_bucket_that_is_not_there_is_one_line(gcs_bucket, arguments, error_of):
    """Exit code 2, and the place is named, also where an input may be empty: no such bucket is no quiet day."""
    error = error_of("--input", "gs://no-such-bucket-at-all/**", *arguments[2:], "--allow-empty")
    assert error.startswith("error: input gs://no-such-bucket-at-all/**: ")


def test_jobs_that_end_together_write_the_reports_at_the_top_once(gcs_bucket, monkeypatch):
    """Cloud Storage takes one write of an object a second; each run has its own reports. One that ends later replaces them."""
    out, facts, on_top = f"gs://{gcs_bucket.name}/out", RunFacts(1.0, 1.0, 2.0, "a command", Config().as_dict()), []
    for run_name, fresh_seconds in (("a", 1e9), ("b", 1e9), ("c", -1e9)):
        monkeypatch.setattr(conclude, "_FRESH_SECONDS", fresh_seconds)
        Conclusion(Run(out, run_name), facts).reported(JobStats(read=1))
        assert gcs_bucket.get_blob(f"out/runs/{run_name}/summary.json")
        on_top.append(json.loads(gcs_bucket.get_blob("out/summary.json").download_as_bytes())["run"])
    assert on_top == ["a", "a", "c"]
