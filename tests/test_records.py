"""Records travel between processes and end as rows."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records import (
    DeadLetter,
    DetectedImage,
    Detections,
    ImageRef,
    dead_letter_row,
    detection_row,
    name_bytes,
    row_bytes,
)

REF = ImageRef("gs://b/ä \udc80.jpg", "17", 5, 12.5, "r1")
NOTHING = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.int32), np.zeros(0, np.float32), ())
TWO = Detections(
    np.array([[1.004, -2.0, 30.126, 40.0], [0, 0, 1, 1]], np.float32),
    np.array([7, 0], np.int32),
    np.array([0.987654321, 0.25], np.float32),
    ("cat", "<b>"),
)


def test_identity_names_image_and_version_not_who_asked():
    assert REF.identity == ImageRef(REF.uri, "17", extra='{"a": 1}').identity == "gs://b/ä \udc80.jpg#17"


def test_a_detection_row_is_the_output_contract():
    assert detection_row(DetectedImage(REF, 640, 480, "m", "3", TWO)) == {
        "image": {"uri": REF.uri, "generation": "17", "width": 640, "height": 480},
        "model": {"name": "m", "version": "3"},
        "detections": [
            {"box_xyxy": [1.0, -2.0, 30.13, 40.0], "class_id": 7, "class_name": "cat", "confidence": 0.98765},
            {"box_xyxy": [0.0, 0.0, 1.0, 1.0], "class_id": 0, "class_name": "<b>", "confidence": 0.25},
        ],
    }
    assert detection_row(DetectedImage(REF, 1, 1, "m", "", NOTHING))["detections"] == []


def test_a_dead_letter_row_has_only_what_is_known():
    why = {"stage": "detect", "reason": "model_failed", "message": "x"}
    assert dead_letter_row(DeadLetter(ImageRef(""), **why)) == {"image": {}, **why}
    of_model = DeadLetter(ImageRef("a"), **why, model_name="m", model_version="7")
    assert dead_letter_row(of_model) == {"image": {"uri": "a"}, "model": {"name": "m", "version": "7"}, **why}
    row = {"image": {"uri": REF.uri, "generation": "17"}, **why, "payload_base64": "AP8="}
    assert dead_letter_row(DeadLetter(REF, **why, payload=b"\x00\xff")) == row


# what a file name may hold: any text, and bytes that are no UTF-8 as Python's file functions give them
NAMES = st.one_of(
    st.text(st.characters(exclude_categories=())), st.binary().map(lambda name: name.decode("utf-8", "surrogateescape"))
)


@given(NAMES)
def test_a_row_is_one_line_of_utf8_from_which_every_name_comes_back(name):
    line = row_bytes(detection_row(DetectedImage(ImageRef(name), 1, 1, name, "", NOTHING)))
    row = json.loads(line.decode("utf-8"))
    assert b"\n" not in line
    wanted = name.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # two halves of a pair are the pair
    assert (row["image"]["uri"], row["model"]["name"]) == (wanted, wanted)


def test_a_number_that_json_cannot_say_is_null():
    boxes = np.array([[0, 1, np.inf, np.nan], [0, 0, 1, 1]], np.float32)
    found = Detections(boxes, np.zeros(2, np.int32), np.array([np.nan, 0.5], np.float32), ("a", "ä"))
    line = row_bytes(detection_row(DetectedImage(ImageRef("ä\udc80.jpg"), 1, 1, "m", "", found)))
    row = json.loads(line, parse_constant=pytest.fail)
    assert row["image"]["uri"] == "ä\udc80.jpg"
    assert [(each["box_xyxy"], each["confidence"]) for each in row["detections"]] == [
        ([0.0, 1.0, None, None], None),
        ([0.0, 0.0, 1.0, 1.0], 0.5),
    ]


@given(NAMES, NAMES)
def test_two_images_never_share_the_bytes_of_their_identity(one, other):
    assert (name_bytes(ImageRef(one).identity) == name_bytes(ImageRef(other).identity)) is (one == other)
