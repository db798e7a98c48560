"""One answer for each request."""

import json

import numpy as np
import pytest

from pipeline.records import DeadLetter, DetectedImage, Detections, EncodedImage, ImageRef
from pipeline.stream.answers import Answers, answer_message
from pipeline.stream.messages import MAX_MESSAGE_BYTES, Request


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def answers(clock):
    return Answers(5.0, clock=clock)


def ref(uri, request_id="r", generation=""):
    return ImageRef(uri, generation, request_id=request_id)


def detected(uri, request_id="r"):
    found = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.int32), np.zeros(0, np.float32), ())
    return DetectedImage(ref(uri, request_id, "1"), 4, 3, "m", "1", found)


def dead(uri, request_id="r"):
    return DeadLetter(ref(uri, request_id), "read", "not_found", "gone")


def request(request_id, *images, refused=()):
    return Request("m" + request_id, request_id, tuple(images), tuple(refused))


def content(messages):
    """(request id, complete, URIs with rows, URIs that failed) of each answer."""
    rows = [json.loads(message.data) for message in messages]
    uris = lambda rows: sorted(row["image"].get("uri", "") for row in rows)  # noqa: E731
    return [(row["request_id"], row["complete"], uris(row["results"]), uris(row["failed"])) for row in rows]


def test_the_answer_comes_with_the_last_image(answers):
    answers.open(request("r", ref("a"), EncodedImage(ref("b"), b"x"), ref("c")))
    assert answers.done(detected("b")) == []
    assert answers.done(dead("a")) == []
    assert content(answers.done(detected("c"))) == [("r", True, ["b", "c"], ["a"])]
    assert answers.done(detected("c")) == []


def test_what_the_message_itself_got_wrong_is_part_of_the_answer(answers):
    refused = DeadLetter(ref("/etc/passwd"), "message", "not_allowed", "no")
    answers.open(request("r", ref("a"), refused=[refused]))
    assert answers.done(refused) == []
    assert content(answers.done(detected("a"))) == [("r", True, ["a"], ["/etc/passwd"])]


def test_without_a_request_id_there_is_no_answer(answers):
    answers.open(request("", ref("a", "")))
    assert answers.done(detected("a", "")) == []


def test_a_repeat_is_answered_with_the_row_that_is_there(answers):
    answers.done(detected("a", ""))
    answers.open(request("r", ref("a")))
    assert content(answers.repeat(ref("a", generation="1"))) == [("r", True, ["a"], [])]


def test_a_repeat_waits_for_the_row_that_is_coming(answers):
    answers.open(request("first", ref("a", "first")))
    answers.open(request("second", ref("a", "second"), ref("b", "second")))
    assert answers.repeat(ref("a", "second", "1")) == []
    assert content(answers.done(detected("a", "first"))) == [("first", True, ["a"], [])]
    assert content(answers.done(detected("b", "second"))) == [("second", True, ["a", "b"], [])]


def test_an_image_twice_in_one_request_counts_twice(answers):
    answers.open(request("r", ref("a"), ref("a")))
    assert answers.repeat(ref("a", generation="1")) == []
    assert content(answers.done(detected("a"))) == [("r", True, ["a", "a"], [])]


def test_at_the_deadline_what_is_missing_is_named(answers, clock):
    answers.open(request("r", ref("a"), ref("b")))
    answers.done(detected("a"))
    clock.now = 4.9
    assert answers.overdue() == []
    clock.now = 5.0
    (late,) = answers.overdue()
    assert content([late]) == [("r", False, ["a"], ["b"])]
    assert json.loads(late.data)["failed"][0]["reason"] == "deadline"
    assert answers.overdue() == []
    assert answers.done(detected("b")) == []


def test_rows_that_pubsub_would_refuse_are_left_out():
    row = {"image": {"uri": "x" * 1_000_000}}
    message = answer_message("r", [row] * 10, [row], on_time=True)
    assert len(message.data) < MAX_MESSAGE_BYTES
    assert json.loads(message.data)["rows_left_out"] == 11
    assert message.attributes["images"] == "10"
