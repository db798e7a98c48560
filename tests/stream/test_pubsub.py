"""Subscriber and publishing against Google's Pub/Sub emulator."""

import functools
from types import SimpleNamespace

import pytest
from google.api_core import exceptions

from pipeline.process import PROCESS
from pipeline.stream import clients
from pipeline.stream.clients import Publishing
from pipeline.stream.messages import Message
from pipeline.stream.subscriber import Subscriber
from pipeline.stream.threads import RunThreads
from tests.emulators import publish
from tests.processes import wait_until
from tests.streaming_job import CuttableProxy


@pytest.fixture
def queue(pubsub_emulator):
    """A subscription, and what publishes to its topic."""
    topic, subscription = pubsub_emulator.create()
    return SimpleNamespace(subscription=subscription, put=functools.partial(publish, pubsub_emulator.publisher(), topic))


@pytest.fixture
def subscriber_of(request):
    """Makes subscribers that end with the test."""

    def make(queue, max_images: int = 100, max_bytes: int = 50_000_000) -> tuple[Subscriber, RunThreads]:
        threads = RunThreads()
        subscriber = Subscriber(queue.subscription, max_images, max_bytes, threads)
        request.addfinalizer(subscriber.close)
        request.addfinalizer(threads.close)  # first
        return subscriber, threads

    return make


def take_all(subscriber: Subscriber, count: int) -> list[list[bytes]]:
    """Takes until `count` messages have come, each take as a list of contents."""
    takes: list[list[bytes]] = []
    while sum(map(len, takes)) < count:
        takes.append([message.data for message in subscriber.pull(wait_s=240)])
        assert takes[-1], f"{takes} of {count}"
    return takes


def test_every_message_is_taken_once_and_a_take_has_no_more_images_than_asked_for(queue, subscriber_of):
    """A message weighs as many images as it names."""
    ten = b'{"images": ["gs://b/a"' + b', "gs://b/a"' * 9 + b"]}"
    contents = [*(b"%d" % n for n in range(150)), *[ten] * 6]
    queue.put(*contents)
    takes = take_all(subscriber_of(queue, max_images=25)[0], len(contents))
    assert max(sum(1 if content != ten else 10 for content in take) for take in takes) <= 25
    assert sorted(content for take in takes for content in take) == sorted(contents)


def test_a_message_larger_than_the_bounds_comes_alone(queue, subscriber_of):
    queue.put(b"x" * 5_000_000, b"y" * 5_000_000)
    subscriber, _ = subscriber_of(queue, max_bytes=1000)
    takes = [[message.data[:1] for message in subscriber.pull(wait_s=240)] for _ in range(2)]
    assert sorted(takes) == [[b"x"], [b"y"]]


def test_a_pull_of_many_large_messages_does_not_fail(queue, subscriber_of):
    """gRPC's default limit of 4 MB an answer would."""
    queue.put(*[b"x" * 1_000_000] * 40)
    takes = take_all(subscriber_of(queue)[0], 40)
    assert sum(map(len, takes)) == 40


def test_a_backlog_stays_in_pubsub(queue, subscriber_of):
    """What is pulled ahead is bounded by images, so another consumer finds the rest."""
    queue.put(*[b"%d" % n for n in range(300)])
    assert subscriber_of(queue, max_images=20)[0].pull(wait_s=240)
    take_all(subscriber_of(queue)[0], 240)


def test_what_is_in_hand_is_not_delivered_again_beyond_its_deadline(queue, subscriber_of):
    """The subscription's own deadline is 10 s."""
    queue.put(b"slow")
    first, _ = subscriber_of(queue)
    assert len(first.pull(wait_s=240)) == 1
    assert subscriber_of(queue)[0].pull(wait_s=13) == []


def test_a_message_is_acknowledged_when_its_bundle_is_final_and_nothing_holds_it(queue, subscriber_of):
    """An image of it may be in progress in another bundle, and its rows in a window."""
    queue.put(b"both", b"one of two", b"held twice")
    subscriber, threads = subscriber_of(queue, max_images=1)
    ids = {message.data: message.message_id for _ in range(3) for message in subscriber.pull(wait_s=240)}
    subscriber.hold([*ids.values(), ids[b"held twice"]])
    subscriber.end_hold([ids[b"both"], ids[b"one of two"], ids[b"held twice"]])
    subscriber.end_hold([ids[b"both"], ids[b"held twice"]])
    threads.close()
    subscriber.close()
    other = subscriber_of(queue, max_images=1)[0]
    again = [message.data for _ in range(2) for message in other.pull(wait_s=240)]
    assert sorted(again) == [b"held twice", b"one of two"]
    assert other.pull(wait_s=1) == []


