"""An int8 version is written beside the others only if it detects what float32 detects; else one line and nothing."""

import json
import re
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.golden import GOLDEN
from pipeline.detect.load_detector import load_detector
from pipeline.detect.versions import locate
from pipeline.errors import ModelError
from pipeline.quantize import head_of, main
from pipeline.records import EncodedImage, ImageRef
from tests.conftest import REPO

openvino = pytest.importorskip("openvino", reason="the extra openvino is not installed")
pytest.importorskip("nncf", reason="the extra quantize is not installed")

SAMPLES = REPO / "models" / "digits" / "samples"
SCENES = sorted(map(str, SAMPLES.glob("*.jpg")))
LABELS = ["--ground-truth", str(SAMPLES / "ground_truth.json")]


@pytest.fixture
def versions(tmp_path):
    """A folder with version 1 of the bundled detector."""
    shutil.copytree(locate("digits", None)[0], tmp_path / "digits" / "1")
    return tmp_path / "digits"


def quantize(model, *args, calibration=SCENES):
    return main(["--model", str(model), "--calibration", *map(str, calibration), *args])


def graph(version):
    return openvino.Core().read_model(version / "assets.extra" / "openvino_int8" / "model.xml")


def weight_types(model):
    """Types of the weights of each convolution by its name, without conversions in between."""
    found = {}
    for operation in model.get_ordered_ops():
        if operation.get_type_name() in ("Convolution", "GroupConvolution"):
            node = operation.input_value(1).get_node()
            while node.get_type_name() != "Constant":
                node = node.input_value(0).get_node()
            found[operation.get_friendly_name()] = node.get_element_type().get_type_name()
    return found


@pytest.mark.slow
def test_an_int8_version_is_written_beside_the_others_and_a_job_uses_it(versions, tmp_path, capsys):
    """A photo that cannot be read is left out; a copy of one does not come to both halves."""
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no photo")
    shutil.copy(SCENES[0], tmp_path / "copy.jpg")
    given = [*SCENES, tmp_path / "copy.jpg", tmp_path / "broken.jpg"]
    assert quantize(versions, *LABELS, calibration=given) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{versions}/2: AP50 ") and said.out.count("\n") == 1
    assert f"warning: 1 photos are left out, such as {tmp_path}/broken.jpg: " in said.err
    assert {path.name for path in versions.iterdir()} == {"1", "2"}
    figures = json.loads((versions / "2" / "assets.extra" / "openvino_int8.json").read_text())
    assert figures["photos"]["calibration"] + figures["photos"]["judged"] == len(SCENES)
    assert figures["float32_ap50"] > 90 and figures["ap50_loss"] <= 1 and figures["agreement"] > 0.9

    model = graph(versions / "2")
    kept, types = head_of(model), weight_types(model)
    assert {type_ for name, type_ in types.items() if name in kept} == {"f32"}
    assert {type_ for name, type_ in types.items() if name not in kept} == {"i8"}

    detector = load_detector(ModelConfig(path=str(versions)), DetectConfig(engine="openvino", precision="int8"))
    try:
        assert detector.model.version == "2"
        (found,) = detector.detect([EncodedImage(ImageRef("a"), Path(SCENES[0]).read_bytes())])
        assert len(found.detections)
    finally:
        detector.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "reason"),
    [
        pytest.param([*LABELS, "--max-ap-loss=-1"], r"AP50 falls by -?\d\.\d\d points, --max-ap-loss is -1.0", id="labels"),
        pytest.param(["--config={here}/job.yaml"], r"the agreement .* is \d\.\d{3}, --min-agreement is 1.0", id="of the jobs"),
    ],
)
def test_a_version_beyond_the_bound_is_refused_in_one_line(versions, args, reason, capsys):
    (versions.parent / "job.yaml").write_text("detect: {min_agreement: 1}")
    assert quantize(versions, *(arg.format(here=versions.parent) for arg in args)) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == 1 and re.fullmatch(f"error: {reason}; nothing is written", errors[0])
    assert [path.name for path in versions.iterdir()] == ["1"]


@pytest.mark.slow
def test_photos_without_an_object_show_nothing(versions, tmp_path, capsys):
    """Both networks find nothing in them, and so agree."""
    for grey in range(6):
        cv2.imwrite(str(tmp_path / f"{grey}.png"), np.full((64, 64, 3), grey, np.uint8))
    assert quantize(versions, calibration=[tmp_path / "*.png"]) == 2
    assert "error: calibration: no object in the 3 photos that judge" in capsys.readouterr().err
    assert [path.name for path in versions.iterdir()] == ["1"]


