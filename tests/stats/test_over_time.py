"""Latencies and backlog over time: means and largest values of intervals, in any order and grouping."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pipeline.codec import pack, unpack
from pipeline.stats.over_time import OverTime
from pipeline.stats.summary import JobStats, merge_stats

RESULTS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 90_000), st.integers(0, 90_000)), max_size=60)


def over_time_of(results) -> OverTime:
    over_time = OverTime()
    for second, in_hand_ms, publish_ms in results:
        over_time.add_result(second + 0.5, in_hand_ms, publish_ms)
        over_time.add_backlog(second + 0.5, publish_ms)
    return over_time


def test_means_and_the_oldest_message():
    found = over_time_of([(100, 10, 200), (100, 30, 600), (103, 5, 50)]).as_dict()
    assert found == {
        "in_hand_to_result_ms": {"interval_s": 1, "points": [(0, 20), (3, 5)]},
        "event_to_publish_ms": {"interval_s": 1, "points": [(0, 400), (3, 50)]},
        "backlog_age_ms": {"interval_s": 1, "points": [(0, 600), (3, 50)]},
    }


def test_a_batch_job_has_none():
    assert OverTime().as_dict() == {}


@given(RESULTS, st.lists(st.integers(0, 60), max_size=4), st.randoms())
def test_workers_together_show_what_one_would_have(results, cuts, random):
    cuts = sorted({0, len(results), *(min(cut, len(results)) for cut in cuts)})
    parts = [JobStats(over_time=over_time_of(results[a:b])) for a, b in itertools.pairwise(cuts)]
    random.shuffle(parts)
    merged = merge_stats([unpack(JobStats, pack(part)) for part in parts], 0).over_time
    assert merged.as_dict() == over_time_of(results).as_dict()


def test_a_stream_of_months_has_a_bounded_number_of_intervals_and_keeps_its_worst_moment():
    over_time = over_time_of([(3600 * hour, 10, 99_000 if hour == 700 else 20) for hour in range(24 * 90)])
    backlog = over_time.as_dict()["backlog_age_ms"]
    assert len(backlog["points"]) <= 1024
    assert max(ms for _, ms in backlog["points"]) == 99_000
    means = dict(over_time.as_dict()["in_hand_to_result_ms"]["points"])
    assert set(means.values()) == {10}
