"""Buckets: bounded, and the same whatever the order and grouping in which images are counted."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.stats import histogram
from pipeline.stats.histogram import Intervals, latency_bucket

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
        merged.merge(part)
    assert merged == intervals_of(random.sample(times, len(times))) == intervals_of(times)


@given(TIMES)
def test_intervals_are_as_short_as_their_bound_allows(times):
    intervals = intervals_of(times)
    assert sum(intervals.counts.values()) == len(times)
    assert len(intervals.counts) <= 8
    assert math.log2(intervals.seconds).is_integer()
    assert intervals.seconds == 1 or len({2 * time_s // intervals.seconds for time_s in times}) > 8


@given(TIMES)
def test_intervals_are_told_from_the_first_one_on_and_in_order(times):
    intervals = intervals_of(times)
    told = intervals.since_first()
    assert told == sorted(told)
    assert sum(images for _, images in told) == len(times)
    assert all(second % intervals.seconds == 0 for second, _ in told)
    assert [second for second, _ in told[:1]] == [0] * bool(times)


def test_the_largest_amount_of_an_interval_is_kept_for_months_in_any_order():
    """As of the slowest image, or of the oldest message."""
    hours = [(3600 * hour, 99_000 if hour == 700 else 20) for hour in range(24 * 90)]
    forwards, backwards = Intervals(largest=True), Intervals(largest=True)
    for one, other in zip(hours, reversed(hours), strict=True):
        forwards.add(*one)
        backwards.add(*other)
    assert forwards == backwards and len(forwards.counts) <= 8
    assert max(ms for _, ms in forwards.since_first()) == 99_000


@given(st.floats(0.001, 1e11))
def test_a_latency_is_within_a_tenth_of_its_bucket(milliseconds):
    assert 1.1 ** (latency_bucket(milliseconds) - 1) * 0.999 <= milliseconds <= 1.1 ** latency_bucket(milliseconds) * 1.001


@given(st.floats())
def test_whatever_a_clock_says_there_are_few_buckets_of_latency(milliseconds):
    assert -72 <= latency_bucket(milliseconds) <= 266
