"""Whatever stands in a message: each image ends as a result or a dead letter, each request with one answer to publish."""

import base64
import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from google.cloud import pubsub_v1
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.failures import REASONS
from pipeline.listing.dead_letter_replay import DeadLetterReplay
from pipeline.records import (
    DeadLetter,
    DetectedImage,
    Detections,
    EncodedImage,
    ImageRef,
    dead_letter_row,
    detection_row,
    name_bytes,
    ref_of,
    row_bytes,
)
from pipeline.stats import beam_metrics
from pipeline.stats.counted import COUNTED
from pipeline.stats.job_stats import JobStats
from pipeline.stats.progress import line
from pipeline.stream import messages as parsing
from pipeline.stream.answers import Answers
from pipeline.stream.dedup_cache import DedupCache
from pipeline.stream.messages import Message, Request, image_count, parse_message, replay_message
from pipeline.stream.outgoing import Outcome, dead_letter_message, detection_message
from tests.memory import less_memory_than

ALLOWED = ("gs://", "/data/photos")
JPEG = b"\xff\xd8\xff\xe0 not really"
REPLAY = DeadLetterReplay("", ALLOWED, replay_message)
REPLAY_AGAIN = replace(REPLAY, again=True)

characters = st.characters(exclude_categories=())  # also the halves of surrogate pairs, which JSON can name
unicode_texts = st.text(max_size=30)  # what Pub/Sub takes in attributes
uris = st.sampled_from(["gs://b/a.jpg", "/data/photos/a.jpg", "/etc/passwd", "gs://b/../a", "inline:x", "gs://b/%2e%2e/x"])
texts = st.text(characters, max_size=30) | uris | st.text(characters, min_size=1).map(lambda name: f"gs://b/{name}")
inline = st.binary(max_size=40).map(lambda content: base64.b64encode(content).decode())
numbers = st.integers() | st.floats() | st.just(10**30)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts | inline,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(characters, max_size=8), part, max_size=3),
    max_leaves=8,
)
named = texts | values
an_entry = {"uri": named, "bytes": inline | values, "name": named, "generation": named, "x": values}
entries = st.fixed_dictionaries({}, optional=an_entry)
a_request = {"request_id": named, "images": st.lists(entries | values, max_size=25) | values, "uri": texts, "bytes": inline}
requests = st.fixed_dictionaries({}, optional=a_request)
of_letters = st.fixed_dictionaries(
    {"image": st.dictionaries(st.sampled_from(["uri", "generation"]), texts | values, max_size=2) | values},
    optional={
        "stage": st.sampled_from(list(REASONS)) | values,
        "reason": st.sampled_from([reason for reasons in REASONS.values() for reason in reasons]) | values,
        "message": texts | values,
        "payload_base64": inline | values,
    },
)
KEYS = "uri bytes content name generation request_id images ... image stage reason message extra payload_base64 model record"
known = st.sampled_from(KEYS.split())
anything = st.dictionaries(known, st.deferred(lambda: anything) | values, max_size=6)  # of any type under each key
brackets = st.integers(1, 1200).map(lambda depth: "[" * depth + "]" * depth)
nested = st.builds(str.__mod__, st.sampled_from(['{"request_id": %s}', '{"images": ["gs://b/a", %s]}', "%s"]), brackets)
moments = (
    st.datetimes(timezones=st.none() | st.timezones()).map(lambda moment: moment.isoformat())
    | st.sampled_from(["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59.999999-23:59", "1969-12-31", "2026-W01", "24:00"])
    | unicode_texts
)
otherwise_encoded = st.tuples(requests.map(json.dumps), st.sampled_from(["utf-16", "utf-32", "utf-8-sig"]))
contents = (
    st.binary(max_size=60)
    | st.binary(max_size=20).map(lambda rest: JPEG + rest)
    | (requests | of_letters | anything | values).map(lambda body: json.dumps(body).encode())
    | otherwise_encoded.map(lambda pair: pair[0].encode(pair[1]))
    | nested.map(str.encode)
)
attributes = st.fixed_dictionaries(
    {},
    optional={
        "request_id": unicode_texts | st.text(min_size=1000, max_size=1024),
        **dict.fromkeys(("name", "objectId", "objectGeneration", "payload"), unicode_texts),
        **dict.fromkeys(("event_time", "eventTime"), moments),
        "eventType": st.sampled_from(["OBJECT_FINALIZE", "OBJECT_DELETE", "", "é"]),
        "bucketId": st.sampled_from(["photos", "PHOTOS", ""]) | unicode_texts,
        "content-type": st.sampled_from(["image/jpeg", "IMAGE/x", "text/plain", ""]),
    },
)
messages = st.builds(Message, contents, attributes, st.just("m"), st.floats(0, 4e9))
boxes = st.sampled_from([0.0, -1.5, 3e38, np.inf, -np.inf, np.nan])


