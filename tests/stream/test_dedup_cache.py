"""What is under way, and what became of the images of late."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records import ImageRef
from pipeline.stream.dedup_cache import Attempts, DedupCache, Repeat
from pipeline.stream.outgoing import Outcome
from tests.clock import Clock

RESULT = Outcome(b"{}", failed=False)
FAILURE = Outcome(b"{}", failed=True)


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def recent(clock):
    return DedupCache(10.0, clock=clock)


def ref(name, message_id=""):
    return ImageRef(f"gs://b/{name}", "1", message_id=message_id)


def test_who_asks_for_an_image_under_way_is_named_at_its_end(recent):
    assert recent.ask(ref("a")) is None
    assert recent.ask(ref("b")) is None
    assert recent.ask(ref("a", "m2")) == Repeat(ref("a", "m2"), None)
    assert recent.ask(ref("a", "m3")) == Repeat(ref("a", "m3"), None)
    assert recent.done(ref("b"), RESULT) == []
    assert recent.done(ref("a"), RESULT) == [ref("a", "m2"), ref("a", "m3")]


def test_a_result_answers_who_asks_after_it_for_a_time(recent, clock):
    recent.ask(ref("a"))
    recent.done(ref("a"), RESULT)
    assert recent.ask(ref("a", "m2")) == Repeat(ref("a", "m2"), RESULT)
    clock.now += 9.9
    assert recent.ask(ref("a")) == Repeat(ref("a"), RESULT)
    clock.now += 0.1
    assert recent.ask(ref("a")) is None


def test_an_image_that_failed_is_new_when_it_comes_again(recent):
    recent.ask(ref("a"))
    assert recent.ask(ref("a", "m2")) == Repeat(ref("a", "m2"), None)
    assert recent.done(ref("a"), FAILURE) == [ref("a", "m2")]
    assert recent.ask(ref("a")) is None


def test_an_image_stays_under_way_however_long_it_takes(recent, clock):
    recent.ask(ref("a"))
    clock.now += 1000.0
    assert recent.ask(ref("a")) == Repeat(ref("a"), None)


def test_what_was_never_under_way_is_not_remembered(recent):
    """On runners that drop duplicates in their own state."""
    assert recent.done(ref("a"), RESULT) == []
    assert recent.ask(ref("a")) is None


def test_results_take_no_more_bytes_than_allowed():
    recent = DedupCache(1e9, max_bytes=1_000_000)
    row = Outcome(b"x" * 9_500, failed=False)
    for n in range(1000):
        assert recent.ask(ref(n)) is None
        recent.done(ref(n), row)
    assert 90 <= len(recent) <= 105
    assert recent.ask(ref(999)) == Repeat(ref(999), row)
    assert recent.ask(ref(0)) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["ask", "result", "failure", "wait"])), max_size=60))
def test_whoever_asks_has_an_outcome_or_is_named_with_one(events):
    """However askings, ends and the passing of time are mixed, nobody who asks is forgotten, and nobody is named twice."""
    clock = Clock()
    recent = DedupCache(10.0, max_bytes=1200, clock=clock)
    waiting: collections.defaultdict[str, list[ImageRef]] = collections.defaultdict(list)
    leading: set[str] = set()
    for number, (name, event) in enumerate(events):
        asked = ref(name, str(number))
        if event == "wait":
            clock.now += 4.0
        elif event == "ask":
            repeat = recent.ask(asked)
            if repeat is None:
                assert name not in leading
                leading.add(name)
            elif repeat.outcome is None:
                assert name in leading
                waiting[name].append(asked)
        elif name in leading:
            leading.remove(name)
            assert recent.done(ref(name), RESULT if event == "result" else FAILURE) == waiting.pop(name, [])


def test_an_attempt_makes_repeats_until_it_has_failed():
    attempts = Attempts()
    first = attempts.begin(ref("a", "m1"), None)
    assert first is not None
    assert attempts.begin(ref("a", "m2"), first) is None  # under way
    attempts.end(ref("a", "m1"), failed=False)
    assert attempts.begin(ref("a", "m2"), first) is None
    attempts.end(ref("a", "m1"), failed=True)
    second = attempts.begin(ref("a", "m2"), first)
    assert second is not None and second != first
    assert attempts.begin(ref("a", "m3"), second) is None
    assert attempts.begin(ref("a", "m3"), first) is not None  # the bundle of the second was lost


def test_a_failure_that_its_bundle_did_not_outlive_counts_no_longer():
    attempts = Attempts()
    first = attempts.begin(ref("a", "m1"), None)
    attempts.end(ref("a", "m1"), failed=True)
    attempts.end(ref("a", "m1"), failed=False)
    assert attempts.begin(ref("a", "m2"), first) is None


@pytest.mark.parametrize(
    ("message_id", "is_repeat"),
    [("m1", True), ("m2", False), ("", False)],
    ids=["delivered again", "asked for again", "no message id"],
)
def test_what_another_process_has_attempted_is_tried_again_when_it_is_asked_for_again(message_id, is_repeat):
    """How that ended nobody knows here; but whoever was answered before the restart is not answered again."""
    asked_before = ref("a", "m1" if message_id else "")
    before = Attempts().begin(asked_before, None)
    assert (Attempts().begin(ref("a", message_id), before) is None) == is_repeat


def test_a_repeat_that_is_delivered_again_after_a_restart_is_a_repeat():
    """It was dropped before, and acknowledged too late; who asks anew is answered."""
    before = Attempts()
    state = before.begin(ref("a", "m1"), None)
    assert before.begin(ref("a", "m2"), state) is None
    state = before.with_repeat(ref("a", "m2"), state)
    assert before.begin(ref("a", "m3"), state) is None, "state still names the attempt"
    after = Attempts()
    assert [after.begin(ref("a", message), state) is None for message in ("m1", "m2", "m3", "")] == [True, True, False, False]
    before.end(ref("a", "m1"), failed=True)
    assert before.begin(ref("a", "m2"), state) is not None, "a failed attempt is tried again by its repeats"


def test_state_holds_the_attempt_and_its_latest_repeats_however_many_come():
    state = Attempts().begin(ref("a", "m0"), None)
    for number in [*range(1, 1000), 999, 0]:
        state = Attempts.with_repeat(ref("a", f"m{number}"), state)
    messages = state[1].split()
    assert messages == ["m0", *(f"m{number}" for number in range(984, 1000))]


def test_more_failures_than_can_be_remembered_are_all_tried_again():
    attempts = Attempts(max_failed=2)
    begun = {name: attempts.begin(ref(name, name), None) for name in "abc"}
    for name in "abc":
        attempts.end(ref(name, name), failed=True)
    assert all(attempts.begin(ref(name, "again"), begun[name]) for name in "abc")
