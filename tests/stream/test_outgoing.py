"""The messages that a stream publishes."""

import base64
import json

import numpy as np
from msgspec.structs import replace

from pipeline.records import DeadLetter, DetectedImage, Detections, ImageRef
from pipeline.stream.outgoing import (
    MAX_MESSAGE_BYTES,
    Outcome,
    answer_message,
    dead_letter_message,
    detection_id,
    detection_message,
)


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
    images = [detected(event_time=1.0), detected(event_time=3.0, request_id="r"), detected(version="4"), detected("gs://b/b")]
    first, same, *others = (detection_message(image, 9.0).attributes["detection_id"] for image in images)
    assert first == same and len({first, *others}) == 3


def test_a_dead_letter_carries_its_payload_and_explanation_unless_pubsub_would_refuse_them():
    letter = DeadLetter(ImageRef(""), "detect", "model_failed", "no", b"hello", model_name="m", model_version="7")
    message = dead_letter_message(letter, 0.0)
    assert json.loads(message.data)["payload_base64"] == base64.b64encode(b"hello").decode()
    of_all = {"kind": "dead_letter", "stage": "detect", "reason": "model_failed"}
    assert message.attributes == of_all | {"model_name": "m", "model_version": "7"}
    endless = "x" * MAX_MESSAGE_BYTES
    message = dead_letter_message(DeadLetter(ImageRef(""), "message", "not_recognised", endless, endless.encode()), 0.0)
    assert "payload_base64" not in json.loads(message.data) and len(message.data) < 20_000
    assert message.attributes["payload"] == "left out, too large" and "model_name" not in message.attributes


def test_of_a_row_that_pubsub_would_refuse_the_detections_are_left_out():
    many = 60_000
    boxes = np.zeros((many, 4), np.float32)
    found = Detections(boxes, np.zeros(many, np.int32), np.ones(many, np.float32), ("x" * 100,) * many)
    message = detection_message(replace(detected(), detections=found), 0.0)
    without = json.loads(detection_message(detected(), 0.0).data)
    assert json.loads(message.data) == {**without, "detections": [], "detections_left_out": many}
    assert message.attributes["detections"] == "left out, too large"


def outcome(uri, failed=False):
    return Outcome(json.dumps({"image": {"uri": uri}}).encode(), failed)


def test_an_answer_has_all_rows_of_its_request():
    message = answer_message("r", [outcome("a"), outcome("b", failed=True), outcome("c")], on_time=True)
    assert json.loads(message.data) == {
        "request_id": "r",
        "complete": True,
        "results": [{"image": {"uri": "a"}}, {"image": {"uri": "c"}}],
        "failed": [{"image": {"uri": "b"}}],
    }
    assert message.attributes == {"kind": "answer", "request_id": "r", "images": "2", "failed": "1"}


def test_rows_that_pubsub_would_refuse_are_left_out():
    message = answer_message("r", [outcome("x" * 1_000_000)] * 10 + [outcome("y", failed=True)], on_time=True)
    assert len(message.data) < MAX_MESSAGE_BYTES
    expected = {"request_id": "r", "complete": True, "rows_left_out": 11, "results": [], "failed": []}
    assert (json.loads(message.data), message.attributes["images"]) == (expected, "10")


def test_what_pubsub_would_refuse_is_cut_or_replaced_in_the_attribute_alone():
    long = "gs://b/" + "ü" * 1000
    message = detection_message(detected(long), 0.0)
    assert message.attributes["image_uri"] == "gs://b/" + "ü" * 508
    assert json.loads(message.data)["image"]["uri"] == long
    for request_id, shown in (("ü" * 1024, "ü" * 512), ("\ud800", "?")):
        message = answer_message(request_id, [], on_time=True)
        assert message.attributes["request_id"] == shown
        assert json.loads(message.data)["request_id"] == request_id