def publishable(message: Message) -> bytes:
    """The message as Pub/Sub's client makes it, which refuses what the service would; its payload."""
    made = pubsub_v1.types.PubsubMessage(data=message.data, attributes=message.attributes)
    assert all(len(value.encode()) <= 1024 and len(key) <= 256 for key, value in made.attributes.items())
    json.loads(message.data.decode())
    return bytes(made.data)


def end(image: ImageRef | EncodedImage, number: float) -> DetectedImage | DeadLetter:
    """A result, or for some images a failure."""
    ref = image if isinstance(image, ImageRef) else image.ref
    if len(ref.identity) % 3 == 0:
        return DeadLetter(ref, "decode", "corrupt", f"{ref.uri} is damaged: {number}", getattr(image, "content", b""))
    found = Detections(np.full((1, 4), number, np.float32), np.zeros(1, np.int32), np.full(1, number, np.float32), (ref.uri,))
    return DetectedImage(ref, 4, 3, ref.generation, "1", found)


def outcomes(request: Request, message: Message, now: float, number: float):
    """What becomes of the images of a request, published and counted."""
    stats = COUNTED.begin_counting()
    beam_metrics.note_message(message.publish_time)
    for result in (*request.dead_letters, *(end(image, number) for image in request.images)):
        is_dead = isinstance(result, DeadLetter)
        row = row_bytes(dead_letter_row(result) if is_dead else detection_row(result))
        assert b"\n" not in row and json.loads(row)
        message = dead_letter_message(result, now) if is_dead else detection_message(result, now)
        beam_metrics.count_results(result)
        if not is_dead:
            beam_metrics.note_published(result, now)
        yield result.ref, Outcome(publishable(message), failed=is_dead)
    assert line(stats, JobStats(), 1.0)
    COUNTED.stats.remove(stats)


@pytest.fixture(autouse=True, scope="module")
def _low_bounds():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "MAX_IMAGES", 20)
        patch.setattr(parsing, "MAX_INLINE_BYTES", 1000)
        yield


@given(of_letters | anything | values)
@example({"image": {"uri": ["gs://b/a"]}, "stage": "read", "reason": "not_found"})
@example({"image": {}, "stage": "read", "reason": []})
def test_each_row_of_dead_letters_asks_for_images_or_is_refused(row):
    """Whoever may write below a results folder may write such files."""
    try:
        asked = REPLAY_AGAIN.replay(json.loads(row_bytes(row)))
    except ValueError:
        return
    assert asked
    left_out = [each for each in asked if each not in REPLAY.replay(json.loads(row_bytes(row)))]
    assert all(isinstance(each, DeadLetter) and each.stage == "message" for each in left_out)
    assert all(isinstance(each.uri, str) for each in asked if isinstance(each, ImageRef))


@given(messages, st.floats(0, 4e9), boxes)
@example(Message(b'{"bytes": "/9j/4A==", "name": "\\ud800"}'), 0.0, 0.0)
@example(Message(b'{"request_id": "\\udfff", "images": ["gs://b/\\ud83d"]}'), 0.0, 0.0)
@example(Message(JPEG, {"event_time": "0001-01-01T00:00:00+23:59", "request_id": "r"}), 0.0, 0.0)
@example(Message(JPEG, {"event_time": "9999-12-31T23:59:59-23:59"}), 0.0, 0.0)
@example(Message(b'{"request_id": "r", "images": []}'), 0.0, 0.0)
@example(Message(b'{"request_id": "r", "images": 3}'), 0.0, 0.0)
@example(Message(b'{"image": {}, "stage": "read", "reason": []}'), 0.0, 0.0)
@example(Message(b'{"image": {}, "stage": {}, "reason": "not_found"}'), 0.0, 0.0)
def test_each_message_ends_in_results_dead_letters_and_one_answer(message, now, number):
    """Whatever bytes and attributes come: no message is lost and none stops the stream."""
    assert image_count(message) >= 1
    request = parse_message(message, ALLOWED)
    assert request.skipped != bool(request.images or request.dead_letters)
    answers, overdue = (Answers("topic", seconds, SimpleNamespace(hold=len)) for seconds in (60.0, 0.0))
    answers.open(request)
    overdue.open(request)
    ended = list(outcomes(request, message, now, number))
    for ref, outcome in ended:
        answers.done(ref, outcome)
    for sent in (answers.due().values(), overdue.due().values()):
        assert len(sent) == request.wants_answer
        for answer in sent:
            content = json.loads(publishable(answer))
            assert content["request_id"] == request.request_id
            assert len(content["results"]) + len(content["failed"]) == len(ended)
    assert len(ended) == len(request.images) + len(request.dead_letters)


