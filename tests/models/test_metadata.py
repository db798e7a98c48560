"""What a detector says of itself survives its file, and a bad file is refused with a sentence."""

import dataclasses
import json

import pytest

from models.metadata import METADATA_PATH, DetectorMetadata, metadata_to_json, read_metadata, write_metadata

YOLO = DetectorMetadata(name="yolo", input_hw=(416, 608), resize="letterbox", class_names=("person", "chaise à bascule"))


def test_metadata_read_back_equals_what_was_written(tmp_path):
    conventions = {
        "box_format": "yxyx",
        "classes_output": "",
        "class_id_offset": 1,
        "nms": "pipeline",
        "value_range": (-1.0, 1.0),
    }
    foreign = dataclasses.replace(YOLO, signature="serving_default", **conventions)
    for name, metadata in {"yolo": YOLO, "foreign": foreign}.items():
        write_metadata(str(tmp_path / name), metadata)
        assert read_metadata(str(tmp_path / name)) == metadata


def test_a_model_without_the_file_says_nothing(tmp_path):
    assert read_metadata(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Invalid JSON: "),
        ("[]", "Input should be an object, got []"),
        ("{}", "name: Field required, got {}"),
        (json.dumps(json.loads(metadata_to_json(YOLO)) | {"nmae": "yolo"}), "nmae: "),
        *(
            (json.dumps(json.loads(metadata_to_json(YOLO)) | {field: value}), f"{field}{message}")
            for field, value, message in [
                ("resize", "crop", ": Input should be 'stretch', 'letterbox' or 'none', got 'crop'"),
                ("input_hw", [416, 0], ".1: Input should be greater than 0, got 0"),
                ("class_names", "person", ": Input should be a valid array, got 'person'"),
                ("value_range", [0, True], ".1: Input should be a valid number, got True"),
                ("threshold_inputs", 1, ": Input should be a valid boolean, got 1"),
            ]
        ),
    ],
)
def test_a_file_that_is_no_metadata_is_refused_by_its_name_and_the_field(tmp_path, text, message):
    (tmp_path / "assets.extra").mkdir()
    (tmp_path / METADATA_PATH).write_text(text)
    with pytest.raises(ValueError) as caught:
        read_metadata(str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path / METADATA_PATH}: {message}") and "\n" not in str(caught.value)
