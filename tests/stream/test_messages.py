"""What messages ask for, and the messages that answer."""

import base64
import json

import pytest

from pipeline.failures import Failure
from pipeline.listing.allowed import is_allowed
from pipeline.records import EncodedImage, ImageRef
from pipeline.stream import messages
from pipeline.stream.messages import Message, image_count, parse_message
from pipeline.stream.outgoing import dead_letter_message

JPEG = b"\xff\xd8\xff\xe0 not really"
INLINE_BYTES = base64.b64encode(JPEG).decode()
ALLOWED = ("gs://",)
NOTIFIED = {"eventType": "OBJECT_FINALIZE", "bucketId": "photos", "objectId": "a.jpg", "objectGeneration": "17"}


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
    ("payload", "size"),
    [({"size": "1234"}, 1234), ({"size": 1234}, 0), ({"size": "-1"}, 0), ({"size": "9" * 20}, 0), (["size"], 0), ({}, 0)],
)
def test_a_storage_notification_may_tell_the_size_of_its_object(payload, size):
    message = Message(json.dumps(payload).encode() if payload else b"no JSON", NOTIFIED)
    (image,) = parse_message(message, ALLOWED).images
    assert (image.size_bytes, image.extra) == (size, "")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        pytest.param({"uri": "gs://b/a", "name": "n", "generation": "1", "request_id": "r"}, [{}], id="only what is ours"),
        pytest.param({"bytes": INLINE_BYTES, "camera": 7}, [{"camera": 7}], id="of an inline image"),
        pytest.param({"uri": "gs://b/a", "extra": {"camera": 7}, "label": "x"}, [{"camera": 7, "label": "x"}], id="as in rows"),
        pytest.param(
            {"request_id": "r", "camera": 7, "images": ["gs://b/a", {"uri": "gs://b/b", "camera": 8}, {"bytes": INLINE_BYTES}]},
            [{"camera": 7}, {"camera": 8}, {"camera": 7}],
            id="of all images",
        ),
        pytest.param({"images": ["gs://b/a"], "a\ud800": float("nan")}, [{"a\ud800": None}], id="no Unicode, no number"),
    ],
)
def test_other_fields_of_a_message_travel_with_its_images(message, said):
    images = asked(json.dumps(message).encode()).images
    refs = [image.ref if isinstance(image, EncodedImage) else image for image in images]
    assert [json.loads(ref.extra or "{}") for ref in refs] == said


@pytest.mark.parametrize("event", ["OBJECT_DELETE", "NEW_KIND"])
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
    [(JPEG, {}), (b"RIFF1234WEBPrest", {}), (b"???", {"content-type": "image/x-new"}), (b"???", {"Content_Type": "IMAGE/JPEG"})],
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
        (b"\x00hello", "not_recognised"),
        (b"{", "bad_json"),
        (b"[" * 100_000, "bad_json"),
        (b'{"images": 3}', "bad_request"),
        (b'{"images": []}', "no_images"),
        (b"{}", "bad_request"),
        (b'{"uri": 3}', "bad_request"),
        (b'{"bytes": "?"}', "bad_base64"),
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_a_dead_letter_with_the_message_as_payload(data, reason):
    letter = only_dead_letter(asked(data))
    assert letter.reason == reason
    assert letter.payload == data


def as_message(letter):
    return dead_letter_message(letter, 0.0).data


def failed(image):
    """The dead letter of an image, as a later step makes it."""
    ref, payload = (image, b"") if isinstance(image, ImageRef) else (image.ref, image.content)
    return Failure("decode", "corrupt", "no").dead_letter(ref, payload)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b'{"uri": "gs://b/a.jpg", "camera": 7}', id="a named image"),
        pytest.param(json.dumps({"bytes": INLINE_BYTES, "name": "x.jpg", "label": "cat"}).encode(), id="an inline image"),
        pytest.param(JPEG, id="bytes alone"),
    ],
)
def test_a_dead_letter_as_a_message_asks_for_its_image_again(data):
    """By its name, or with its bytes; with its other fields, and under the same identity."""
    (before,) = asked(data).images
    assert asked(as_message(failed(before))).images == (before,)


