"""An int8 version is written beside the others only if it detects what float32 detects; else one line and nothing."""

import json
import re
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from pipeline.commands.quantize import head_of, main
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.golden import GOLDEN
from pipeline.detect.load_detector import load_detector
from pipeline.detect.load_model import name_and_version
from pipeline.detect.versions import locate
from pipeline.errors import ModelError
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
    return main(["--model", str(model), "--calibration", *map(str, calibration), *map(str, args)])


def convolutions(model):
    """The type of the weights of each convolution, without conversions in between, and its number of outputs."""
    found = []
    for operation in model.get_ordered_ops():
        if operation.get_type_name() in ("Convolution", "GroupConvolution"):
            node = operation.input_value(1).get_node()
            while node.get_type_name() != "Constant":
                node = node.input_value(0).get_node()
            found.append((node.get_element_type().get_type_name(), operation.get_output_partial_shape(0)[1].get_length()))
    return found


def test_an_int8_version_with_a_head_of_float32_is_a_model_of_its_own_that_a_job_must_ask_for(versions, tmp_path, capsys):
    """A photo that cannot be read is left out; a copy of one does not come to both halves."""
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no photo")
    shutil.copy(SCENES[0], tmp_path / "copy.jpg")
    given = [*SCENES, tmp_path / "copy.jpg", tmp_path / "broken.jpg"]
    assert quantize(versions, *LABELS, calibration=given) == 0
    said = capsys.readouterr()
    int8 = versions.with_name("digits-int8")
    first, last = said.out.splitlines()
    assert first.startswith(f"{int8}/1: AP50 ")
    use = f"python -m pipeline.run --model {int8} --model-version 1 --engine openvino --precision int8"
    others = "jobs with another --model-version stay as they are, and those without one use the newest, version 1"
    assert last == f"use it with {use}; {others}"
    assert f"warning: 1 photo left out, such as {tmp_path}/broken.jpg: " in said.err
    assert {path.name for path in versions.iterdir() if path.name[0] != "."} == {"1"}
    assert name_and_version(ModelConfig(str(versions))) == ("digits", "1"), "yesterday's command takes what it took"
    figures = json.loads((int8 / "1" / "assets.extra" / "openvino_int8.json").read_text())
    assert figures["photos"]["calibration"] + figures["photos"]["judged"] == len(SCENES)
    assert figures["float32_ap50"] > 90 and figures["ap50_loss"] <= 1 and figures["agreement"] > 0.9

    network = openvino.Core().read_model(int8 / "1" / "assets.extra" / "openvino_int8" / "model.xml")
    of_float = [outputs for type_, outputs in convolutions(network) if type_ == "f32"]
    assert sorted(of_float) == [4, 10], "the last one of each branch: of boxes, and of class scores"
    assert [type_ for type_, _ in convolutions(network)].count("i8") == 14
    behind = {one.get_type_name() for one in network.get_ordered_ops() if one.get_friendly_name() in head_of(network)}
    assert "Sigmoid" in behind and "FakeQuantize" not in behind

    detector = load_detector(ModelConfig(path=str(int8)), DetectConfig(engine="openvino", precision="int8"))
    try:
        assert (detector.model.metadata.name, detector.model.version) == ("digits-int8", "1")
        (found,) = detector.detect([EncodedImage(ImageRef("a"), Path(SCENES[0]).read_bytes())])
        assert len(found.detections)
    finally:
        detector.close()


def no_loss_at_all(_):
    return [*LABELS, "--max-ap-loss=-1"]


def the_bound_of_the_jobs(folder):
    (folder / "job.yaml").write_text("detect: {min_agreement: 1}")
    return ["--config", folder / "job.yaml"]


def grey_photos(folder):
    """Both networks find nothing in them, and so agree."""
    for grey in range(6):
        cv2.imwrite(str(folder / f"{grey}.png"), np.full((64, 64, 3), grey, np.uint8))
    return ["--calibration", folder / "*.png"]


def labels_of_nothing(folder):
    """Labels of which float32 finds none: it has nothing to lose."""
    truth = json.loads((SAMPLES / "ground_truth.json").read_text())
    for one in truth["annotations"]:
        one["bbox"] = [0, 0, 2, 2]
    (folder / "labels.json").write_text(json.dumps(truth))
    return ["--ground-truth", folder / "labels.json"]


def golden_image(folder):
    """One that expects something else than the model finds, at either precision."""
    golden = folder / "digits" / "1" / GOLDEN
    golden.mkdir()
    shutil.copy(SCENES[0], golden / "a.jpg")
    detections = [{"box_xyxy": [0, 0, 5, 5], "class_id": 0, "class_name": "0", "confidence": 0.9}]
    row = {"image": {"uri": "a.jpg"}, "score_threshold": 0.25, "iou_threshold": 0.45, "detections": detections}
    (golden / "detections.jsonl").write_text(json.dumps(row))
    return LABELS


@pytest.mark.parametrize(
    ("given", "code", "reason"),
    [
        (no_loss_at_all, 1, "AP50 falls by .*, --max-ap-loss is -1.0; nothing is written"),
        (the_bound_of_the_jobs, 1, "the agreement with float32 is .*, --min-agreement is 1.0; nothing is written"),
        (golden_image, 1, "its agreement with its golden images is 0.000, expected 0.9 or more.*"),
        (grey_photos, 2, "calibration: no object in the 3 photos that judge.*"),
        (labels_of_nothing, 2, "nothing is written: ground truth .*: float32 finds none of its objects in the .*"),
    ],
    ids=["AP50", "agreement", "golden images", "photos without objects", "labels of nothing"],
)
def test_a_version_that_is_too_far_or_that_nothing_judges_is_refused_in_one_line(versions, given, code, reason, capsys):
    assert quantize(versions, *given(versions.parent)) == code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert re.fullmatch(f"error: {reason}", line), line
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


def test_int8_without_its_engine_is_one_line(versions):
    with pytest.raises(
        ModelError, match="precision int8: engine tensorflow has float32 and bfloat16 on a CPU; use --engine openvino"
    ):
        load_detector(ModelConfig(path=str(versions)), DetectConfig(engine="tensorflow", precision="int8"))
