"""The figures of a canary, as the summary, the lines and the report have them."""

import pytest

from pipeline.report.page import render_report
from pipeline.stats.canary import CanaryStats, merge_canaries
from pipeline.stats.job_stats import JobStats
from pipeline.stats.summary import RunFacts, summarise
from tests.report.test_page import Page, sample

OF_CANARY = {"images": 100, "failed": 2, "skipped": 3, "seconds": 0.49}
OF_STABLE = {"stable_images": 2000, "stable_failed": 1, "stable_seconds": 19.99}
SHOWN = CanaryStats("8", "7", **OF_CANARY, **OF_STABLE, matched=90, objects=200, score_shift_sum=-4.5)


def summary(canary):
    return summarise(JobStats(canary=canary), RunFacts(1.0, 2.0, 3.0, "run", {}, "streaming", "/m"))


def test_the_summary_and_a_progress_line_have_all_figures_that_are_known():
    assert summary(SHOWN)["canary"] == {
        **{"version": "8", "stable": "7", "images": 100, "failed": 2, "skipped": 3, "agreement": 0.9, "score_shift": -0.05},
        **{"failure_rate": 0.02, "stable_failure_rate": 0.0005, "mean_ms": 5.0, "stable_mean_ms": 10.0},
    }
    assert SHOWN.line() == "canary 8: 100 images, agreement 0.900, scores -0.050, failed 2.0% (stable 0.1%), 5 ms (stable 10 ms)"
    assert CanaryStats("8", "7").line() == "canary 8: 0 images: no image came while it was loaded"
    failures_only = CanaryStats("8", "7", images=2, failed=2)
    assert failures_only.line() == "canary 8: 2 images, failed 100.0% (stable 0.0%), - ms (stable - ms)"


@pytest.mark.parametrize(
    ("figures", "merged"),
    [
        pytest.param([], None, id="none"),
        pytest.param([("8", "7", 5, 1), ("8", "7", 7, 2)], ("8", "7", 12, 3), id="of two processes"),
        pytest.param(
            [("9", "7", 900), ("10", "7", 1)], ("10", "7", 1), id="the newest, though a killed process met more of another"
        ),
    ],
)
def test_the_figures_of_all_processes_add_up(figures, merged):
    assert merge_canaries(CanaryStats(*each) for each in figures) == (merged and CanaryStats(*merged))


def test_the_report_has_a_part_for_a_canary():
    page = Page(render_report(summary(CanaryStats("8", "7", images=1)), [sample()], []))
    assert "Version 8 beside version 7." in page.text
    assert "Canary" not in Page(render_report(summary(None), [], [])).text_of("h2")
