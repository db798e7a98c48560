"""Models of others are recognised without config by the shapes of their outputs, by numbers in them, and by an export's notes."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.describe_model import describe
from pipeline.detect.families import ExportNotes, layout_of, notes_from
from pipeline.detect.load_model import load
from pipeline.detect.model_arrays import Signature, Tensor
from pipeline.errors import ModelError
from tests.onnx_files import HW, NAMES
from tests.yolo_exports import export_yolo

SETTINGS = DetectConfig(batch_sizes=(1, 4), concurrent_batches=2)


def outputs_of(*shapes, value=0.0, names=("output_0", "output_1")):
    """Outputs of these shapes for one image, all of one value."""
    return {name: np.full((1, *shape), value, np.float32) for name, shape in zip(names, shapes, strict=False)}


def described(outputs, notes=None, input_hw=HW, detect=SETTINGS, **config):
    """The metadata of a model with these constant outputs, and with these notes of an export."""
    shapes = {name: Tensor((None, *output.shape[1:]), "float32") for name, output in outputs.items()}
    signature = Signature({"images": Tensor((None, *input_hw, 3), "float32")}, shapes, lambda _: outputs)
    read_notes = ExportNotes if notes is None else lambda: notes_from(notes, "metadata.yaml")
    return describe(signature, None, ModelConfig(path="m", **config), "m", detect, read_notes=read_notes)


@pytest.mark.slow
def test_what_an_export_says_of_itself_is_taken(tmp_path):
    """Class names, and a fixed batch; the folder gives the name."""
    loaded = load(ModelConfig(path=export_yolo(tmp_path / "mine_saved_model", "4+C,M", batch=2)), SETTINGS)
    loaded.batcher.close()
    assert (loaded.metadata.name, loaded.metadata.class_names, loaded.batcher.batch_sizes) == ("mine_saved_model", NAMES, (2,))


def test_the_config_wins_over_what_is_recognised():
    config = {"class_names": ("x", "y", "z"), "resize": "stretch", "letterbox_value": 7, "name": "other", "nms": "model"}
    found = described(outputs_of((7, 126), value=0.5), {"names": NAMES}, **config)
    assert {name: getattr(found, name) for name in config} == config


@pytest.mark.parametrize(
    ("sizes", "classes", "layout"),
    [
        pytest.param((84, 8400), 0, "4+C,M", id="YOLOv8"),
        pytest.param((5, 8400), 1, "4+C,M", id="YOLOv8 of one class"),
        pytest.param((6, 8400), 0, "4+C,M", id="YOLOv8 of two classes"),
        pytest.param((84, 8500), 80, "4+C,M", id="with P6"),
        pytest.param((84, 2100), 80, "4+C,M", id="of other strides, with names"),
        pytest.param((84, None), 80, "4+C,M", id="any number of boxes, with names"),
        pytest.param((25200, 85), 0, "M,5+C", id="YOLOv5"),
        pytest.param((25200, 6), 0, "M,5+C", id="YOLOv5 of one class"),
        pytest.param((25200, 6), 1, "M,5+C", id="YOLOv5 of one class, with its name"),
        pytest.param((8400, 85), 80, "M,5+C", id="one anchor, an objectness, with names"),
        pytest.param((8400, 84), 80, "M,4+C", id="YOLOv8 transposed, with names"),
        pytest.param((300, 84), 80, "M,4+C", id="the best few, with names"),
        pytest.param((300, 6), 0, "M,6", id="end to end"),
        pytest.param((300, 6), 2, "M,6", id="end to end, of two classes"),
        pytest.param((None, 6), 80, "M,6", id="any number of boxes, suppressed"),
        pytest.param((8400, 85), 0, "", id="80 classes and an objectness, or 81"),
        pytest.param((8400, 6), 0, "", id="two classes, or one and an objectness"),
        pytest.param((None, 6), 0, "", id="any number of six numbers"),
        pytest.param((None, None), 80, "", id="unknown"),
        pytest.param((300, 84), 0, "", id="neither is a grid"),
        pytest.param((56, 8400), 80, "", id="too narrow for its names"),
    ],
)
def test_the_layout_is_told_by_the_shape_or_asked_for(sizes, classes, layout):
    assert layout_of(sizes, (640, 640), classes) == layout


@pytest.mark.parametrize(
    ("rows", "units"),
    [
        pytest.param([[0.9] * 6] * 300, "norm", id="shares"),
        pytest.param([[30, 30, 30, 30, 0.5, 1]] * 300, "pixels", id="pixels"),
        pytest.param([*[[0] * 6] * 299, [0.5] * 6], "norm", id="one box"),
    ],
)
def test_units_are_measured(rows, units):
    assert described({"output_0": np.array([rows], np.float32)}).box_units == units


DETR = ("logits", "pred_boxes")
CHOSEN = ("boxes", "scores", "classes")
SEVERAL = {"detect": DetectConfig(labels_per_box="several")}
NO_CONFIDENCES = "masks, key points and angles are not supported; if they are logits, set model.score_activation"
OTHER_LAYOUT = "of shape (None, None, 6), by layout M,6 and any number of classes; got (None, 7, 126)"
OTHER_NUMBER = "of shape (None, 6, None), by layout 4+C,M and 2 classes; got (None, 7, 126)"
NO_DETECTORS = {
    "two layouts fit, as of YOLOX without names": (
        outputs_of((126, 8)),
        {},
        "set model.class_names, or model.packed_layout to 4+C,M",
    ),
    "no box to measure": (outputs_of((300, 6)), {}, "so their units stay unknown; set model.box_units to norm or pixels"),
    "names that do not fit": (outputs_of((7, 126)), {"class_names": ("a", "b")}, "but its shape alone does not tell how"),
    "another layout in the config": (outputs_of((7, 126)), {"packed_layout": "M,6"}, OTHER_LAYOUT),
    "another number of names": (outputs_of((7, 126)), {"notes": {"names": ["a", "b"]}, "packed_layout": "4+C,M"}, OTHER_NUMBER),
    "key points": (outputs_of((56, 126), value=90), {}, NO_CONFIDENCES),
    "angles or logits": (outputs_of((8, 126), value=-0.7), {}, NO_CONFIDENCES),
    "YOLO-NAS without corners": (outputs_of((126, 4), (126, 3)), {}, "set model.box_format, model.box_units"),
    "unknown DETR": (outputs_of((100, 7), (100, 4), names=DETR), {}, "set model.score_activation and model.norm"),
    "DETR of other names": (outputs_of((300, 7), (300, 4), names=DETR), {"class_names": NAMES}, "set model.score_activation"),
    "DETR of any size": (outputs_of((100, 92), (100, 4), names=DETR), {"input_hw": (None, None)}, "set model.input_hw"),
    "several labels of a model that has chosen one": (
        outputs_of((1, 4), (1,), (1,), names=CHOSEN),
        SEVERAL,
        "one class for each box",
    ),
    "masks": (outputs_of((39, 126), (24, 32, 32)), {}, "those of one that segments: boxes and masks"),
    "pose": (outputs_of((57, 126)), {"notes": {"task": "pose"}}, "metadata.yaml says its task is 'pose'"),
    "a list": (outputs_of((7, 126)), {"notes": ["a"]}, "expected keys and values in metadata.yaml, got list"),
    "names from 1": (outputs_of((7, 126)), {"notes": {"names": {1: "a"}}}, "expected class names by number from 0 as names"),
    "half a size": (outputs_of((7, 126)), {"notes": {"imgsz": [96]}}, "[height, width] as imgsz in metadata.yaml"),
}


@pytest.mark.parametrize(("outputs", "how", "message"), NO_DETECTORS.values(), ids=NO_DETECTORS)
def test_what_cannot_be_known_or_is_no_detector_is_one_clear_line(outputs, how, message):
    """Never detections of nothing, or of something else."""
    with pytest.raises(ModelError) as caught:
        described(outputs, **how)
    assert str(caught.value).startswith("model m: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_metadata_file_is_one_clear_line(tmp_path):
    folder = export_yolo(tmp_path / "m", "4+C,M")
    Path(folder, "metadata.yaml").write_bytes(b"names: [\n\xff")
    with pytest.raises(ModelError, match=r"metadata\.yaml cannot be read") as caught:
        load(ModelConfig(path=folder), SETTINGS)
    assert "\n" not in str(caught.value)
