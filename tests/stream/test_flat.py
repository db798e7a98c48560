"""A stream runs for months: what it keeps in memory after a day is what it kept after an hour."""

import json
import multiprocessing
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from pipeline.records import DeadLetter, DetectedImage, ImageRef, Timing
from pipeline.results.reader import list_shards
from pipeline.results.run_folder import Run
from pipeline.stats import beam_metrics
from pipeline.stats.counted import COUNTED
from pipeline.stream.answers import Answers
from pipeline.stream.archive import Archive, RowWriter
from pipeline.stream.dedup_cache import DedupCache
from pipeline.stream.messages import Message, parse_message
from pipeline.stream.outgoing import Outcome, dead_letter_message, detection_message
from pipeline.stream.threads import RunThreads
from tests.clock import Clock
from tests.shard_rows import detected

START = 1795226400.0
HOURS, BUNDLE_S, WINDOW_S = 24, 40.0, 120.0


def ended(ref: ImageRef, number: int, now: float) -> DetectedImage | DeadLetter:
    """A result; every hundredth image is damaged, and its dead letter has a payload of 10 kB."""
    if number % 100 == 0:
        return DeadLetter(ref, "decode", "corrupt", "damaged", b"x" * 10_000)
    timing = Timing(finished_at=now, latency=0.1, led_batch=1, model=0.01)
    found = replace(detected(ref.uri).detections, class_names=(f"class {number % 50}",))
    return replace(detected(ref.uri), ref=ref, detections=found, timing=timing)


def a_day(folder: Path) -> tuple[list[int], list[int], int]:
    """Runs a day of bundles: of each hour the bytes in memory and the messages that are held, and the requests overdue.

    Each bundle has two new images, one that was asked for before, and one that never ends.
    """
    clock = Clock(START)
    held: list[str] = []
    subscriber = SimpleNamespace(hold=held.extend, end_hold=lambda ended: held.__delitem__(slice(len(ended))))
    archive = Archive(RowWriter(Run(str(folder), "run")), WINDOW_S, RunThreads(), subscriber, clock=clock)
    answers = Answers("topic", 60.0, SimpleNamespace(hold=len), clock)
    recent = DedupCache(600.0, answers.done, clock=clock)
    kept, most_held, overdue, number = [], [], 0, 0
    COUNTED.begin_counting()
    tracemalloc.start()
    for bundle in range(int(HOURS * 3600 / BUNDLE_S)):
        names = [f"gs://b/{name}" for name in (number, number + 1, max(0, number - 5), f"never-{bundle}")]
        asked = Message(json.dumps({"request_id": f"r{bundle}", "images": names}).encode(), {}, f"m{bundle}", clock.now)
        request = parse_message(asked, ("gs://",))
        beam_metrics.note_message(clock.now)
        beam_metrics.count_read(len(request.images))
        answers.open(request)
        results = []
        for image in (each for each in request.images[:3] if recent.is_new(each, each.identity.encode())):
            result = ended(image, number, clock.now)
            number += 1
            failed = isinstance(result, DeadLetter)
            message = dead_letter_message(result, clock.now) if failed else detection_message(result, clock.now)
            beam_metrics.count_results(result)
            if not failed:
                beam_metrics.note_published(result, clock.now)
            results.append(result)
            recent.done(image, Outcome(message.data, failed))
        beam_metrics.count_skipped(3 - len(results))
        archive.add(results)
        clock.now += BUNDLE_S
        overdue += len(answers.due())
        archive.write_if_over()
        if bundle % 90 == 89:
            kept.append(tracemalloc.get_traced_memory()[0])
            most_held.append(len(held))
    tracemalloc.stop()
    archive.finish()
    assert held == []
    return kept, most_held, overdue


@pytest.mark.matrix
@pytest.mark.slow
def test_a_day_leaves_nothing_behind_that_an_hour_did_not(tmp_path):
    """The day runs in a process of its own, since `tracemalloc` counts what threads of other tests allocate."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        kept, most_held, overdue = process.submit(a_day, tmp_path).result()
    assert overdue > 2100  # each request but the last few was answered at its deadline, and forgotten
    assert max(kept[2:]) - min(kept[2:]) < 300_000, kept
    assert max(most_held) <= 3 * WINDOW_S / BUNDLE_S
    assert len(list_shards(str(tmp_path), ("detections",))) == HOURS * 3600 / WINDOW_S
