"""What crosses a stream's shuffles on Flink: names and rows, never an image that a message only names."""

import json
import signal

import pytest

from tests.benchmarks.images import link_images
from tests.conftest import REPO
from tests.flink.cluster import FlinkCluster, job_flags
from tests.flink.shuffles import shuffled
from tests.flink.test_streaming import CONFIG
from tests.streaming_job import StreamingJob

IMAGES = 50
NAME_AND_ROW_BYTES = 2000.0  # an image has 40,000
SCENES = REPO / "models" / "digits" / "samples"


@pytest.mark.timeout(400)
def test_a_stream_shuffles_names_and_rows_and_no_image(flink: FlinkCluster, _pubsub_process, tmp_path):
    """Duplicates are dropped before images are read, and rows wait for their windows without them."""
    images = sorted(link_images(SCENES, tmp_path / "in", IMAGES).iterdir())
    flags = ["--checkpointing_interval=5000", "--archive-window-s=5", "--allow-uri-prefix", tmp_path / "in"]
    flags += job_flags(flink, PUBSUB_EMULATOR_HOST=_pubsub_process.host)
    with StreamingJob(_pubsub_process, tmp_path, "", *flags, config=CONFIG, answers=False) as job:
        job.publish(*(json.dumps({"uri": str(path)}).encode() for path in images))
        assert len(job.take(job.detections, IMAGES, timeout_s=150)) == IMAGES, job.output()
        assert job.signal(signal.SIGTERM) == 0, job.output()
    steps = list(shuffled(flink, flink.jobs("FINISHED")[-1]))
    print("\n".join(f"{step.received_bytes / IMAGES:.0f} bytes an image by {step.how} to {step.step}" for step in steps))
    (state,) = [step for step in steps if "DropDuplicates" in step.step and "DetectObjects" in step.step]
    assert state.how == "hash" and state.received_bytes > 0
    assert sum(step.received_bytes for step in steps) < NAME_AND_ROW_BYTES * IMAGES
    assert sum(path.stat().st_size for path in images) > 10 * NAME_AND_ROW_BYTES * IMAGES