@pytest.mark.slow
def test_labels_of_which_float32_finds_none_show_nothing(versions, tmp_path, capsys):
    """It has nothing to lose."""
    truth = json.loads((SAMPLES / "ground_truth.json").read_text())
    for one in truth["annotations"]:
        one["bbox"] = [0, 0, 2, 2]
    (tmp_path / "labels.json").write_text(json.dumps(truth))
    assert quantize(versions, f"--ground-truth={tmp_path}/labels.json") == 2
    assert "float32 finds none of its objects in the" in capsys.readouterr().err


@pytest.mark.slow
def test_a_version_that_jobs_would_refuse_for_its_golden_images_is_not_written(versions, capsys):
    """Here they expect something else than it finds, at either precision."""
    golden = versions / "1" / GOLDEN
    golden.mkdir()
    shutil.copy(SCENES[0], golden / "a.jpg")
    detections = [{"box_xyxy": [0, 0, 5, 5], "class_id": 0, "class_name": "0", "confidence": 0.9}]
    row = {"image": {"uri": "a.jpg"}, "score_threshold": 0.25, "iou_threshold": 0.45, "detections": detections}
    (golden / "detections.jsonl").write_text(json.dumps(row))
    assert quantize(versions, *LABELS) == 1
    assert "error: its agreement with its golden images is 0.000, expected 0.9 or more" in capsys.readouterr().err
    assert [path.name for path in versions.iterdir()] == ["1"]


@pytest.mark.parametrize(
    ("model", "calibration", "args", "error"),
    [
        pytest.param("{here}/digits", SCENES[:3], [], "calibration: expected at least 4 different photos, .* got 3", id="few"),
        pytest.param("{here}/digits", [SCENES[0]] * 9, [], "calibration: expected at least 4 .* got 1", id="copies"),
        pytest.param("{here}/digits", ["{here}/none"], [], "input .*/none: no file matches; .*", id="no photos"),
        pytest.param("{here}/none", SCENES, [], "model .*/none: expected a SavedModel .*", id="no model"),
        pytest.param("digits", SCENES, [], "model .*: expected a numbered version .*, or --output .*", id="bundled"),
        pytest.param("{here}/digits", SCENES, ["--output={here}/digits/1"], ".*/digits/1 exists already; .*", id="taken"),
        pytest.param("{here}/digits", SCENES, ["--ground-truth={here}/none.json"], "ground truth .*none.json .*", id="no labels"),
    ],
)
def test_what_cannot_be_used_is_one_line_before_any_work(versions, model, calibration, args, error, capsys):
    here = versions.parent
    named = [str(each).format(here=here) for each in calibration]
    assert quantize(model.format(here=here), *(arg.format(here=here) for arg in args), calibration=named) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"error: (nothing is written: )?{error}", line), line
    assert [path.name for path in versions.iterdir()] == ["1"]


@pytest.mark.parametrize(
    ("engine", "error"),
    [
        ("tensorflow", "precision int8: expected --engine openvino, got tensorflow"),
        ("openvino", "model .*/1: has no int8 network"),
    ],
)
def test_int8_without_its_engine_or_its_network_is_one_line(versions, engine, error):
    with pytest.raises(ModelError, match=error):
        load_detector(ModelConfig(path=str(versions)), DetectConfig(engine=engine, precision="int8"))


def toy(*branches):
    """A body of two convolutions; each branch has some more, one behind the other, then a sigmoid."""
    from openvino import opset13 as ops

    def convolution(value, name):
        kernel = np.ones((3, 3, 1, 1), np.float32)
        made = ops.convolution(value, kernel, [1, 1], [0, 0], [0, 0], [1, 1], name=name)
        made.set_friendly_name(name)
        return made

    images = ops.parameter([1, 3, 8, 8], np.float32, name="images")
    body = convolution(ops.relu(convolution(images, "body0")), "body1")
    ends = []
    for branch, count in enumerate(branches):
        end = body
        for number in range(count):
            end = convolution(end, f"branch{branch}.{number}")
        end = ops.sigmoid(end)
        end.set_friendly_name(f"end{branch}")
        ends.append(ops.result(end))
    return openvino.Model(ends, [images], "toy")


@pytest.mark.parametrize(
    ("branches", "head"),
    [
        pytest.param([1], {"branch0.0", "end0"}, id="one output"),
        pytest.param([2, 1], {"branch0.1", "end0", "branch1.0", "end1"}, id="two scales"),
        pytest.param([0], {"body1", "end0"}, id="the body's last"),
    ],
)
def test_the_head_begins_at_the_last_convolution_of_each_branch(branches, head):
    assert {name for name in head_of(toy(*branches)) if not name.startswith("Result")} == head
