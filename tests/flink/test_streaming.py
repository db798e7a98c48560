"""A stream on a Flink cluster whose machines die at the worst of moments: nothing is lost, and what failed is tried again."""

import collections
import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import write_bright_image
from tests.flink.cluster import TASKMANAGER_NAMES, FlinkCluster, job_flags
from tests.shard_rows import rows_in
from tests.streaming_job import CuttableProxy, StreamingJob

CONFIG = "configs/streaming_pubsub_flink.yaml"
RATE = 100.0  # messages a second
IN_HAND = 500  # publishing pauses while so many have no answer: a machine that is too slow for the rate goes at its own
CHECKPOINT_SECONDS = 5.0
PAUSE_MS = 1000.0  # before the next checkpoint can begin
# so some bundles end while a checkpoint is under way: it waits for results to be published, to a Pub/Sub that is far away
BUNDLE_MS = 100
ANSWER_SECONDS = 0.4
RECOVERY_SECONDS = 150.0
AWAY_SECONDS = 60.0
_PUBLISH_SECONDS = 0.1

pytestmark = pytest.mark.timeout(600)  # with the cluster and the job that the first of them starts


@dataclasses.dataclass
class Stream:
    """A running job, what it was asked for, and what it has answered."""

    job: StreamingJob
    images: Path
    answers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    asked: set[str] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self._image = self.images / "image.png"
        write_bright_image(self._image, (64, 48), (10, 12, 30, 36))

    def new_images(self, name: str, count: int) -> list[str]:
        """Makes images that nobody has asked for yet; their names."""
        uris = [str(self.images / f"{name}-{number}.png") for number in range(count)]
        for uri in uris:
            os.link(self._image, uri)
        return uris

    def publish(self, uris: list[str], rate: float) -> None:
        """Publishes messages at a steady rate, each for one image."""
        began = time.monotonic()
        for number, uri in enumerate(uris):
            self._ask([uri])
            time.sleep(max(0.0, began + number / rate - time.monotonic()))

    @contextlib.contextmanager
    def flowing(self, name: str) -> Iterator[None]:
        """Publishes for new images without a pause, and takes what is answered, while the block lasts."""
        over = threading.Event()
        threads = [threading.Thread(target=target) for target in (lambda: self._flow(name, over), lambda: self._take(over))]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def answered(self) -> int:
        """Takes what there is; returns how many images have an answer."""
        self._note(self.job.take(self.job.detections, 100, timeout_s=1))
        return len(self.answers)

    def take(self) -> None:
        """Takes answers until there is one for each image that was asked for, or each has had the time for it."""

        def complete() -> bool:
            self.answered()
            return self.asked <= set(self.answers)

        eventually(complete, RECOVERY_SECONDS)

    def rest(self) -> int:
        """Takes all that was answered by now; returns how many images have an answer."""
        self._note(self.job.rest(self.job.detections))
        return len(self.answers)

    def lost(self) -> set[str]:
        """Which images have no answer when each has had the time for it; takes what comes twice, too."""
        self.take()
        self.rest()
        return self.asked - set(self.answers)

    def repeats(self) -> int:
        """How many answers came more than once so far."""
        return self.answers.total() - len(self.answers)

    def _note(self, messages: list) -> None:
        self.answers.update(message.attributes["image_uri"] for message in messages)

    def _flow(self, name: str, over: threading.Event) -> None:
        began, count, share = time.monotonic(), 0, round(RATE * _PUBLISH_SECONDS)
        while not over.wait(max(0.0, began + count / RATE - time.monotonic())):
            if len(self.asked) - len(self.answers) > IN_HAND:
                began = time.monotonic() + _PUBLISH_SECONDS - count / RATE
                continue
            self._ask(self.new_images(f"{name}-{count}", share))
            count += share

    def _take(self, over: threading.Event) -> None:
        while not over.is_set():
            self.answered()

    def _ask(self, uris: list[str]) -> None:
        self.job.publish(*(json.dumps({"uri": uri}).encode() for uri in uris))
        self.asked.update(uris)


def eventually(is_so: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.2)
    return is_so()


def archived(job: StreamingJob) -> set[str]:
    return {row["image"]["uri"] for row in rows_in(str(job.archive))}


@pytest.fixture(scope="module")
def pubsub(_pubsub_process) -> CuttableProxy:
    """What the workers reach Pub/Sub through."""
    return CuttableProxy(_pubsub_process.host, answers_late_s=ANSWER_SECONDS)


@pytest.fixture(scope="module")
def stream(flink: FlinkCluster, pubsub, _pubsub_process, tmp_path_factory, bright_model):
    folder = tmp_path_factory.mktemp("stream")
    flags = [f"--checkpointing_interval={int(CHECKPOINT_SECONDS * 1e3)}", f"--max_bundle_time_mills={BUNDLE_MS}"]
    flags += ["--shard-seconds=10", "--allow-uri-prefix", folder / "in", *job_flags(flink, PUBSUB_EMULATOR_HOST=pubsub.host)]
    with StreamingJob(_pubsub_process, folder, bright_model, *flags, config=CONFIG, answers=False) as job:
        started = Stream(job, folder / "in")
        started.publish(started.new_images("first", 1), RATE)
        started.take()
        assert started.answers, job.output()
        yield started


@pytest.mark.parametrize("after_ms", [700, 400, 200, 50])
def test_no_answer_is_lost_where_all_machines_die_when_a_checkpoint_completes(after_ms, stream, flink):
    """Messages that only the next checkpoint would hold are not acknowledged by then: they come again.

    They come all the time, so bundles of theirs end between the checkpoint's begin and its end: Flink finalizes these too. What
    was answered since the checkpoint that is fallen back to is answered again: less than goes into one checkpoint. No row is
    missing in the archive. What is acknowledged too early is lost only if Pub/Sub has heard of it before the kill.
    """
    before, repeated_before = len(stream.answers), stream.repeats()
    with stream.flowing(f"killed-{after_ms}"):
        assert eventually(lambda: len(stream.answers) > before + RATE, RECOVERY_SECONDS)
        kill = flink.kill_at_checkpoint(*TASKMANAGER_NAMES, after_ms=after_ms)
        asked = len(stream.asked)
        flink.start_taskmanagers()
        assert eventually(lambda: len(stream.asked) > asked + RATE, RECOVERY_SECONDS)
    lost, repeated = stream.lost(), stream.repeats() - repeated_before
    print(f"{kill}: {len(lost)} of {len(stream.asked)} lost, {repeated} repeated")
    assert kill.after_ms < PAUSE_MS
    assert lost == set()
    assert repeated < RATE * max(CHECKPOINT_SECONDS, kill.checkpoint_ms / 1e3)
    assert eventually(lambda: archived(stream.job) == stream.asked, 60)


def test_nothing_is_lost_where_pubsub_is_out_of_reach_for_a_while(stream, pubsub):
    """The job waits for it, with checkpoints that wait too, and goes on by itself."""
    before, repeated_before = len(stream.answers), stream.repeats()
    with stream.flowing("away"):
        assert eventually(lambda: len(stream.answers) > before + RATE, RECOVERY_SECONDS)
        pubsub.cut()
        time.sleep(AWAY_SECONDS)
        pubsub.recover()
        answered = len(stream.answers)
        assert eventually(lambda: len(stream.answers) > answered + RATE, RECOVERY_SECONDS)
    assert stream.lost() == set()
    print(f"Pub/Sub away for {AWAY_SECONDS:g} s: {stream.repeats() - repeated_before} repeated")
    assert eventually(lambda: archived(stream.job) == stream.asked, 60)
