"""What messages ask for, and the messages that answer."""

import base64
import json

import pytest

from pipeline.failures import ImageError
from pipeline.read.allowed import is_allowed
from pipeline.records import EncodedImage, ImageRef
from pipeline.stream import messages
from pipeline.stream.messages import Message, image_count, parse_message
from pipeline.stream.outgoing import dead_letter_message

JPEG = b"\xff\xd8\xff\xe0 not really"
INLINE_BYTES = base64.b64encode(JPEG).decode()
ALLOWED = ("gs://",)


def asked(data, allowed=ALLOWED, publish_time=100.0, **attributes):
    return parse_message(Message(data, attributes, "m1", publish_time), allowed)


def notified(event="OBJECT_FINALIZE", bucket="photos", name="a/b.jpg", generation="17", **more):
    return asked(b"{}", eventType=event, bucketId=bucket, objectId=name, objectGeneration=generation, **more)


def only_dead_letter(request):
    assert request.images == ()
    (letter,) = request.dead_letters
    assert letter.stage == "message"
    return letter


def test_a_storage_notification_asks_for_that_generation_of_the_object():
    request = notified(eventTime="2026-11-21T02:00:00.5Z")
    assert request.images == (ImageRef("gs://photos/a/b.jpg", "17", event_time=1795226400.5, message_id="m1"),)
    assert request.dead_letters == ()
    assert not request.skipped


@pytest.mark.parametrize(
    ("message", "said"),
    [
        pytest.param({"uri": "gs://b/a"}, [{}], id="nothing"),
        pytest.param({"uri": "gs://b/a", "name": "n", "generation": "1", "request_id": "r"}, [{}], id="only what is ours"),
        pytest.param({"uri": "gs://b/a", "camera": 7, "tags": ["x"]}, [{"camera": 7, "tags": ["x"]}], id="of one image"),
        pytest.param({"bytes": INLINE_BYTES, "camera": 7}, [{"camera": 7}], id="of an inline image"),
        pytest.param({"uri": "gs://b/a", "extra": {"camera": 7}, "label": "x"}, [{"camera": 7, "label": "x"}], id="as in rows"),
        pytest.param(
            {"request_id": "r", "camera": 7, "images": ["gs://b/a", {"uri": "gs://b/b", "camera": 8}, {"bytes": INLINE_BYTES}]},
            [{"camera": 7}, {"camera": 8}, {"camera": 7}],
            id="of all images",
        ),
        pytest.param(
            {"notes": "x" * 100_000, "images": [{"uri": "gs://b/a", "notes": "y" * 3000, "n": 1}]},
            [{"n": 1, "...": 2}],
            id="large",
        ),
        pytest.param({"images": ["gs://b/a"], "a\ud800": float("nan")}, [{"a\ud800": None}], id="no Unicode, no number"),
    ],
)
def test_what_a_message_says_beyond_what_we_know_travels_with_its_images(message, said):
    images = asked(json.dumps(message).encode()).images
    refs = [image.ref if isinstance(image, EncodedImage) else image for image in images]
    assert [json.loads(ref.extra or "{}") for ref in refs] == said


@pytest.mark.parametrize("event", ["OBJECT_DELETE", "OBJECT_ARCHIVE", "OBJECT_METADATA_UPDATE", "NEW_KIND"])
def test_other_notifications_are_skipped(event):
    request = notified(event=event, request_id="r")
    assert (request.images, request.dead_letters, request.skipped, request.wants_answer) == ((), (), True, False)


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


@pytest.mark.parametrize(
    ("data", "attributes"),
    [
        (JPEG, {}),
        (JPEG, {"Content_Type": "IMAGE/JPEG"}),
        (b"RIFF1234WEBPrest", {}),
        (b"???", {"content-type": "image/x-new"}),
    ],
    ids=str,
)
def test_raw_image_bytes_are_recognised_by_their_start_or_a_content_type(data, attributes):
    (image,) = asked(data, **attributes).images
    assert image.content == data
    assert image.ref.uri.startswith("inline:")


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


def as_message(letter):
    return dead_letter_message(letter, 0.0).data


def failed(request, stage, reason):
    """The dead letters of a request's images, as later steps make them."""
    images = [(image, b"") if isinstance(image, ImageRef) else (image.ref, image.content) for image in request.images]
    return [ImageError(stage, reason, "no").dead_letter(ref, payload) for ref, payload in images]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b'{"uri": "gs://b/a.jpg", "camera": 7}', id="a named image"),
        pytest.param(json.dumps({"bytes": INLINE_BYTES, "name": "x.jpg", "label": "cat"}).encode(), id="an inline image"),
        pytest.param(JPEG, id="bytes alone"),
    ],
)
def test_a_dead_letter_as_a_message_asks_for_its_image_again(data):
    """By its name, or with its bytes; with what else was said of it, and under the same identity."""
    before = asked(data)
    (letter,) = failed(before, "decode", "corrupt")
    assert asked(as_message(letter)).images == before.images


