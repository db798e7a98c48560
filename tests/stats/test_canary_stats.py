"""The figures of a canary, as the summary, the lines and the report have them."""

import pytest
from msgspec.structs import replace

from pipeline.codec import pack, unpack
from pipeline.config import Config
from pipeline.report.page import render_report
from pipeline.stats.canary_stats import CanaryStats, Disagreement, merge_canaries
from pipeline.stats.job_stats import JobStats
from pipeline.stats.summary import RunFacts, summarise
from tests.report.test_page import Page, sample

OF_CANARY = {"images": 100, "failed": 2, "skipped": 3, "seconds": 0.49}
OF_STABLE = {"stable_images": 2000, "stable_failed": 1, "stable_seconds": 19.99}
SHOWN = CanaryStats("8", "7", **OF_CANARY, **OF_STABLE, matched=90, objects=200, score_shift_sum=-4.5)


def summary(canary):
    return summarise(JobStats(canary=canary), RunFacts(1.0, 2.0, 3.0, "run", Config(mode="streaming").as_dict()))


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


def disagreement(different, uri, thumbnail=b""):
    _, image = sample(uri, ("cat",) * different, thumbnail)
    return Disagreement(different, image, replace(image, model_version="8"))


def test_of_two_processes_the_images_that_differ_most_are_kept_and_each_once():
    first, second = (CanaryStats("8", "7") for _ in range(2))
    first.add_disagreement(disagreement(3, "a"), disagreement(9, "b"), disagreement(1, "c"))
    second.add_disagreement(disagreement(5, "d"), disagreement(2, "e"), disagreement(9, "b"), disagreement(8, "f"))
    merged = merge_canaries([first, second])
    assert [(each.different, each.stable.ref.uri) for each in merged.disagreements] == [(9, "b"), (8, "f"), (5, "d"), (3, "a")]
    assert pack(unpack(CanaryStats, pack(merged))) == pack(merged), "workers send them to the launcher"
    assert (merged.wants_picture(3), merged.wants_picture(4)) == (False, True)


def test_the_report_has_a_part_for_a_canary_with_both_results_in_an_image_that_they_differ_on():
    figures = CanaryStats("8", "7", images=1)
    figures.add_disagreement(disagreement(2, "/photos/a.jpg", sample()[1].thumbnail))
    page = Page(render_report(summary(figures), [sample()], {}, figures.pictures()))
    assert "Version 8 beside version 7." in page.text and "Where they differ most" in page.text_of("h3")
    assert [text for text in page.text_of("b") if text in ("Version 1", "Canary 8")] == ["Version 1", "Canary 8"]
    assert page.text_of("span").count("a.jpg") == 2
    assert "Canary" not in Page(render_report(summary(None), [], {})).text_of("h2")
