"""A canary in jobs as a user runs them, each in a process of its own."""

import contextlib
import json
import signal

import pytest

from pipeline.records import ImageRef, identity_hash
from tests.conftest import write_bright_image
from tests.detect.versioned_models import save_version
from tests.streaming_job import StreamingJob

IMAGES = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "detector"
    for version in (7, 8):
        save_version(folder, version)
    (folder / "labels.json").write_text('{"stable": 7, "canary": 8}', encoding="utf-8")
    return folder


def test_a_stream_has_a_canary_whose_figures_stand_in_its_summary(pubsub_emulator, tmp_path, model):
    for n in range(IMAGES):
        write_bright_image(tmp_path / "photos" / f"{n}.png", (64, 48), (10, 10, 40, 30))
    flags = ("--model-version", "stable", "--model-poll-s", 0.2, "--canary-share", 0.5)
    allowed = ("--allow-uri-prefix", f"{tmp_path}/photos/", "--score-threshold", 0)
    with contextlib.ExitStack() as ended:
        job = StreamingJob(pubsub_emulator, tmp_path, str(model), *flags, *allowed, answers=False)
        ended.push(job.__exit__)
        job.start(until="canary 8 also gets 50.0% of the images")
        job.publish(*(f"{tmp_path}/photos/{n}.png".encode() for n in range(IMAGES)))
        rows = [json.loads(message.data) for message in job.take(job.detections, IMAGES)]
        assert job.signal(signal.SIGTERM) == 0
    wanted = [_is_chosen(row["image"]) for row in rows]
    assert {row["model"]["version"] for row in rows} == {"7"}
    canary = json.loads((job.archive / "summary.json").read_text(encoding="utf-8"))["canary"]
    shown = (canary["version"], canary["stable"], canary["images"], canary["failed"], canary["agreement"])
    assert shown == ("8", "7", sum(wanted), 0, 1.0 if sum(wanted) else None)
    assert "<h2>Canary</h2>" in (job.archive / "report.html").read_text(encoding="utf-8")


def _is_chosen(image):
    return identity_hash(f"canary {ImageRef(image['uri'], image['generation']).identity}") < 0.5 * 2**64


def test_a_job_whose_canary_met_no_image_says_so_at_its_end_and_in_its_report(run_job, tmp_path, model):
    """It was done before the canary was loaded."""
    write_bright_image(tmp_path / "in" / "a.png", (64, 48), (10, 10, 40, 30))
    arguments = ("--input", tmp_path / "in", "--output", tmp_path / "out", "--model", model, "--model-version", "stable")
    code, out, err = run_job(*arguments)
    assert code == 0 and "model detector: canary 8: 0 images: it is not loaded yet" in err
    assert "  canary 8: 0 images: it is not loaded yet\n" in out
    canary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["canary"]
    assert (canary["version"], canary["images"], canary["why_no_images"]) == ("8", 0, "it is not loaded yet")
    assert "It met no image: it is not loaded yet." in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
