"""What a detector says of itself survives its file, and a bad file is refused with a sentence."""

import dataclasses
import json

import pytest

from models.metadata import METADATA_PATH, DetectorMetadata, metadata_from_json, metadata_to_json, read_metadata, write_metadata

YOLO = DetectorMetadata(name="yolo", input_hw=(416, 608), resize="letterbox", class_names=("person", "chaise à bascule"))


def test_metadata_read_back_equals_what_was_written(tmp_path):
    foreign = dataclasses.replace(
        YOLO,
        signature="serving_default",
        box_format="yxyx",
        classes_output="",
        class_id_offset=1,
        nms="pipeline",
        value_range=(-1.0, 1.0),
    )
    for name, metadata in {"yolo": YOLO, "foreign": foreign}.items():
        write_metadata(str(tmp_path / name), metadata)
        assert read_metadata(str(tmp_path / name)) == metadata


def test_a_model_without_the_file_says_nothing(tmp_path):
    assert read_metadata(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("[]", "expected a JSON object, got a list"),
        ("{}", "key 'name' is missing"),
        ('{"nmae": "yolo"}', "unknown key 'nmae'"),
    ],
)
def test_a_file_that_is_no_metadata_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "assets.extra").mkdir()
    (tmp_path / METADATA_PATH).write_text(text)
    with pytest.raises(ValueError) as caught:
        read_metadata(str(tmp_path))
    assert str(caught.value) == f"{tmp_path / METADATA_PATH}: {message}"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("resize", "crop", "resize must be one of stretch, letterbox, none, not 'crop'"),
        ("box_format", "yx", "box_format must be one of xyxy, yxyx, xywh, cxcywh, grid, not 'yx'"),
        ("input_hw", [416], "input_hw must be two positive integers, not (416,)"),
        ("input_hw", [416, 0], "input_hw must be two positive integers, not (416, 0)"),
        ("class_names", "person", "class_names must be a list of names, not 'person'"),
        ("value_range", [0, True], "value_range must be two numbers, not (0, True)"),
        ("letterbox_value", 256, "letterbox_value must be an integer in 0..255, not 256"),
        ("name", "", "name must be a non-empty text, not ''"),
        ("threshold_inputs", 1, "threshold_inputs must be true or false, not 1"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_its_field(field, value, message):
    values = json.loads(metadata_to_json(YOLO)) | {field: value}
    with pytest.raises(ValueError) as caught:
        metadata_from_json(json.dumps(values))
    assert str(caught.value) == message
