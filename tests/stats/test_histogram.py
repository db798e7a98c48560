"""Buckets: bounded, and the same whatever the order and grouping in which images are counted."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.stats import histogram
from pipeline.stats.histogram import BOUNDS_S, Intervals, Times

TIMES = st.lists(st.integers(0, 10**10) | st.integers(1_700_000_000, 1_700_100_000), max_size=60)


def intervals_of(times):
    intervals = Intervals()
    for time_s in times:
        intervals.add(time_s)
    return intervals


@pytest.fixture(autouse=True)
def few_intervals(monkeypatch):
    monkeypatch.setattr(histogram, "_MOST_INTERVALS", 8)


@given(TIMES, st.lists(st.integers(0, 60), max_size=4), st.randoms())
def test_intervals_do_not_depend_on_order_or_grouping(times, cuts, random):
    cuts = sorted({0, len(times), *(min(cut, len(times)) for cut in cuts)})
    parts = [intervals_of(times[a:b]) for a, b in itertools.pairwise(cuts)]
    random.shuffle(parts)
    merged = Intervals()
    for part in parts:
        merged = merged + part
    assert merged == intervals_of(random.sample(times, len(times))) == intervals_of(times)


@given(TIMES)
def test_intervals_are_as_short_as_their_bound_allows_and_are_told_in_order_from_the_first_one_on(times):
    intervals = intervals_of(times)
    told = intervals.since_first()
    assert told == sorted(told) and [second for second, _ in told[:1]] == [0] * bool(times)
    assert sum(intervals.counts.values()) == sum(images for _, images in told) == len(times)
    assert len(intervals.counts) <= 8 and all(second % intervals.seconds == 0 for second, _ in told)
    assert math.log2(intervals.seconds).is_integer()
    assert intervals.seconds == 1 or len({2 * time_s // intervals.seconds for time_s in times}) > 8


def test_the_largest_amount_of_an_interval_is_kept_for_months_in_any_order():
    """As of the slowest image, or of the oldest message."""
    hours = [(3600 * hour, 99_000 if hour == 700 else 20) for hour in range(24 * 90)]
    forwards, backwards = Intervals(largest=True), Intervals(largest=True)
    for one, other in zip(hours, reversed(hours), strict=True):
        forwards.add(*one)
        backwards.add(*other)
    assert forwards == backwards and len(forwards.counts) <= 8
    assert max(ms for _, ms in forwards.since_first()) == 99_000


def times_of(seconds):
    times = Times()
    times.add(seconds)
    return times


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=200), st.integers(0, 200))
def test_percentiles_are_within_the_bucket_of_the_exact_ones_and_the_longest_time_is_exact(seconds, cut):
    times = times_of(seconds[:cut]) + times_of(seconds[cut:])
    got = times.percentiles_ms()
    assert list(got) == ["p50", "p90", "p99", "max"]
    assert got["max"] == round(1e3 * max(seconds), 1)
    exact = np.quantile(seconds, [0.5, 0.9, 0.99], method="inverted_cdf")
    for value, bucket in zip(got.values(), np.searchsorted(BOUNDS_S, exact).tolist(), strict=False):
        assert 1e3 * (0.0, *BOUNDS_S)[bucket] - 0.05 <= value <= min(1e3 * BOUNDS_S[bucket], got["max"]) + 0.05
    assert times.total_s == pytest.approx(sum(seconds))
    assert len(times.since(times_of(seconds[:cut]))) == len(seconds[cut:])


@given(st.lists(st.floats()))
def test_whatever_a_clock_says_there_are_few_buckets(seconds):
    times = times_of(seconds)
    assert set(times.counts) <= set(range(len(BOUNDS_S)))
    assert len(times) == len(seconds) and 0 <= times.total_s <= 1e8 * len(seconds)