def test_a_dead_letter_asks_for_the_newest_version_of_its_image():
    (letter,) = failed(notified(generation="17"), "read", "not_found")
    assert asked(as_message(letter)).images == (ImageRef("gs://photos/a/b.jpg", "", event_time=100.0, message_id="m1"),)


def test_a_message_that_was_refused_is_recognised_again_and_does_not_grow_when_it_is_refused_again(monkeypatch):
    refused = ("gs://other/",)
    for data in (b'{"uri": "gs://b/a.jpg"}', b"nonsense", b'{"bytes": "?"}'):
        letter = only_dead_letter(asked(data, refused))
        for _ in range(3):
            letter = only_dead_letter(asked(as_message(letter), refused))
            assert letter.payload == data
    first = as_message(only_dead_letter(asked(b'{"uri": "gs://b/a.jpg"}', refused)))
    assert asked(first).images == asked(b'{"uri": "gs://b/a.jpg"}').images
    three = b'["gs://b/1", "gs://b/2", "gs://b/3"]'
    with monkeypatch.context() as bounded:
        bounded.setattr(messages, "MAX_IMAGES", 2)
        too_many = as_message(only_dead_letter(asked(three)))
    assert image_count(Message(too_many)) == 3
    assert asked(too_many).images == asked(three).images


@pytest.mark.parametrize(
    ("image", "payload", "reason"),
    [
        ({}, {}, "bad_request"),
        ({"uri": "inline:a.jpg"}, {}, "bad_request"),
        ({"uri": 7}, {}, "bad_request"),
        ({"uri": "inline:a.jpg"}, {"payload_base64": "?"}, "bad_base64"),
        ({}, {"payload_base64": 7}, "bad_base64"),
        ({"uri": "/etc/passwd"}, {}, "not_allowed"),
    ],
    ids=str,
)
def test_a_dead_letter_without_an_image_that_may_be_read_is_refused(image, payload, reason):
    letter = {"image": image, "stage": "read", "reason": "not_found", "message": "no", **payload}
    assert only_dead_letter(asked(json.dumps(letter).encode())).reason == reason


@pytest.mark.parametrize(
    ("allowed", "uri", "prefix"),
    [
        (True, "gs://b/a.jpg", "gs://"),
        (True, "gs://b/a.jpg", "gs://b"),
        (True, "/data/photos/a.jpg", "/data/photos"),
        (True, "gs://b/a..b/c.jpg", "gs://b/"),
        (True, "gs://b/100%.jpg", "gs://b/"),
        (False, "/etc/passwd", "gs://"),
        (False, "FILE:///etc/passwd", "gs://"),
        (False, "GS://b/a.jpg", "gs://"),
        (False, " gs://b/a.jpg", "gs://"),
        (False, "gs:/b/a.jpg", "gs://"),
        (False, "http://gs://b/a.jpg", "gs://"),
        (False, "gs://bucket-evil/a.jpg", "gs://bucket"),
        (False, "gs://b", "gs://b"),
        (False, "gs://b/x/../secret/a.jpg", "gs://b/x/"),
        (False, "gs://b/x/%2e%2e/secret/a.jpg", "gs://b/x/"),
        (False, "gs://b/x/%252e%252e/a.jpg", "gs://b/x/"),
        (False, "/data/photos/../../etc/passwd", "/data/photos/"),
        (False, "/data/photos\\..\\x", "/data/photos\\"),
        (False, "/data/photos/a\0.jpg", "/data/photos/"),
        (False, "/data/photos/a\n.jpg", "/data/photos/"),
        (False, "/data/photos-secret/a.jpg", "/data/photos"),
        (False, "gs://b/" + "a" * 3000, "gs://"),
        (False, "/etc/passwd", ""),
    ],
)
def test_only_what_lies_under_a_prefix_is_allowed(allowed, uri, prefix):
    assert is_allowed(uri, ["gs://c/", prefix] if allowed else [prefix]) == allowed


