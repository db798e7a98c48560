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
    other = dataclasses.replace(YOLO, signature="serving_default", **conventions)
    for name, metadata in {"yolo": YOLO, "other": other}.items():
        write_metadata(str(tmp_path / name), metadata)
        assert read_metadata(str(tmp_path / name)) == metadata


def changed(**fields):
    return json.dumps(json.loads(metadata_to_json(YOLO)) | fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Invalid JSON: "),
        ("[]", "Input should be an object, got []"),
        ("{}", "name: Field required, got {}"),
        (changed(nmae="yolo"), "nmae: "),
        (changed(resize="crop"), "resize: Input should be 'stretch', 'letterbox' or 'none', got 'crop'"),
        (changed(input_hw=[416, 0]), "input_hw.1: Input should be greater than 0, got 0"),
        (changed(class_names="person"), "class_names: Input should be a valid array, got 'person'"),
        (changed(value_range=[0, True]), "value_range.1: Input should be a valid number, got True"),
        (changed(threshold_inputs=1), "threshold_inputs: Input should be a valid boolean, got 1"),
    ],
)
def test_a_file_that_is_no_metadata_is_refused_by_its_name_and_the_field(tmp_path, text, message):
    (tmp_path / "assets.extra").mkdir()
    (tmp_path / METADATA_PATH).write_text(text)
    with pytest.raises(ValueError) as caught:
        read_metadata(str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path / METADATA_PATH}: {message}") and "\n" not in str(caught.value)
