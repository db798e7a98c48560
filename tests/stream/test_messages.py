"""What messages ask for, and the messages that answer."""

import base64
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records import DeadLetter, DetectedImage, Detections, EncodedImage, ImageRef
from pipeline.stream.messages import (
    MAX_MESSAGE_BYTES,
    Message,
    MessageLimits,
    dead_letter_message,
    detection_id,
    detection_message,
    image_count,
    is_allowed,
    parse_message,
)

JPEG = b"\xff\xd8\xff\xe0 not really"
LIMITS = MessageLimits()


def asked(data, limits=LIMITS, publish_time=100.0, **attributes):
    return parse_message(Message(data, attributes, "m1", publish_time), limits)


def notified(event="OBJECT_FINALIZE", bucket="photos", name="a/b.jpg", generation="17", **more):
    return asked(b"{}", eventType=event, bucketId=bucket, objectId=name, objectGeneration=generation, **more)


def only_dead_letter(request):
    assert request.images == ()
    (letter,) = request.dead_letters
    assert letter.stage == "message"
    return letter


def test_a_storage_notification_asks_for_that_generation_of_the_object():
    request = notified(eventTime="2026-11-21T02:00:00.5Z")
    assert request.images == (ImageRef("gs://photos/a/b.jpg", "17", event_time=1795226400.5),)
    assert request.dead_letters == ()
    assert not request.skipped


@pytest.mark.parametrize("event", ["OBJECT_DELETE", "OBJECT_ARCHIVE", "OBJECT_METADATA_UPDATE", "NEW_KIND"])
def test_other_notifications_are_skipped(event):
    request = notified(event=event)
    assert (request.images, request.dead_letters, request.skipped) == ((), (), True)


@pytest.mark.parametrize("bucket", ["", "a/../b", "photos/x", "UPPER", "a" * 300])
def test_a_notification_with_a_strange_bucket_is_a_dead_letter(bucket):
    assert only_dead_letter(notified(bucket=bucket)).reason == "bad_notification"


@pytest.mark.parametrize(
    ("data", "uris"),
    [
        ('{"uri": "gs://b/a.jpg"}', ["gs://b/a.jpg"]),
        ('{"images": [{"uri": "gs://b/a.jpg"}, {"uri": "gs://b/ü.png"}]}', ["gs://b/a.jpg", "gs://b/ü.png"]),
        ('{"images": ["gs://b/a.jpg"]}', ["gs://b/a.jpg"]),
        ('["gs://b/a.jpg", {"uri": "gs://b/b.jpg"}]', ["gs://b/a.jpg", "gs://b/b.jpg"]),
        ('"gs://b/a.jpg"', ["gs://b/a.jpg"]),
        (" gs://b/a b.jpg\n", ["gs://b/a b.jpg"]),
    ],
    ids=["one", "several", "texts", "list", "text", "plain"],
)
def test_uris_are_found_in_json_and_in_plain_text(data, uris):
    request = asked(data.encode())
    assert [image.uri for image in request.images] == uris
    assert all(image.event_time == 100.0 for image in request.images)
    assert request.dead_letters == ()


def test_the_request_id_goes_to_every_image_and_dead_letter():
    body = {
        "request_id": "r7",
        "images": [{"uri": "gs://b/a.jpg"}, {"bytes": base64.b64encode(JPEG).decode()}, {"uri": "/etc/passwd"}],
    }
    request = asked(json.dumps(body).encode())
    assert request.request_id == "r7"
    named, inline = request.images
    assert (named.request_id, inline.ref.request_id, request.dead_letters[0].ref.request_id) == ("r7", "r7", "r7")
    assert inline.content == JPEG


@pytest.mark.parametrize("attributes", [{}, {"content-type": "image/jpeg"}, {"Content_Type": "IMAGE/JPEG"}], ids=str)
def test_raw_image_bytes_are_recognised_with_and_without_a_content_type(attributes):
    (image,) = asked(JPEG, **attributes).images
    assert isinstance(image, EncodedImage)
    assert image.content == JPEG
    assert image.ref.uri.startswith("inline:")


def test_a_content_type_makes_an_image_of_bytes_that_look_like_none():
    (image,) = asked(b"???", **{"content-type": "image/x-new"}).images
    assert image.content == b"???"


@pytest.mark.parametrize(
    "start",
    [b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"II*\0", b"MM\0*", b"RIFF1234WEBP", b"\0\0\0\x20ftypavif"],
    ids=["png", "gif", "bmp", "tiff", "tiff-be", "webp", "avif"],
)
def test_image_formats_are_recognised_by_how_they_start(start):
    assert len(asked(start + b"rest").images) == 1