def test_a_local_image_has_the_name_that_a_batch_job_gives_it(tmp_path):
    """So a backfill knows what a stream has done."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "link").symlink_to("photos")
    for uri in (f"{tmp_path}/photos/a.jpg", f"{tmp_path}/link/a.jpg", f"{tmp_path}//photos/./a.jpg"):
        (image,) = parse_message(Message(json.dumps({"uri": uri}).encode()), (f"{tmp_path}/",)).images
        assert image.uri == f"{tmp_path}/photos/a.jpg"


def test_an_image_that_is_refused_fails_alone_and_each_has_the_id_of_its_request():
    images = ["gs://b/a.jpg", "/etc/passwd", 3, {"uri": "gs://b/b.jpg"}, {"bytes": INLINE_BYTES}]
    request = asked(json.dumps({"request_id": "r7", "images": images}).encode())
    *named, inline = request.images
    assert [image.uri for image in named] == ["gs://b/a.jpg", "gs://b/b.jpg"]
    assert inline.content == JPEG
    assert [letter.reason for letter in request.dead_letters] == ["not_allowed", "bad_request"]
    ids = {request.request_id, inline.ref.request_id, *(each.request_id for each in named)}
    assert ids | {letter.ref.request_id for letter in request.dead_letters} == {"r7"}


def test_the_number_of_images_is_bounded():
    most = ["gs://b/1"] * messages.MAX_IMAGES
    assert len(asked(json.dumps(most).encode()).images) == len(most)
    assert only_dead_letter(asked(json.dumps([*most, "gs://b/2"]).encode())).reason == "too_many_images"


def test_the_bytes_of_inline_images_are_bounded_together(monkeypatch):
    body = json.dumps([{"bytes": INLINE_BYTES}, {"bytes": INLINE_BYTES, "name": "second"}]).encode()
    monkeypatch.setattr(messages, "MAX_INLINE_BYTES", 2 * len(JPEG))
    assert len(asked(body).images) == 2
    monkeypatch.setattr(messages, "MAX_INLINE_BYTES", 2 * len(JPEG) - 1)
    request = asked(body)
    assert len(request.images) == 1
    assert request.dead_letters[0].reason == "too_large"


def test_the_event_time_is_the_attribute_or_else_the_publish_time():
    assert asked(JPEG).images[0].ref.event_time == 100.0
    assert asked(JPEG, event_time="1970-01-01T00:01:00Z").images[0].ref.event_time == 60.0
    assert asked(JPEG, event_time="1970-01-01T01:01:00+01:00").images[0].ref.event_time == 60.0
    assert asked(JPEG, event_time="yesterday").images[0].ref.event_time == 100.0


@pytest.mark.parametrize(
    ("data", "attributes", "request_id"),
    [
        (b'{"request_id": "r", "images": []}', {}, "r"),
        (json.dumps({"request_id": "r", "images": ["gs://b/1"] * 1001}).encode(), {}, "r"),
        (b'{"request_id": "r", "images": null}', {}, "r"),
        (b'{"request_id": "r"}', {}, "r"),
        (b'{"request_id": 7, "images": []}', {}, "7"),
        (b'{"request_id": [[]], "images": []}', {"request_id": "a"}, "a"),
        (b"{", {"request_id": "a"}, "a"),
        (b"hello", {"request_id": "a"}, "a"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_request_that_cannot_be_done_is_answered_under_its_id(data, attributes, request_id):
    request = asked(data, **attributes)
    assert (request.request_id, request.wants_answer) == (request_id, True)
    assert only_dead_letter(request).ref.request_id == request_id


def test_a_local_file_lies_where_links_lead(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.jpg").write_bytes(b"key")
    (tmp_path / "photos" / "own.jpg").write_bytes(b"own")
    (tmp_path / "photos" / "link.jpg").symlink_to(tmp_path / "secret" / "key.jpg")
    (tmp_path / "photos" / "folder").symlink_to(tmp_path / "secret")
    (tmp_path / "photos" / "within.jpg").symlink_to(tmp_path / "photos" / "own.jpg")
    (tmp_path / "photos" / "round.jpg").symlink_to(tmp_path / "photos" / "round.jpg")
    (tmp_path / "mounted").symlink_to(tmp_path / "photos")
    photos, mounted = f"{tmp_path}/photos", f"{tmp_path}/mounted"
    assert not is_allowed(f"{photos}/link.jpg", [photos])
    assert not is_allowed(f"{photos}/folder/key.jpg", [photos])
    assert is_allowed(f"{photos}/link.jpg", [photos, f"{tmp_path}/secret"])
    assert is_allowed(f"{photos}/within.jpg", [photos])
    assert is_allowed(f"{photos}/own.jpg", ["gs://", photos])
    assert is_allowed(f"{mounted}/own.jpg", [mounted])
    assert not is_allowed(f"{mounted}/own.jpg", [photos])
    assert is_allowed(f"{photos}/round.jpg", [photos])  # leads nowhere, so reading it says so
    assert not is_allowed(f"{photos}/\ud800.jpg", [photos])
