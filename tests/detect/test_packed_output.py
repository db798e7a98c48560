"""YOLO exports with one joined output are recognised without config: layout, units, and what the export says of itself."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.describe_model import describe
from pipeline.detect.families import ExportNotes, layout_of, notes_from
from pipeline.detect.load_model import load
from pipeline.detect.model_arrays import Signature, Tensor
from pipeline.errors import ModelError
from tests.detect.test_families import PICTURES
from tests.tiny_models import detected
from tests.yolo_exports import INPUT_HW, NAMES, export_yolo

SETTINGS = DetectConfig(batch_sizes=(1, 4), concurrent_batches=2)


@pytest.mark.slow
def test_what_the_export_says_of_itself_is_taken(tmp_path):
    """Class names, and a fixed batch; the folder gives the name."""
    folder = export_yolo(tmp_path / "mine_saved_model", "4+C,M", batch=2)
    loaded = load(ModelConfig(path=folder), SETTINGS)
    loaded.engine.close()
    assert (loaded.metadata.name, loaded.metadata.class_names, loaded.engine.batch_sizes) == ("mine_saved_model", NAMES, (2,))
    assert (loaded.metadata.resize, loaded.metadata.letterbox_value, loaded.metadata.value_range) == (
        "letterbox",
        114,
        (0.0, 1.0),
    )


def test_the_config_wins_over_what_is_recognised(tmp_path):
    folder = export_yolo(tmp_path / "yolo", "4+C,M")
    config = ModelConfig(path=folder, class_names=("x", "y", "z"), resize="stretch", letterbox_value=7, name="other")
    loaded = load(config, SETTINGS)
    loaded.engine.close()
    found = loaded.metadata
    assert (found.name, found.class_names, found.resize, found.letterbox_value) == ("other", ("x", "y", "z"), "stretch", 7)


@pytest.mark.slow
def test_where_the_model_suppresses_nothing_is_suppressed_here(tmp_path):
    folder = export_yolo(tmp_path / "yolo", "4+C,M")
    (image, _), counts = PICTURES[0], []
    for nms in ("pipeline", "model"):
        ((result,), _) = detected(folder, [image], SETTINGS, nms=nms)
        counts.append(len(result.detections))
    assert counts[0] < counts[1]


@pytest.mark.parametrize(
    ("sizes", "classes", "layout"),
    [
        pytest.param((84, 8400), 0, "4+C,M", id="YOLOv8"),
        pytest.param((5, 8400), 1, "4+C,M", id="YOLOv8 of one class"),
        pytest.param((6, 8400), 0, "4+C,M", id="YOLOv8 of two classes"),
        pytest.param((84, 34000), 0, "4+C,M", id="with P2"),
        pytest.param((84, 8500), 80, "4+C,M", id="with P6"),
        pytest.param((84, 2100), 80, "4+C,M", id="of other strides, with names"),
        pytest.param((84, None), 80, "4+C,M", id="any number of boxes, with names"),
        pytest.param((25200, 85), 0, "M,5+C", id="YOLOv5"),
        pytest.param((25200, 6), 0, "M,5+C", id="YOLOv5 of one class"),
        pytest.param((25200, 6), 1, "M,5+C", id="YOLOv5 of one class, with its name"),
        pytest.param((6000, 85), 0, "M,5+C", id="a tiny one"),
        pytest.param((8400, 85), 80, "M,5+C", id="one anchor, an objectness, with names"),
        pytest.param((8400, 84), 80, "M,4+C", id="YOLOv8 transposed, with names"),
        pytest.param((300, 84), 80, "M,4+C", id="the best few, with names"),
        pytest.param((300, 6), 0, "M,6", id="end to end"),
        pytest.param((300, 6), 80, "M,6", id="end to end, with names"),
        pytest.param((300, 6), 2, "M,6", id="end to end, of two classes"),
        pytest.param((None, 6), 80, "M,6", id="any number of boxes, suppressed"),
        pytest.param((8400, 85), 0, "", id="80 classes and an objectness, or 81"),
        pytest.param((8400, 6), 0, "", id="two classes, or one and an objectness"),
        pytest.param((None, 6), 0, "", id="any number of six numbers"),
        pytest.param((None, None), 80, "", id="unknown"),
        pytest.param((300, 84), 0, "", id="neither is a grid"),
        pytest.param((56, 8400), 80, "", id="too narrow for its names"),
        pytest.param((300, 57), 80, "", id="neither, with names"),
    ],
)
def test_the_layout_is_told_by_the_shape_or_asked_for(sizes, classes, layout):
    assert layout_of(sizes, (640, 640), classes) == layout


@pytest.mark.parametrize(
    ("output", "units"),
    [
        pytest.param(np.full((1, 300, 6), 0.9, np.float32), "norm", id="shares"),
        pytest.param(np.full((1, 300, 6), [30, 30, 30, 30, 0.5, 1], np.float32), "pixels", id="pixels"),
        pytest.param(
            np.concatenate([np.zeros((1, 299, 6)), np.full((1, 1, 6), 0.5)], 1).astype(np.float32), "norm", id="one box"
        ),
    ],
)
def test_units_are_measured(output, units):
    assert described([output]).box_units == units


def described(outputs, said=None, **config):
    """The metadata of a model with these constant outputs, and with these notes of an export."""
    named = {f"output_{n}": output for n, output in enumerate(outputs)}
    shapes = {name: Tensor((None, *output.shape[1:]), "float32") for name, output in named.items()}
    signature = Signature({"images": Tensor((None, *INPUT_HW, 3), "float32")}, shapes, lambda _: named)
    read_notes = ExportNotes if said is None else lambda: notes_from(said, "metadata.yaml")
    return describe(signature, None, ModelConfig(path="m", **config), "m", SETTINGS, read_notes=read_notes)


@pytest.mark.parametrize(
    ("outputs", "said", "config", "message"),
    [
        pytest.param(
            [(126, 8)], None, {}, "set model.class_names, or model.packed_layout to 4+C,M or M,4+C or M,5+C or M,6", id="two fit"
        ),
        pytest.param(
            [(300, 6)], None, {}, "so their units stay unknown; set model.box_units to norm or pixels", id="no box to measure"
        ),
        pytest.param(
            [(7, 126)],
            None,
            {"class_names": ("a", "b")},
            "but its shape alone does not tell how",
            id="names that do not fit",
        ),
        pytest.param(
            [(7, 126)],
            None,
            {"packed_layout": "M,6"},
            "expected output 'output_0' of shape (None, None, 6), by layout M,6 and any number of classes; got (None, 7, 126)",
            id="another layout in the config",
        ),
        pytest.param(
            [(7, 126)],
            {"names": ["a", "b"]},
            {"packed_layout": "4+C,M"},
            "of shape (None, 6, None), by layout 4+C,M and 2 classes; got (None, 7, 126)",
            id="another number of names",
        ),
        pytest.param([(39, 126), (24, 32, 32)], None, {}, "those of one that segments: boxes and masks", id="masks"),
        pytest.param([(39, 126)], {"task": "segment"}, {}, "metadata.yaml says its task is 'segment'", id="segmentation"),
        pytest.param([(57, 126)], {"task": "pose"}, {}, "metadata.yaml says its task is 'pose'", id="pose"),
        pytest.param([(7, 126)], ["a"], {}, "expected keys and values in metadata.yaml, got list", id="a list"),
        pytest.param([(7, 126)], {"names": {1: "a"}}, {}, "expected class names by number from 0 as names", id="names from 1"),
        pytest.param([(7, 126)], {"imgsz": [96]}, {}, "[height, width] as imgsz in metadata.yaml", id="half a size"),
    ],
)
def test_what_cannot_be_known_or_is_no_detector_is_one_clear_line(outputs, said, config, message):
    with pytest.raises(ModelError) as caught:
        described([np.zeros((1, *shape), np.float32) for shape in outputs], said, **config)
    assert str(caught.value).startswith("model m: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_metadata_file_is_one_clear_line(tmp_path):
    folder = export_yolo(tmp_path / "m", "4+C,M")
    Path(folder, "metadata.yaml").write_bytes(b"names: [\n\xff")
    with pytest.raises(ModelError, match=r"metadata\.yaml cannot be read") as caught:
        load(ModelConfig(path=folder), SETTINGS)
    assert "\n" not in str(caught.value)