def test_a_dead_letter_asks_for_the_newest_version_of_its_image():
    (image,) = notified(generation="17").images
    assert asked(as_message(failed(image))).images == (ImageRef("gs://photos/a/b.jpg", "", event_time=100.0, message_id="m1"),)


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
        ({"uri": "inline:a.jpg"}, {}, "bad_request"),
        ({"uri": "inline:a.jpg"}, {"payload_base64": "?"}, "bad_base64"),
        ({}, {"payload_base64": 7}, "bad_base64"),
        ({"uri": "/etc/passwd"}, {}, "not_allowed"),
    ],
    ids=str,
)
def test_a_dead_letter_without_an_image_that_may_be_read_is_refused(image, payload, reason):
    letter = {"image": image, "stage": "read", "reason": "not_found", "message": "no", **payload}
    assert only_dead_letter(asked(json.dumps(letter).encode())).reason == reason


MAY_BE_READ = [
    ("gs://", ["gs://b/a.jpg"]),
    ("gs://b", ["gs://b/a.jpg"]),
    ("gs://b/", ["gs://b/a..b/c.jpg", "gs://b/100%.jpg"]),
    ("/data/photos", ["/data/photos/a.jpg"]),
]
REFUSED = [
    ("gs://", ["/etc/passwd", "FILE:///etc/passwd", "GS://b/a.jpg", " gs://b/a.jpg", "gs:/b/a.jpg", "http://gs://b/a.jpg"]),
    ("gs://", ["gs://b/" + "a" * 3000]),
    ("gs://bucket", ["gs://bucket", "gs://bucket-evil/a.jpg"]),
    ("gs://b/x/", [f"gs://b/x/{up}/secret/a.jpg" for up in ("..", "%2e%2e", "%252e%252e")]),
    ("/data/photos", ["/data/photos-secret/a.jpg", "/data/photos/../../etc/passwd", "/data/photos/a\0.jpg"]),
    ("/data/photos\\", ["/data/photos\\..\\x"]),
    ("", ["/etc/passwd"]),
]


def test_only_what_lies_under_a_prefix_is_allowed():
    assert [uri for prefix, uris in MAY_BE_READ for uri in uris if not is_allowed(uri, ["gs://c/", prefix])] == []
    assert [uri for prefix, uris in REFUSED for uri in uris if is_allowed(uri, [prefix])] == []


