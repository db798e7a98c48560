"""A job whose detections look wrong as a whole says so, once for each sign."""

import numpy as np
import pytest

from pipeline.records import DetectedImage, Detections, ImageRef
from pipeline.report.page import render_report
from pipeline.stats.job_stats import JobStats, merge_stats
from pipeline.stats.summary import RunFacts, summarise


def image(number, boxes):
    found = Detections(
        np.array(boxes, np.float32).reshape(-1, 4),
        np.zeros(len(boxes), np.int32),
        np.ones(len(boxes), np.float32),
        ("cat",) * len(boxes),
    )
    return DetectedImage(ImageRef(f"{number}.jpg"), 100, 50, "m", "1", found)


INSIDE, HALF_OUT, OUTSIDE = [10, 10, 90, 40], [60, 10, 120, 40], [90, 10, 140, 40]


def summary_of(kinds):
    """The summary of a job in two parts, whose images have these boxes."""
    images = [image(number, boxes) for number, boxes in enumerate(boxes for boxes, amount in kinds for _ in range(amount))]
    parts = [JobStats(), JobStats()]
    for number, each in enumerate(images):
        parts[number % 2].add_detected([each], 0)
    facts = RunFacts(0.0, 1.0, 2.0, "run", {"detect": {"max_detections": 3}}, "batch", "/m")
    parts[0].model_notes = ("a note on the model",)
    return summarise(merge_stats(parts, 0), facts)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        pytest.param([([], 199)], [], id="few without objects"),
        pytest.param([([], 200)], ["none of 200 images has an object"], id="200 without objects"),
        pytest.param([([], 500), ([INSIDE], 1)], [], id="one object"),
        pytest.param([([INSIDE] * 3, 19)], [], id="few are full"),
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
    page = render_report(summary, [], [])
    assert all(warning in page for warning in summary["warnings"])
