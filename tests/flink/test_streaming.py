"""A stream on a Flink cluster whose machines die at the worst of moments: nothing is lost."""

import collections
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import write_bright_image
from tests.flink.cluster import TASKMANAGERS, FlinkCluster, job_flags
from tests.streaming_job import StreamingJob

CONFIG = "configs/streaming_pubsub_flink.yaml"
ROUNDS = 4
IMAGES = 700  # a round
RATE = 100.0  # messages a second
CHECKPOINT_SECONDS = 5.0
PAUSE_MS = 1000.0  # before the next checkpoint can begin; a quiet machine kills within 30
RECOVERY_SECONDS = 150.0


@dataclasses.dataclass
class Stream:
    """A running job, and what it has answered."""

    job: StreamingJob
    images: Path
    answers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    asked: set[str] = dataclasses.field(default_factory=set)

    def image(self, name: str) -> str:
        """A new image."""
        path = self.images / f"{name}.png"
        write_bright_image(path, (64, 48), (10, 12, 30, 36))
        return str(path)

    def publish(self, uris: list[str], rate: float) -> None:
        """Publishes messages at a steady rate, each for one image."""
        began = time.monotonic()
        for number, uri in enumerate(uris):
            self.job.publish(json.dumps({"uri": uri}).encode())
            self.asked.add(uri)
            time.sleep(max(0.0, began + number / rate - time.monotonic()))

    def take(self, seconds: float) -> None:
        """Takes answers until there is one for each image that was asked for, or the time is over."""
        end = time.monotonic() + seconds
        while self.asked - set(self.answers) and time.monotonic() < end:
            self.note(self.job.take(self.job.detections, 100, timeout_s=1))

    def answered(self, job: StreamingJob) -> int:
        """Takes what there is; returns how many images have an answer."""
        self.note(job.take(job.detections, 100, timeout_s=1))
        return len(self.answers)

    def note(self, messages: list) -> None:
        self.answers.update(message.attributes["image_uri"] for message in messages)


def eventually(is_so: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.2)
    return is_so()


def archived(job: StreamingJob) -> set[str]:
    lines = [line for path in job.archive.glob("detections/*.jsonl") for line in path.read_text().splitlines()]
    return {json.loads(line)["image"]["uri"] for line in lines}


@pytest.fixture(scope="module")
def stream(flink: FlinkCluster, _pubsub_process, tmp_path_factory, bright_model):
    folder = tmp_path_factory.mktemp("stream")
    flags = [f"--checkpointing_interval={int(CHECKPOINT_SECONDS * 1e3)}", "--archive-window-s=10"]
    flags += ["--allow-uri-prefix", folder / "in", *job_flags(flink, PUBSUB_EMULATOR_HOST=_pubsub_process.host)]
    with StreamingJob(_pubsub_process, folder, bright_model, *flags, config=CONFIG, answers=False) as job:
        started = Stream(job, folder / "in")
        started.publish([started.image("first")], RATE)
        started.take(RECOVERY_SECONDS)
        assert started.answers, job.output()
        yield started


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_no_answer_is_lost_where_all_machines_die_when_a_checkpoint_completes(round_, stream, flink):
    """Messages that only the next checkpoint would hold are not acknowledged by then: they come again.

    What was published since the checkpoint that is fallen back to is published again: less than goes into one checkpoint. No row
    is missing in the archive.
    """
    uris = [stream.image(f"{round_}-{number}") for number in range(IMAGES)]
    before = stream.answers.total() - len(stream.answers)
    stream.publish(uris[: IMAGES // 2], RATE)
    killed_ms = flink.kill_at_checkpoint(*(f"taskmanager{number}" for number in range(TASKMANAGERS)))
    for number in range(TASKMANAGERS):
        flink.start_taskmanager(number)
    stream.publish(uris[IMAGES // 2 :], RATE)
    stream.take(RECOVERY_SECONDS)
    stream.note(stream.job.take(stream.job.detections, 10_000, timeout_s=5))
    lost, repeated = stream.asked - set(stream.answers), stream.answers.total() - len(stream.answers) - before
    print(f"killed {killed_ms:.0f} ms after a checkpoint: {len(lost)} of {IMAGES} lost, {repeated} repeated")
    assert killed_ms < PAUSE_MS
    assert not lost
    assert repeated < RATE * CHECKPOINT_SECONDS
    assert eventually(lambda: archived(stream.job) == stream.asked, 60)