@given(st.lists(messages, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_whatever_order_images_end_in_each_request_is_answered_once_with_all_its_images(received, random):
    """Requests share images; some ask while an image is under way, some after it has ended, some after it failed."""
    answers = Answers("topic", 60.0, SimpleNamespace(hold=len))
    recent = DedupCache(600.0, answers.done)
    parsed = [parse_message(Message(each.data, each.attributes, f"m{n}"), ALLOWED) for n, each in enumerate(received)]
    steps = [image for request in parsed for image in (*request.images, *request.dead_letters)]
    for request in parsed:
        answers.open(request)
    leading: list[ImageRef | EncodedImage] = []
    while steps or leading:
        if leading and (not steps or random.random() < 0.5):
            image = leading.pop(random.randrange(len(leading)))
            result = end(image, 0.0)
            recent.done(result.ref, Outcome(b"{}", isinstance(result, DeadLetter)))
            continue
        image = steps.pop(0)
        if isinstance(image, DeadLetter):
            answers.done(image.ref, Outcome(b"{}", failed=True))
        elif recent.is_new(ref_of(image), name_bytes(ref_of(image).identity)):
            leading.append(image)
    wanted = [(request.message_id, len(request.images) + len(request.dead_letters)) for request in parsed if request.wants_answer]
    sent = answers.due()
    assert {asked: sum(int(sent[asked].attributes[kind]) for kind in ("images", "failed")) for asked in sent} == dict(wanted)


def test_every_depth_of_nesting_ends_as_a_dead_letter_or_is_passed_over():
    """Somewhere the reader of JSON still manages what its writer does not."""
    forms = ['{"request_id": %s, "images": []}', '{"images": ["gs://b/a", %s]}', '{"uri": "gs://b/a", "generation": %s}', "%s"]
    for form, depth in itertools.product(forms, range(1, 1100)):
        request = parse_message(Message((form % ("[" * depth + "]" * depth)).encode()), ALLOWED)
        assert request.images or request.dead_letters


def empty_images() -> bytes:
    shared = json.dumps({f"f{n}": "x" * 40 for n in range(30)})[:-1].encode()
    return shared + b', "images": [' + b"{}," * 3_000_000 + b"{}]}"


LETTER = b'{"image": {}, "stage": "message", "reason": "bad_json", "payload_base64": "%s"}'
HOSTILE_SIZES = {  # messages that ask for far more memory than they have bytes, close to Pub/Sub's 10 MB
    "empty images with shared fields": empty_images,
    "such a message in a dead letter": lambda: LETTER % base64.b64encode(empty_images()),
    "lists": lambda: b"[" + b"[]," * 3_000_000 + b"[]]",
    "fields": lambda: b'{"uri": "gs://b/a", "x": {' + b",".join(b'"%d":{}' % n for n in range(800_000)) + b"}}",
    "numbers": lambda: b"[" + b"0.5," * 2_000_000 + b"1]",
    "a number": lambda: b'{"uri": "gs://b/a", "x": ' + b"9" * 9_000_000 + b"}",
    "a text": lambda: b'{"uri": "gs://b/' + b"\\u00e9" * 1_500_000 + b'"}',
    "an inline image": lambda: b'{"bytes": "' + b"A" * 9_000_000 + b'"}',
    "images nested too deep": lambda: b"[" + b",".join([b"[" * 600 + b"]" * 600] * 20) + b"," + b'"%s"]' % (b"x" * 5_000_000),
}


@pytest.mark.parametrize("message", HOSTILE_SIZES.values(), ids=HOSTILE_SIZES)
def test_a_message_takes_no_more_memory_than_its_bounds_allow(message):
    """Bounds come before work: a count is looked at before anything is made of what is counted."""
    data = message()
    with less_memory_than(100_000_000):
        assert image_count(Message(data)) >= 1
        request = parse_message(Message(data), ALLOWED)
        sent = sum(len(dead_letter_message(letter, 0.0).data) for letter in request.dead_letters)
    assert request.dead_letters and not request.images
    assert sent < 3 * len(data), "dead letters do not multiply what came"
