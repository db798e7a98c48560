"""What is in progress, and what became of the images of late."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records import ImageRef
from pipeline.stream.dedup_cache import DedupCache
from pipeline.stream.outgoing import Outcome
from tests.clock import Clock

RESULT = Outcome(b"{}", failed=False)
FAILURE = Outcome(b"{}", failed=True)


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def ended():
    """The images that have an outcome, as the cache says."""
    return []


@pytest.fixture
def recent(clock, ended):
    return DedupCache(10.0, lambda ref, outcome: ended.append((ref, outcome)), clock=clock)


def ref(name, message_id=""):
    return ImageRef(f"gs://b/{name}", "1", message_id=message_id)


def test_who_asks_for_an_image_in_progress_gets_its_outcome(recent, ended):
    asked = (ref("a", "m1"), ref("b"), ref("a", "m2"), ref("a", "m3"))
    assert [*map(recent.is_new, asked)] == [True, True, False, False]
    recent.done(ref("b"), RESULT)
    assert ended == [(ref("b"), RESULT)]
    recent.done(ref("a", "m1"), FAILURE)
    assert ended[1:] == [(ref("a", f"m{n}"), FAILURE) for n in (1, 2, 3)]


def test_a_result_answers_who_asks_after_it_for_a_time(recent, clock, ended):
    assert recent.is_new(ref("a"))
    recent.done(ref("a"), RESULT)
    clock.now += 9.9
    assert not recent.is_new(ref("a", "m2"))
    assert ended[-1] == (ref("a", "m2"), RESULT)
    clock.now += 0.1
    assert recent.is_new(ref("a"))


def test_an_image_that_failed_is_new_when_it_comes_again(recent):
    assert recent.is_new(ref("a"))
    recent.done(ref("a"), FAILURE)
    assert recent.is_new(ref("a"))


def test_results_take_no_more_bytes_than_allowed():
    recent = DedupCache(1e9, lambda *_: None, max_bytes=1_000_000)
    for n in range(1000):
        assert recent.is_new(ref(n))
        recent.done(ref(n), Outcome(b"x" * 9_500, failed=False))
    assert 90 <= sum(not recent.is_new(ref(n)) for n in range(1000)) <= 105


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["ask", "result", "failure", "wait"])), max_size=60))
def test_whoever_asks_has_an_outcome_once(events):
    """However requests, ends and the passing of time are mixed."""
    clock, asked, ended = Clock(), collections.Counter(), collections.Counter()
    recent = DedupCache(10.0, lambda ref, _: ended.update([ref.message_id]), max_bytes=1200, clock=clock)
    leading: dict[str, ImageRef] = {}
    for number, (name, event) in enumerate(events):
        if event == "wait":
            clock.now += 4.0
        elif event == "ask":
            asked[str(number)] += 1
            if recent.is_new(ref(name, str(number))):
                assert name not in leading
                leading[name] = ref(name, str(number))
        elif name in leading:
            recent.done(leading.pop(name), RESULT if event == "result" else FAILURE)
    for last in leading.values():
        recent.done(last, RESULT)
    assert ended == asked
