"""One answer for each request."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from pipeline.records import EncodedImage, ImageRef
from pipeline.stream.answers import Answers
from pipeline.stream.messages import Request
from tests.clock import Clock
from tests.stream.test_outgoing import outcome

HELD: Counter[str] = Counter()
SUBSCRIBER = SimpleNamespace(hold=HELD.update, end_hold=HELD.subtract)


@pytest.fixture
def clock():
    HELD.clear()
    return Clock()


@pytest.fixture
def answers(clock):
    return Answers("topic", 5.0, SUBSCRIBER, clock)


def ref(uri, message_id="m"):
    return ImageRef(uri, request_id="r", message_id=message_id)


def request(*images, message_id="m"):
    return Request(message_id, "r", images)


def due(answers):
    """(message, complete, URIs with rows, URIs that failed) of each answer that is due."""
    rows = [(asked, json.loads(message.data)) for asked, message in answers.due().items()]
    return [(asked, row["complete"], uris_of(row["results"]), uris_of(row["failed"])) for asked, row in rows]


def uris_of(rows):
    return sorted(row["image"]["uri"] for row in rows)


def test_the_answer_is_due_with_the_last_image(answers):
    """An image that is named twice counts twice."""
    answers.open(request(ref("a"), EncodedImage(ref("b"), b"x"), ref("c"), ref("c")))
    for uri in "bca":
        answers.done(ref(uri), outcome(uri, failed=uri == "a"))
    assert due(answers) == []
    answers.done(ref("c"), outcome("c"))
    assert due(answers) == [("m", True, ["b", "c", "c"], ["a"])]
    answers.done(ref("c"), outcome("c"))
    assert due(answers) == []


def test_two_messages_with_one_request_id_have_an_answer_each(answers):
    """A sender that asks again must not wait for another's images, nor have them in its answer."""
    answers.open(request(ref("a"), message_id="m"))
    answers.open(request(ref("a", "n"), ref("b", "n"), message_id="n"))
    answers.done(ref("a"), outcome("a"))
    answers.done(ref("b", "n"), outcome("b"))
    assert due(answers) == [("m", True, ["a"], [])]
    answers.done(ref("a", "n"), outcome("a"))
    assert due(answers) == [("n", True, ["a", "b"], [])]


def test_at_the_deadline_what_is_missing_is_named(answers, clock):
    answers.open(request(ref("a"), ref("b")))
    answers.done(ref("a"), outcome("a"))
    clock.now = 4.9
    assert answers.due() == {}
    clock.now = 5.0
    late = answers.due()["m"]
    assert [json.loads(late.data)["complete"], json.loads(late.data)["failed"][0]["reason"]] == [False, "deadline"]
    answers.done(ref("b"), outcome("b"))
    assert answers.due() == {}


def test_a_message_is_held_until_its_answer_is_published(pubsub_emulator):
    HELD.clear()
    topic, subscription = pubsub_emulator.create()
    answers = Answers(topic, 60.0, SUBSCRIBER)
    answers.open(request(ref("a")))
    answers.publish()
    assert HELD["m"] == 1
    answers.done(ref("a"), outcome("a"))
    answers.publish()
    assert HELD["m"] == 0
    assert len(pubsub_emulator.take(subscription, 1)) == 1
