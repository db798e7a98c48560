"""What is in progress, and what became of the images of late."""

import math

from hypothesis import given
from hypothesis import strategies as st

from pipeline.records import ImageRef, name_bytes
from pipeline.stream.dedup_cache import DedupCache
from pipeline.stream.outgoing import Outcome
from tests.clock import Clock

OUTCOMES = {"result": Outcome(b"{}", failed=False), "failure": Outcome(b"{}", failed=True)}


def ref(name, message_id=""):
    return ImageRef(f"gs://b/{name}", "1", message_id=message_id)


def identity(name):
    return name_bytes(ref(name).identity)


def test_results_take_no_more_bytes_than_allowed():
    recent = DedupCache(1e9, lambda *_: None, max_bytes=1_000_000)
    for n in range(1000):
        assert recent.is_new(ref(n), identity(n))
        recent.done(ref(n), Outcome(b"x" * 9_500, failed=False))
    assert 90 <= sum(not recent.is_new(ref(n), identity(n)) for n in range(1000)) <= 105


def test_an_outcome_is_found_without_a_look_at_all_images_in_progress():
    """Also that of an image without a generation, which failed: with 20,000 in progress a scan of them takes minutes."""
    ended, count = [], 20_000
    recent = DedupCache(1e9, lambda ref, _: ended.append(ref))
    asked = [ImageRef(f"gs://b/{n}", message_id=f"m{n}") for n in range(count)]
    for n, each in enumerate(asked):
        assert recent.is_new(each, identity(n))
    for each in reversed(asked):
        recent.done(each, OUTCOMES["failure"])
    assert ended == asked[::-1] and recent.is_new(asked[0], identity(0))


EVENTS = st.tuples(st.sampled_from(["a#1", "a#2", "b#1"]), st.sampled_from(["ask", "result", "failure", "wait"]), st.booleans())


@given(st.lists(EVENTS, max_size=60))
def test_all_who_ask_for_an_image_in_progress_get_its_outcome_and_a_result_answers_for_ten_seconds(events):
    """However requests, ends and the passing of time are mixed, also if the image is replaced after it was looked up.

    An image that failed is new when it comes again.
    """
    clock, ended, expected = Clock(100.0), [], []
    recent = DedupCache(10.0, lambda ref, outcome: ended.append((ref.message_id, outcome)), clock=clock)
    waiting: dict[str, list[str]] = {}  # the messages that wait for an image
    results: dict[str, float] = {}  # when an image had its result
    for number, (identity, event, is_replaced) in enumerate(events):
        (name, generation), message = identity.split("#"), str(number)
        if event == "wait":
            clock.now += 5.0
        elif event == "ask":
            is_late = clock.now - results.get(identity, -math.inf) >= 10.0
            assert recent.is_new(ImageRef(name, message_id=message), identity.encode()) == (identity not in waiting and is_late)
            if identity in waiting and is_late:
                waiting[identity].append(message)
            elif is_late:
                waiting[identity] = [message]
            else:
                expected.append((message, OUTCOMES["result"]))
        elif identity in waiting:
            read = ImageRef(name, "2" if is_replaced else generation, message_id=waiting[identity][0])
            recent.done(read, OUTCOMES[event])
            expected += [(each, OUTCOMES[event]) for each in waiting.pop(identity)]
            if event == "result":
                results[read.identity] = clock.now
        assert ended == expected