def test_inline_images_are_the_same_image_when_name_and_bytes_are():
    def identity(content, **attributes):
        return asked(content, **attributes).images[0].ref.identity

    assert identity(JPEG) == identity(JPEG)
    assert identity(JPEG) != identity(JPEG + b"x")
    assert identity(JPEG, name="a") == identity(JPEG, name="a") != identity(JPEG, name="b")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not_recognised"),
        (b"hello", "not_recognised"),
        (b"\x00\x01\x02", "not_recognised"),
        (b"{", "bad_json"),
        (b"[" * 100_000, "bad_json"),
        (b'{"images": 3}', "bad_request"),
        (b'{"images": []}', "no_images"),
        (b"[]", "no_images"),
        (b"{}", "bad_request"),
        (b"[3]", "bad_request"),
        (b'{"uri": 3}', "bad_request"),
        (b'{"bytes": "?"}', "bad_base64"),
        (b'{"content": "abc"}', "bad_request"),
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_a_dead_letter_with_the_message_as_payload(data, reason):
    letter = only_dead_letter(asked(data))
    assert letter.reason == reason
    assert letter.payload == data


@given(st.binary(max_size=200), st.dictionaries(st.text(max_size=12), st.text(max_size=30), max_size=3))
def test_no_message_raises(data, attributes):
    request = asked(data, **{"a" + name: value for name, value in attributes.items()})
    assert request.skipped or request.images or request.dead_letters
    assert image_count(Message(data, attributes)) >= 1


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda c: (
            st.lists(c) | st.dictionaries(st.sampled_from(["uri", "bytes", "images", "request_id", "name", "generation", "x"]), c)
        ),
    )
)
def test_no_json_raises(body):
    request = asked(json.dumps(body).encode())
    assert request.images or request.dead_letters
    for letter in request.dead_letters:
        dead_letter_message(letter, 0.0)


@pytest.mark.parametrize(
    ("uri", "prefixes"),
    [
        ("gs://b/a.jpg", ["gs://"]),
        ("gs://b/a.jpg", ["gs://b"]),
        ("gs://b/x/a.jpg", ["gs://c/", "gs://b/x/"]),
        ("/data/photos/a.jpg", ["/data/photos"]),
        ("gs://b/a..b/c.jpg", ["gs://b/"]),
        ("gs://b/100%.jpg", ["gs://b/"]),
    ],
    ids=str,
)
def test_what_lies_under_a_prefix_is_allowed(uri, prefixes):
    assert is_allowed(uri, prefixes)


@pytest.mark.parametrize(
    ("uri", "prefixes"),
    [
        ("/etc/passwd", ["gs://"]),
        ("file:///etc/passwd", ["gs://"]),
        ("FILE:///etc/passwd", ["gs://"]),
        ("GS://b/a.jpg", ["gs://"]),
        (" gs://b/a.jpg", ["gs://"]),
        ("gs:/b/a.jpg", ["gs://"]),
        ("http://gs://b/a.jpg", ["gs://"]),
        ("gs://bucket-evil/a.jpg", ["gs://bucket"]),
        ("gs://b", ["gs://b"]),
        ("gs://b/x/../secret/a.jpg", ["gs://b/x/"]),
        ("gs://b/x/%2e%2e/secret/a.jpg", ["gs://b/x/"]),
        ("gs://b/x/%252e%252e/a.jpg", ["gs://b/x/"]),
        ("/data/photos/../../etc/passwd", ["/data/photos/"]),
        ("/data/photos\\..\\x", ["/data/photos/", "/data/photos\\"]),
        ("/data/photos/a\0.jpg", ["/data/photos/"]),
        ("/data/photos/a\n.jpg", ["/data/photos/"]),
        ("/data/photos-secret/a.jpg", ["/data/photos"]),
        ("gs://b/" + "a" * 3000, ["gs://"]),
        ("gs://b/a.jpg", []),
        ("gs://b/a.jpg", [""]),
        ("/etc/passwd", [""]),
    ],
    ids=str,
)
def test_what_lies_under_no_prefix_is_refused(uri, prefixes):
    assert not is_allowed(uri, prefixes)


def test_a_local_file_cannot_be_asked_for_by_default():
    for data in (b'{"uri": "/etc/passwd"}', b"/etc/passwd", b'["file:///etc/passwd"]'):
        assert only_dead_letter(asked(data)).reason == "not_allowed"