def test_a_local_image_has_the_name_that_a_batch_job_gives_it(tmp_path):
    """So a backfill knows what a stream has done."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "link").symlink_to("photos")
    uris = [f"{tmp_path}/photos/a.jpg", f"{tmp_path}/link/a.jpg", f"{tmp_path}//photos/./a.jpg"]
    images = asked(json.dumps(uris).encode(), (f"{tmp_path}/",)).images
    assert [image.uri for image in images] == [f"{tmp_path}/photos/a.jpg"] * 3


@pytest.mark.parametrize("uri", ["gs://b/a\tb.jpg", "/in/a\nb.jpg", "file:///in/a%0Ab.jpg", "gs://b/\x7f.tar#c.jpg"])
def test_an_image_whose_name_has_control_characters_fails_as_in_batch(uri):
    request = asked(json.dumps({"uri": uri, "generation": "7"}).encode(), ("gs://b/", "/in/", "file:///in/"))
    (letter,) = request.dead_letters
    assert (letter.stage, letter.reason, letter.ref.uri) == ("read", "bad_name", uri.replace("file://", "").replace("%0A", "\n"))
    assert (request.images, letter.ref.generation, letter.payload) == ((), "7", b"")
    assert asked(json.dumps({"uri": "gs://b/a%0Ab.jpg"}).encode()).images[0].uri == "gs://b/a%0Ab.jpg", "as it is called"


def test_an_image_that_is_refused_fails_alone_and_each_has_the_id_of_its_request():
    images = ["gs://b/a.jpg", "/etc/passwd", 3, {"uri": "gs://b/b.jpg"}, {"bytes": INLINE_BYTES}]
    request = asked(json.dumps({"request_id": "r7", "images": images}).encode())
    first, second, inline = request.images
    assert (first.uri, second.uri, inline.content) == ("gs://b/a.jpg", "gs://b/b.jpg", JPEG)
    assert [letter.reason for letter in request.dead_letters] == ["not_allowed", "bad_request"]
    refs = [first, second, inline.ref, *(letter.ref for letter in request.dead_letters)]
    assert {ref.request_id for ref in refs} == {request.request_id} == {"r7"}


def test_the_number_of_images_and_their_inline_bytes_together_are_bounded(monkeypatch):
    most = ["gs://b/1"] * messages.MAX_IMAGES
    assert len(asked(json.dumps(most).encode()).images) == len(most)
    assert only_dead_letter(asked(json.dumps([*most, "gs://b/2"]).encode())).reason == "too_many_images"
    body = json.dumps([{"bytes": INLINE_BYTES}, {"bytes": INLINE_BYTES, "name": "second"}]).encode()
    monkeypatch.setattr(messages, "MAX_INLINE_BYTES", 2 * len(JPEG))
    assert len(asked(body).images) == 2
    monkeypatch.setattr(messages, "MAX_INLINE_BYTES", 2 * len(JPEG) - 1)
    request = asked(body)
    assert (len(request.images), request.dead_letters[0].reason) == (1, "too_large")


def test_the_event_time_is_the_attribute_or_else_the_publish_time():
    expected = {
        **{"1970-01-01T00:01:00Z": 60.0, "1970-01-01T01:01:00+01:00": 60.0, "1970-01-01T00:01:00.25Z": 60.25},
        **{"1970-01-02": 86400.0, "1970-01-01T00:01": 60.0, "": 100.0, "yesterday": 100.0},
    }
    assert {text: asked(JPEG, event_time=text).images[0].ref.event_time for text in expected} == expected


@pytest.mark.parametrize(
    ("data", "attributes", "request_id"),
    [
        (b'{"request_id": "r"}', {}, "r"),
        (b'{"request_id": 7, "images": []}', {}, "7"),
        (b'{"request_id": [[]], "images": []}', {"request_id": "a"}, "a"),
        (b"{", {"request_id": "a"}, "a"),
    ],
)
def test_a_request_that_cannot_be_done_is_answered_under_its_id(data, attributes, request_id):
    request = asked(data, **attributes)
    assert (request.request_id, only_dead_letter(request).ref.request_id, request.wants_answer) == (request_id, request_id, True)


@pytest.mark.parametrize(
    ("allowed", "name", "folders"),
    [
        (True, "photos/own.jpg", ["photos"]),
        (True, "photos/within.jpg", ["photos"]),
        (False, "photos/link.jpg", ["photos"]),
        (True, "photos/link.jpg", ["photos", "secret"]),
        (False, "photos/folder/key.jpg", ["photos"]),
        (True, "mounted/own.jpg", ["mounted"]),
        (False, "mounted/own.jpg", ["photos"]),
        (True, "photos/round.jpg", ["photos"]),  # leads nowhere, so reading it fails
        (False, "photos/\ud800.jpg", ["photos"]),
    ],
    ids=ascii,
)
def test_a_local_file_lies_where_links_lead(tmp_path, allowed, name, folders):
    for path in ("secret/key.jpg", "photos/own.jpg"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).touch()
    links = {"photos/link.jpg": "secret/key.jpg", "photos/within.jpg": "photos/own.jpg", "photos/round.jpg": "photos/round.jpg"}
    for link, target in (links | {"photos/folder": "secret", "mounted": "photos"}).items():
        (tmp_path / link).symlink_to(tmp_path / target)
    assert is_allowed(f"{tmp_path}/{name}", [f"{tmp_path}/{folder}" for folder in folders]) == allowed