def test_stopping_gives_back_what_nobody_has_taken(queue, subscriber_of):
    contents, waiting = {b"%d" % n for n in range(50)}, PROCESS.parts["subscriber"].waiting
    queue.put(*contents)
    first, threads = subscriber_of(queue, max_images=10)
    taken = {message.data for message in first.pull(wait_s=240)}
    threads.stop.set()
    assert first.pull(wait_s=0) == []
    wait_until(lambda: PROCESS.parts["subscriber"].waiting == waiting)  # no work is left for the watchdog
    rest = {content for take in take_all(subscriber_of(queue)[0], 50 - len(taken)) for content in take}
    assert rest == contents - taken


def test_a_subscription_that_is_deleted_meanwhile_is_an_error(queue, subscriber_of, pubsub_emulator):
    subscriber, _ = subscriber_of(queue)
    pubsub_emulator.subscriber().delete_subscription(subscription=queue.subscription)
    with pytest.raises(exceptions.NotFound):
        for _ in range(30):
            subscriber.pull(wait_s=1)


@pytest.fixture
def proxy(pubsub_emulator, monkeypatch):
    """What a job takes for Pub/Sub."""
    proxy = CuttableProxy(pubsub_emulator.host)
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", proxy.host)
    return proxy


def test_a_pull_that_fails_is_progress_for_the_watchdog_and_messages_come_after_the_outage(queue, proxy, subscriber_of):
    queue.put(b"before")
    subscriber, _ = subscriber_of(queue)
    assert [message.data for message in subscriber.pull(wait_s=240)] == [b"before"]
    proxy.cut()
    wait_until(lambda: "Pub/Sub" in PROCESS.failing)
    steps = PROCESS.parts["pull"].steps
    wait_until(lambda: PROCESS.parts["pull"].steps > steps)
    queue.put(b"after")
    proxy.recover()
    assert [message.data for message in subscriber.pull(wait_s=240)] == [b"after"]


def test_messages_are_published_after_an_outage_that_is_longer_than_the_client_tries(pubsub_emulator, proxy, monkeypatch):
    topic, subscription = pubsub_emulator.create()
    monkeypatch.setattr(clients, "_RETRY_SECONDS", 0.1)
    proxy.cut()
    publishing, steps = Publishing(), PROCESS.parts["publish"].steps
    publishing.send(topic, Message(b"x"))
    wait_until(lambda: PROCESS.parts["publish"].steps > steps + 2)  # each is a try; so the watchdog waits, too
    proxy.recover()
    publishing.wait()
    assert [message.data for message in pubsub_emulator.take(subscription, 1)] == [b"x"]


def test_all_messages_of_a_bundle_are_published_in_few_requests_whatever_their_number_and_size(pubsub_emulator):
    """A request has at most 10 MB."""
    topic, subscription = pubsub_emulator.create()
    contents = [*(b"%d" % number for number in range(250)), *(b"%d" % number * 6_000_000 for number in range(2))]
    publishing = Publishing()
    for content in contents:
        publishing.send(topic, Message(content, {"size": str(len(content))}))
    publishing.wait()
    taken = pubsub_emulator.take(subscription, len(contents))
    assert sorted(message.data for message in taken) == sorted(contents)
    assert all(message.attributes == {"size": str(len(message.data))} for message in taken)


def test_a_topic_that_is_gone_fails_its_bundle_and_no_other(pubsub_emulator):
    topic, subscription = pubsub_emulator.create()
    failing, other = Publishing(), Publishing()
    failing.send(f"{topic}-gone", Message(b"x"))
    other.send(topic, Message(b"y"))
    with pytest.raises(exceptions.NotFound):
        failing.wait()
    other.wait()
    assert [message.data for message in pubsub_emulator.take(subscription, 1)] == [b"y"]