def test_an_image_that_is_refused_fails_alone():
    request = asked(b'["gs://b/a.jpg", "/etc/passwd", 3, "gs://b/b.jpg"]')
    assert [image.uri for image in request.images] == ["gs://b/a.jpg", "gs://b/b.jpg"]
    assert [letter.reason for letter in request.dead_letters] == ["not_allowed", "bad_request"]


def test_the_number_of_images_is_bounded():
    limits = MessageLimits(max_images=3)
    assert len(asked(b'["gs://b/1", "gs://b/2", "gs://b/3"]', limits).images) == 3
    assert only_dead_letter(asked(b'["gs://b/1", "gs://b/2", "gs://b/3", "gs://b/4"]', limits)).reason == "too_many_images"


def test_the_bytes_of_inline_images_are_bounded_together():
    content = base64.b64encode(JPEG).decode()
    body = json.dumps([{"bytes": content}, {"bytes": content, "name": "second"}]).encode()
    assert len(asked(body, MessageLimits(max_bytes=2 * len(JPEG))).images) == 2
    request = asked(body, MessageLimits(max_bytes=2 * len(JPEG) - 1))
    assert len(request.images) == 1
    assert request.dead_letters[0].reason == "too_large"


@pytest.mark.parametrize(
    ("message", "count"),
    [
        (Message(b""), 1),
        (Message(JPEG), 1),
        (Message(b'["gs://b/1", "gs://b/2"]'), 2),
        (Message(b'{"images": [1, 2, 3]}'), 3),
        (Message(b"{}", {"eventType": "OBJECT_DELETE", "objectId": "x"}), 1),
    ],
    ids=str,
)
def test_a_message_weighs_what_it_asks_for(message, count):
    assert image_count(message) == count


def test_the_event_time_is_the_attribute_or_else_the_publish_time():
    assert asked(JPEG).images[0].ref.event_time == 100.0
    assert asked(JPEG, event_time="1970-01-01T00:01:00Z").images[0].ref.event_time == 60.0
    assert asked(JPEG, event_time="1970-01-01T01:01:00+01:00").images[0].ref.event_time == 60.0
    assert asked(JPEG, event_time="yesterday").images[0].ref.event_time == 100.0


def detected(uri="gs://b/a.jpg", version="3", **ref):
    found = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.int32), np.zeros(0, np.float32), ())
    return DetectedImage(ImageRef(uri, "17", **ref), 640, 480, "yolov4", version, found)


def test_a_detection_is_the_batch_row_with_what_readers_route_on_as_attributes():
    message = detection_message(detected(event_time=60.0, request_id="r1"), now=60.25)
    assert json.loads(message.data) == {
        "image": {"uri": "gs://b/a.jpg", "generation": "17", "width": 640, "height": 480},
        "model": {"name": "yolov4", "version": "3"},
        "detections": [],
    }
    assert message.attributes == {
        "kind": "detections",
        "detection_id": detection_id(ImageRef("gs://b/a.jpg", "17"), "yolov4", "3"),
        "image_uri": "gs://b/a.jpg",
        "generation": "17",
        "model_name": "yolov4",
        "model_version": "3",
        "request_id": "r1",
        "event_time": "1970-01-01T00:01:00.000Z",
        "latency_ms": "250.0",
    }


def test_a_detection_id_depends_on_image_and_model_version_alone():
    same = detection_message(detected(event_time=1.0), 2.0), detection_message(detected(event_time=3.0, request_id="r"), 9.0)
    assert same[0].attributes["detection_id"] == same[1].attributes["detection_id"]
    ids = {
        detection_message(image, 0.0).attributes["detection_id"]
        for image in (detected(), detected(version="4"), detected("gs://b/b"))
    }
    assert len(ids) == 3


def test_an_attribute_is_cut_where_pubsub_would_refuse_it():
    long = "gs://b/" + "ü" * 1000
    message = detection_message(detected(long), 0.0)
    assert len(message.attributes["image_uri"].encode()) <= 1024
    assert long.startswith(message.attributes["image_uri"])
    assert json.loads(message.data)["image"]["uri"] == long


def test_a_dead_letter_carries_its_payload_unless_pubsub_would_refuse_it():
    letter = DeadLetter(ImageRef(""), "message", "not_recognised", "expected …", b"hello")
    assert json.loads(dead_letter_message(letter, 0.0).data)["payload_base64"] == base64.b64encode(b"hello").decode()
    large = DeadLetter(ImageRef(""), "message", "not_recognised", "expected …", b"x" * MAX_MESSAGE_BYTES)
    message = dead_letter_message(large, 0.0)
    assert "payload_base64" not in json.loads(message.data)
    assert message.attributes["payload"] == "left out, too large"
