"""One run: made once, found in one place, gone when it ends; no thread of it dies unseen."""

import pickle
import threading

import pytest
from google.api_core import exceptions

from pipeline.config import Config, StreamConfig
from pipeline.records import ImageRef
from pipeline.stream.messages import Request
from pipeline.stream.shared import RunSettings, StreamRun, opened, run_of
from tests.processes import wait_until

ANSWERING = Config(stream=StreamConfig(answer_topic="a"))


def threads_left(before):
    return [thread for thread in threading.enumerate() if thread not in before]


def test_all_steps_find_the_same_run_and_no_thread_of_it_is_left_also_when_its_job_fails():
    before, settings = threading.enumerate(), RunSettings("a run", ANSWERING)
    with pytest.raises(ZeroDivisionError), opened(settings) as run:
        assert run_of(pickle.loads(pickle.dumps(settings))) is run
        assert threads_left(before)
        raise ZeroDivisionError
    with pytest.raises(LookupError, match="is over"):
        run_of(run.settings)  # a step that is set up late would wait for messages that nobody pulls
    assert threads_left(before) == []


def test_overdue_answers_that_pubsub_refuses_for_good_end_the_job(pubsub_emulator):
    """The thread used to die unseen, and no request was answered at its deadline from then on."""
    missing = f"projects/{pubsub_emulator.project}/topics/none"
    run = StreamRun(RunSettings("refused", Config(stream=StreamConfig(answer_topic=missing, answer_deadline_s=0.1))))
    run.answers.open(Request("m", "r", (ImageRef("a"),)))
    wait_until(lambda: run.threads._failure is not None)
    run.close()
    with pytest.raises(exceptions.NotFound):
        run.threads.raise_failure()


def test_a_failed_thread_ends_the_intake_of_the_job(pubsub_emulator):
    """Whatever thread it was: the next turn raises its reason, and the job ends with it."""
    _, subscription = pubsub_emulator.create()
    with opened(RunSettings("subscriber", Config(input=(subscription,)))) as run:
        assert run.subscriber.pull(wait_s=0) == []
        run.threads.start("dividing", lambda: 1 // 0)
        wait_until(lambda: run.threads._failure is not None)
        with pytest.raises(ZeroDivisionError):
            run.subscriber.pull(wait_s=0)


def test_what_is_in_hand_when_a_run_ends_is_delivered_again_at_once(pubsub_emulator):
    topic, subscription = pubsub_emulator.create(ack_deadline_seconds=600)
    pubsub_emulator.publisher().publish(topic, b"taken").result()
    before = threading.enumerate()
    with opened(RunSettings("first", Config(input=(subscription,)))) as run:
        assert [message.data for message in run.subscriber.pull(wait_s=240)] == [b"taken"]
    assert [thread.name for thread in threads_left(before) if thread.name in ("pulling", "extending deadlines")] == []
    assert [message.data for message in pubsub_emulator.take(subscription, 1)] == [b"taken"]
