"""One result for each generation of an image, within a time."""

import contextlib
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.metrics import MetricsFilter
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.timestamp import Timestamp
from msgspec.structs import replace

from pipeline.feed.feeder import Feeder
from pipeline.process import PROCESS
from pipeline.records import DeadLetter, EncodedImage, ImageRef, name_bytes
from pipeline.results.run_folder import Run
from pipeline.stats.counted import COUNTED
from pipeline.storage.fetch import fetch
from pipeline.storage.files import write_file
from pipeline.stream.deduplicate import AddIdentity, DropDuplicatesInState
from pipeline.stream.outgoing import Outcome
from pipeline.stream.shared import RunSettings, opened, run_of
from pipeline.worker import WorkerContext
from tests.feed.feeding import feeding
from tests.processes import in_thread, wait_until

NAMES = ["a", "é", "\ud83d", "\udcff", "\0", "\n", "\ude00\ud83d"]
IMAGES = [EncodedImage(ImageRef(f"gs://b/{NAMES[n % 7]}", str(n % 2)), b"x") for n in range(70)]
ELSEWHERE = RunSettings("elsewhere", worker_context=WorkerContext(Run("", "elsewhere"), list))
DISTINCT = {name_bytes(image.ref.identity) for image in IMAGES}


def drop_in_state(images):
    return images | beam.ParDo(AddIdentity(ELSEWHERE, Feeder)) | beam.ParDo(DropDuplicatesInState(ELSEWHERE))


def test_each_image_passes_once_and_the_others_are_counted():
    """In runner state; the process's own memory is tried by `test_streaming.py`."""
    with COUNTED.counting() as stats, opened(ELSEWHERE), beam.Pipeline(runner=FnApiRunner()) as pipeline:
        new = drop_in_state(pipeline | beam.Create(IMAGES)) | beam.Map(lambda image: name_bytes(image.ref.identity))
        assert_that(new, equal_to(DISTINCT))
    (skipped,) = pipeline.result.metrics().query(MetricsFilter().with_name("skipped"))["counters"]
    assert skipped.committed == stats.skipped == len(IMAGES) - len(DISTINCT)


def test_runner_state_lets_pass_what_is_asked_for_again_once_it_has_failed():
    """Not what has a result, nor what nobody has asked for again."""
    with COUNTED.counting() as stats, opened(ELSEWHERE), beam.Pipeline(runner=FnApiRunner()) as pipeline:
        asked = [ImageRef(name, "1", message_id=f"{name}{turn}") for turn in range(3) for name in ("good", "bad")]
        passed = drop_in_state(pipeline | beam.Create(asked)) | "End" >> beam.ParDo(_End(ELSEWHERE))
        assert_that(passed, equal_to(["good0", "bad0", "bad1", "bad2"]))
    assert stats.skipped == 2


class _End(beam.DoFn):
    def __init__(self, run: RunSettings):
        self._run = run

    def process(self, ref: Any):
        if ref.uri == "bad":
            run_of(self._run).end(DeadLetter(ref, "read", "not_found", "gone"), Outcome(b"", failed=True))
        yield ref.message_id


@pytest.mark.parametrize("where", ["local", "gs"])
def test_an_image_that_is_named_without_its_version_gets_its_identity_and_its_size_and_the_newest_is_read(
    where, tmp_path, request
):
    """An overwritten image is another one. What cannot be looked at is a repeat of its own message only: reading it fails."""
    folder = str(tmp_path) if where == "local" else f"gs://{request.getfixturevalue('gcs_bucket').name}"
    named, gone = ImageRef(f"{folder}/a.png"), ImageRef(f"{folder}/gone")
    asked = [named, replace(gone, message_id="1"), gone, replace(named, generation="7")]
    with opened(ELSEWHERE), feeding(processes=2) as feeder:
        write_file(named.uri, b"first")
        before = looked_up(asked, feeder)
        write_file(named.uri, b"overwritten")
        after = looked_up(asked, feeder)
    assert after[1] == (name_bytes(f"{named.uri}#{fetch(named, 100).ref.generation}"), replace(named, size_bytes=11))
    assert before[0] == after[0] == (name_bytes(f"{named.uri}#7"), asked[3])
    assert before[2] == after[2]
    assert len({identity for identity, _ in (*before, *after)}) == 6


def looked_up(asked: list[ImageRef], feeder: Feeder) -> list[tuple[bytes, ImageRef]]:
    step = AddIdentity(ELSEWHERE, lambda: feeder)
    step.setup()
    step.start_bundle()
    at_once = [named for ref in asked for named in step.process(ref, Timestamp(0), GlobalWindow())]
    return [*at_once, *(named.value for named in step.finish_bundle())]


def test_a_stream_that_is_stopped_looks_up_nothing_more(tmp_path):
    """Nor does it wait for a store that does not answer; here for a feeder that has not been opened."""
    write_file(f"{tmp_path}/a.png", b"first")
    asked = ImageRef(f"{tmp_path}/a.png", message_id="m")
    stopped: list[list[tuple[bytes, ImageRef]]] = []
    with opened(ELSEWHERE) as stream, contextlib.closing(Feeder(1)) as feeder:
        with in_thread(lambda: stopped.append(looked_up([asked], feeder))):
            wait_until(lambda: PROCESS.parts["read"].waiting)
            stream.threads.stop.set()
        assert [*stopped, looked_up([asked], feeder)] == [[(name_bytes(f"{asked.uri}##m"), asked)]] * 2
