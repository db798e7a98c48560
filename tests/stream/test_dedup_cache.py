"""What is in progress, and what became of the images of late."""

import math

from hypothesis import given
from hypothesis import strategies as st

from pipeline.records import ImageRef
from pipeline.stream.dedup_cache import DedupCache
from pipeline.stream.outgoing import Outcome
from tests.clock import Clock

OUTCOMES = {"result": Outcome(b"{}", failed=False), "failure": Outcome(b"{}", failed=True)}


def ref(name, message_id=""):
    return ImageRef(f"gs://b/{name}", "1", message_id=message_id)


def test_results_take_no_more_bytes_than_allowed():
    recent = DedupCache(1e9, lambda *_: None, max_bytes=1_000_000)
    for n in range(1000):
        assert recent.is_new(ref(n))
        recent.done(ref(n), Outcome(b"x" * 9_500, failed=False))
    assert 90 <= sum(not recent.is_new(ref(n)) for n in range(1000)) <= 105


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["ask", "result", "failure", "wait"])), max_size=60))
def test_all_who_ask_for_an_image_in_progress_get_its_outcome_and_a_result_answers_for_ten_seconds(events):
    """However requests, ends and the passing of time are mixed. An image that failed is new when it comes again."""
    clock, ended, expected = Clock(100.0), [], []
    recent = DedupCache(10.0, lambda ref, outcome: ended.append((ref.message_id, outcome)), clock=clock)
    waiting: dict[str, list[str]] = {}  # the messages that wait for an image
    results: dict[str, float] = {}  # when an image had its result
    for number, (name, event) in enumerate(events):
        message = str(number)
        if event == "wait":
            clock.now += 5.0
        elif event == "ask":
            is_late = clock.now - results.get(name, -math.inf) >= 10.0
            assert recent.is_new(ref(name, message)) == (name not in waiting and is_late)
            if name in waiting:
                waiting[name].append(message)
            elif is_late:
                waiting[name] = [message]
            else:
                expected.append((message, OUTCOMES["result"]))
        elif name in waiting:
            recent.done(ref(name, waiting[name][0]), OUTCOMES[event])
            expected += [(each, OUTCOMES[event]) for each in waiting.pop(name)]
            if event == "result":
                results[name] = clock.now
        assert ended == expected
