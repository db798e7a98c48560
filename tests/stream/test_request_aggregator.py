"""One answer for each request."""

import json

import pytest

from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.stream.messages import Request
from pipeline.stream.outgoing import Outcome
from pipeline.stream.request_aggregator import RequestAggregator
from tests.clock import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def answers(clock):
    return RequestAggregator(5.0, clock=clock)


def ref(uri, message_id="m"):
    return ImageRef(uri, request_id="r", message_id=message_id)


def request(*images, message_id="m", request_id="r", refused=()):
    return Request(message_id, request_id, tuple(images), tuple(refused))


def result(uri):
    return Outcome(json.dumps({"image": {"uri": uri}}).encode(), failed=False)


def failure(uri):
    return Outcome(json.dumps({"image": {"uri": uri}}).encode(), failed=True)


def content(messages):
    """(request id, complete, URIs with rows, URIs that failed, the message that asked) of each answer."""
    rows = [(json.loads(message.data), message.answers) for message in messages]
    uris = lambda rows: sorted(row["image"].get("uri", "") for row in rows)  # noqa: E731
    return [(row["request_id"], row["complete"], uris(row["results"]), uris(row["failed"]), asked) for row, asked in rows]


def test_the_answer_comes_with_the_last_image(answers):
    answers.open(request(ref("a"), EncodedImage(ref("b"), b"x"), ref("c")))
    assert answers.done(ref("b"), result("b")) == []
    assert answers.done(ref("a"), failure("a")) == []
    assert content(answers.done(ref("c"), result("c"))) == [("r", True, ["b", "c"], ["a"], "m")]
    assert answers.done(ref("c"), result("c")) == []


def test_what_the_message_itself_got_wrong_is_part_of_the_answer(answers):
    refused = DeadLetter(ref("/etc/passwd"), "message", "not_allowed", "no")
    answers.open(request(ref("a"), refused=[refused]))
    assert answers.done(refused.ref, failure("/etc/passwd")) == []
    assert content(answers.done(ref("a"), result("a"))) == [("r", True, ["a"], ["/etc/passwd"], "m")]


def test_two_messages_with_one_request_id_have_an_answer_each(answers):
    """A sender that asks again must not wait for another's images, nor have them in its answer."""
    answers.open(request(ref("a"), message_id="m"))
    answers.open(request(ref("a", "n"), ref("b", "n"), message_id="n"))
    assert content(answers.done(ref("a"), result("a"))) == [("r", True, ["a"], [], "m")]
    assert answers.done(ref("b", "n"), result("b")) == []
    assert content(answers.done(ref("a", "n"), result("a"))) == [("r", True, ["a", "b"], [], "n")]


def test_an_image_twice_in_one_request_counts_twice(answers):
    answers.open(request(ref("a"), ref("a")))
    assert answers.done(ref("a"), result("a")) == []
    assert content(answers.done(ref("a"), result("a"))) == [("r", True, ["a", "a"], [], "m")]


def test_an_image_that_nobody_asked_for_is_no_answer(answers):
    assert answers.done(ref("a"), result("a")) == []


def test_at_the_deadline_what_is_missing_is_named(answers, clock):
    answers.open(request(ref("a"), ref("b")))
    answers.done(ref("a"), result("a"))
    clock.now = 4.9
    assert answers.overdue() == []
    clock.now = 5.0
    (late,) = answers.overdue()
    assert content([late]) == [("r", False, ["a"], ["b"], "m")]
    assert json.loads(late.data)["failed"][0]["reason"] == "deadline"
    assert answers.overdue() == []
    assert answers.done(ref("b"), result("b")) == []
