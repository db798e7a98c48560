"""The figures: they add up, whatever the order and the grouping in which images are counted."""

import dataclasses
import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.codec import pack, unpack
from pipeline.config import Config, DetectConfig, ModelConfig
from pipeline.records import DeadLetter, DetectedImage, Detections, ImageRef, Timing, row_bytes
from pipeline.report.page import render_report
from pipeline.stats.job_stats import BINS, OTHER_CLASSES, JobStats, merge_stats
from pipeline.stats.summary import RunFacts, left_out_line, summarise

SAMPLES = 3
CONFIG = Config(model=ModelConfig("/m"), detect=DetectConfig(max_detections=3)).as_dict()
FACTS = RunFacts(1000.0, 1002.5, 1004.5, "run", CONFIG)


def detected(number, classes=(), led=0, latency=0.05, thumbnail=b"jpeg", boxes=None):
    boxes = np.zeros((len(classes), 4), np.float32) if boxes is None else np.array(boxes, np.float32).reshape(-1, 4)
    confidences = np.linspace(0.3, 1, len(classes), dtype=np.float32)
    found = Detections(boxes, np.zeros(len(classes), np.int32), confidences, tuple(classes))
    timing = Timing(0.25, 0.5, 9.0, 0.125, latency, 1000.0 + number // 4, led, 2.0 if led else 0.0)
    return DetectedImage(ImageRef(f"{number}.jpg", "1"), 100, 50, "m", "3", found, timing, thumbnail)


def dead(number, stage="read", reason="not_found"):
    return DeadLetter(ImageRef(f"{number}.jpg"), stage, reason, "gone", b"payload")


IMAGES = st.builds(
    detected,
    number=st.integers(0, 50),
    classes=st.lists(st.sampled_from(["cat", "dog"]), max_size=3),
    led=st.sampled_from([0, 1, 8]),
    latency=st.floats(0, 100),
    thumbnail=st.sampled_from([b"", b"jpeg"]),
)
LETTERS = st.builds(dead, st.integers(0, 50), st.sampled_from(["read", "decode"]), st.sampled_from(["empty", "corrupt"]))
ELEMENTS = st.lists(IMAGES | LETTERS, max_size=30)


def tally_of(elements, stats=None):
    stats = stats or JobStats()
    for element in elements:
        if isinstance(element, DetectedImage):
            stats.add_detected([element], SAMPLES)
        else:
            stats.add_dead(element)
    return stats


def figures(stats):
    """What must not depend on order: all but a sum of fractions, and which dead letters of a reason were kept as examples."""
    return vars(stats) | {
        "latencies": (stats.latencies.counts, stats.latencies.longest_s),
        "pictures": {purpose: [rank for rank, _ in kept] for purpose, kept in stats.pictures.items()},
        "dead_examples": {reason: len(rows) for reason, rows in stats.dead_examples.items()},
    }


@given(ELEMENTS, st.lists(st.integers(0, 30), max_size=4), st.randoms())
def test_a_tally_does_not_depend_on_bundles_or_their_order_nor_on_the_files_that_carry_them(elements, cuts, random):
    whole = tally_of(elements)
    cuts = sorted({0, len(elements), *(min(cut, len(elements)) for cut in cuts)})
    parts = [unpack(JobStats, pack(tally_of(elements[a:b]))) for a, b in itertools.pairwise(cuts)]
    random.shuffle(parts)
    assert figures(merge_stats(parts, SAMPLES)) == figures(whole)


@given(ELEMENTS, ELEMENTS)
def test_a_copy_does_not_change_with_its_original(elements, later):
    stats = tally_of(elements)
    copy, before = stats.copy(), repr(figures(stats))
    tally_of(later, stats)
    assert repr(figures(copy)) == before


def test_the_summary_has_the_figures_of_the_contract():
    elements = [detected(0, ["cat", "dog", "cat"], led=2), detected(5, ["cat"]), detected(8, led=1), dead(9)]
    elements += [dead(10, "decode", "empty")]
    stats = merge_stats([tally_of(elements), JobStats(read=6, skipped=1, done=1, batch_sizes=(1, 2))], SAMPLES)
    assert stats.began == 999.95
    assert [len(kept) for kept in stats.pictures.values()] == [3, 1, 1], "of any, with objects, without"
    summary = summarise(stats, FACTS)
    assert summary == {
        "images": {"read": 6, "detected": 3, "dead": 2, "skipped": 1},
        "skipped_by_kind": {},
        "done_before": 1,
        "dead_before": 0,
        "images_per_second": 1.5,
        "wall_seconds": 2.0,
        "startup_seconds": 2.5,
        "batch_sizes": {"1": 1, "2": 1},
        "stage_seconds": {"model": 4.0, "read": 0.75, "decode": 1.5, "postprocess": 0.375},
        "dead_by_reason": {"not_found": 1, "empty": 1},
        "dead_by_stage": {"read": 1, "decode": 1},
        "classes": {"cat": 3, "dog": 1},
        "detections": 4,
        "confidences": {
            "all": [0] * 6 + [2] + [0] * 6 + [1] + [0] * 5 + [1],
            "by_class": {"cat": [0] * 6 + [2] + [0] * 12 + [1], "dog": [0] * 13 + [1] + [0] * 6},
        },
        "latency_ms": summary["latency_ms"],
        "throughput": [[0, 1], [1, 1], [2, 1]],
        "throughput_interval_s": 1,
        "model": {"name": "m", "version": "3", "path": "/m", "allowed_batch_sizes": [1, 2], "class_names": []},
        "config": CONFIG,
        "command": "run",
        "started_at": "1970-01-01T00:16:40+00:00",
        "finished_at": "1970-01-01T00:16:44+00:00",
        "mode": "batch",
    }
    assert json.loads(row_bytes(summary, indent=2)) == summary


@pytest.mark.parametrize(
    ("began", "submission", "work"),
    [(1003.0, 0.5, 1.5), (990.0, 0.0, 2.0), (2000.0, 2.0, 0.0), (math.inf, 0.0, 2.0)],
    ids=["as it should be", "a clock that is behind", "a clock that is ahead", "nothing was detected"],
)
def test_start_up_submission_and_work_of_a_job_elsewhere_are_told_apart(began, submission, work):
    summary = summarise(JobStats(), dataclasses.replace(FACTS, submitted_at=FACTS.ready_at).ended(began, FACTS.finished_at))
    assert [summary[f"{part}_seconds"] for part in ("startup", "submission", "wall")] == [2.5, submission, work]


def test_names_that_are_no_unicode_are_written_escaped():
    assert json.loads(row_bytes({"command": "lone \udc80"}, indent=2)) == {"command": "lone \udc80"}


@pytest.mark.matrix
def test_classes_without_end_are_counted_in_bounded_memory():
    """A model that names each detection anew: the frequent classes keep their counts, the sum stays right."""
    stats = JobStats()
    for number in range(60_000):
        stats.add_detected([detected(0, ["cat", f"class {number}"])], SAMPLES)
    twice = merge_stats([stats, stats], SAMPLES)
    for counted, factor in ((stats, 1), (twice, 2)):
        assert len(counted.confidences) <= 40_000
        assert counted.classes["cat"] == 60_000 * factor
        assert counted.classes.total() == counted.confidences.total() == 120_000 * factor
        assert OTHER_CLASSES in counted.classes
    shown = summarise(twice, FACTS)["confidences"]
    assert sum(shown["all"]) == 240_000 and OTHER_CLASSES not in shown["by_class"] and len(shown["by_class"]) == 12


def test_a_job_of_many_classes_keeps_the_confidences_of_each():
    """As many as LVIS has, in all bins."""
    counts = Counter({(f"class {number}", each): BINS - each for number in range(1203) for each in range(BINS)})
    assert merge_stats([JobStats(confidences=counts)] * 2, SAMPLES).confidences == counts + counts


def test_examples_of_dead_letters_are_few_and_short_however_long_their_texts():
    stats = JobStats()
    for _ in range(100):
        stats.add_dead(
            DeadLetter(ImageRef("gs://" + "x" * 10**5), "read", "not_found", "y" * 10**5, b"payload", thumbnail=b"jpeg")
        )
    examples, texts = stats.dead_examples["not_found"], ("gs://" + "x" * 994 + "…", "y" * 999 + "…")
    assert {(letter.ref.uri, letter.message, letter.payload, letter.thumbnail) for letter in examples} == {(*texts, b"", b"jpeg")}
    assert len(examples) == len(merge_stats([stats, stats], 3).dead_examples["not_found"]) == 20


def test_files_that_are_no_images_are_counted_by_a_bounded_number_of_kinds():
    """Endings may be anything; what is named is what remains."""
    one, other = JobStats(read=150, skipped=150), JobStats(read=6, skipped=5)
    for number in range(150):
        one.leave_out(f".{number}")
    for _ in range(5):
        other.leave_out(".txt")
    other.merge(one, 0)
    assert len(other.left_out) <= 100 and other.left_out.total() == 155 and other.left_out[".txt"] == 5
    assert other.named == 1
    line = left_out_line(other.left_out)
    assert line.startswith("155 files that are no images (") and line.endswith(f", {len(other.left_out) - 8} more kinds)")


INSIDE, HALF_OUT, OUTSIDE = [10, 10, 90, 40], [60, 10, 120, 40], [90, 10, 140, 40]


def summary_of(kinds):
    """The summary of a job in two parts, whose images have these boxes."""
    images = [detected(0, ["cat"] * len(boxes), boxes=boxes) for boxes, amount in kinds for _ in range(amount)]
    parts = tally_of(images[::2], JobStats(model_notes=("a note on the model",))), tally_of(images[1::2])
    return summarise(merge_stats(parts, SAMPLES), FACTS)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        pytest.param([([], 199)], [], id="few without objects"),
        pytest.param([([], 200)], ["none of 200 images has an object"], id="200 without objects"),
        pytest.param([([], 500), ([INSIDE], 1)], [], id="one object"),
        pytest.param([([INSIDE] * 3, 18), ([INSIDE], 2)], ["18 of 20 images have 3 objects, the most allowed"], id="nearly all"),
        pytest.param([([INSIDE] * 3, 17), ([INSIDE], 3)], [], id="many are full"),
        pytest.param([([OUTSIDE], 1), ([INSIDE], 9)], ["1 of 10 boxes lie for the most part outside"], id="a tenth outside"),
        pytest.param([([OUTSIDE], 1), ([INSIDE, HALF_OUT], 5)], [], id="fewer outside, and some that reach beyond the edge"),
        pytest.param(
            [([INSIDE, OUTSIDE, OUTSIDE], 200)], ["200 of 200 images have 3 objects", "400 of 600 boxes lie"], id="two signs"
        ),
    ],
)
def test_a_summary_names_what_looks_wrong(kinds, expected):
    summary = summary_of(kinds)
    note, *warnings = summary["warnings"]
    assert note == "a note on the model"
    assert [warning.startswith(start) for warning, start in zip(warnings, expected, strict=True)] == [True] * len(expected)
    page = render_report(summary, [], {})
    assert all(warning in page for warning in summary["warnings"])
