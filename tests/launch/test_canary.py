"""A canary in jobs as a user runs them, each in a process of its own."""

import json
import signal

import pytest

from pipeline.records import ImageRef, identity_hash
from tests.detect.versioned_models import save_version
from tests.launch.jobs import write_images
from tests.streaming_job import StreamingJob

NAMES = [f"{n}.png" for n in range(10)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "detector"
    for version in (7, 8):
        save_version(folder, version)
    (folder / "labels.json").write_text('{"stable": 7, "canary": 8}', encoding="utf-8")
    return folder


@pytest.mark.matrix
def test_a_stream_has_a_canary_whose_figures_stand_in_its_summary_and_report(pubsub_emulator, tmp_path, model):
    write_images(tmp_path / "photos", *NAMES)
    flags = ("--model-version", "stable", "--model-poll-s", 0.2, "--canary-share", 0.5, "--score-threshold", 0)
    job = StreamingJob(pubsub_emulator, tmp_path, str(model), *flags, "--allow-uri-prefix", f"{tmp_path}/photos/", answers=False)
    try:
        job.start(until="canary 8 also gets 50.0% of the images")
        job.publish(*(f"{tmp_path}/photos/{name}".encode() for name in NAMES))
        rows = [json.loads(message.data) for message in job.take(job.detections, len(NAMES))]
        assert job.signal(signal.SIGTERM) == 0
    finally:
        job.__exit__()
    identities = [ImageRef(row["image"]["uri"], row["image"]["generation"]).identity for row in rows]
    chosen = sum(identity_hash(f"canary {identity}") < 0.5 * 2**64 for identity in identities)
    assert {row["model"]["version"] for row in rows} == {"7"}
    canary = json.loads((job.archive / "summary.json").read_text(encoding="utf-8"))["canary"]
    shown = (canary["version"], canary["stable"], canary["images"], canary["failed"], canary["agreement"])
    assert shown == ("8", "7", chosen, 0, 1.0 if chosen else None)
    assert "<h2>Canary</h2>" in (job.archive / "report.html").read_text(encoding="utf-8")


def test_a_batch_job_that_is_done_before_its_canary_is_loaded_prints_why_it_met_no_image(run_job, tmp_path, out, model):
    write_images(tmp_path / "in", *NAMES)
    flags = ("--model-version", "stable", "--model-poll-s", 600)
    code, printed, error = run_job("--input", tmp_path / "in", "--output", out, "--model", model, *flags)
    assert code == 0 and "model detector: canary 8: 0 images: it is not loaded yet" in error
    assert "  canary 8: 0 images: it is not loaded yet\n" in printed
    assert json.loads((out / "summary.json").read_text())["canary"]["why_no_images"] == "it is not loaded yet"
