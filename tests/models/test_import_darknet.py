"""The import command: exact on real models and photos, and one clear line for every file that cannot be used."""

import contextlib
import json
import re
import shlex

import cv2
import numpy as np
import pytest

from models.export import SCORE_THRESHOLD
from models.geometry import iou_matrix
from models.import_darknet import import_darknet
from models.metadata import DetectorMetadata, read_metadata
from pipeline.commands.import_model import main
from pipeline.detect.other_formats import what_it_is
from tests.fixtures import fixtures_dir
from tests.models.darknet_cases import HEAD, STEM, by_opencv, net, random_values, write_weights

tf = pytest.importorskip("tensorflow")

CFG = STEM + HEAD


@pytest.fixture
def files(tmp_path):
    """A small model's cfg, weights and names, and the command's arguments for them."""
    (tmp_path / "small.cfg").write_text(CFG)
    write_weights(tmp_path / "small.weights", random_values(CFG))
    (tmp_path / "small.names").write_text("cat\ndog\npotted plant\n\n")
    return tmp_path


def arguments(folder, **changed):
    paths = {"cfg": "small.cfg", "weights": "small.weights", "names": "small.names", "output": "models/small/1"}
    given = {option: str(folder / name) for option, name in paths.items()} | changed
    return [part for option, value in given.items() for part in (f"--{option.replace('_', '-')}", value)]


def detected(folder, images):
    loaded = tf.saved_model.load(str(folder))  # the function alone would lose its variables
    return {name: value.numpy() for name, value in loaded.detect(images).items()}


@pytest.mark.slow
def test_a_model_that_is_imported_as_its_refusal_says_answers_as_opencv(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    command = re.search(r"detect-objects import (.*); then give", what_it_is(f"{files}/small.weights"))
    assert main(shlex.split(command[1])) == 0
    output = files / "small" / "1"
    said = "small/1: small, Darknet, 6 layers, 3,320 values, 3 classes, input 64x96 (stretch); "
    assert capsys.readouterr().out.startswith(said)
    assert read_metadata(str(output)) == DetectorMetadata("small", (64, 96), "stretch", ("cat", "dog", "potted plant"))
    image = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    found = {name: value[0] for name, value in detected(output, image[None]).items()}
    boxes, scores = by_opencv(CFG, files / "small.weights", image)
    best = scores.max(axis=1).argmax()
    assert scores[best].max() > SCORE_THRESHOLD
    np.testing.assert_allclose(found["scores"][0], scores[best].max(), atol=1e-4)
    assert found["classes"][0] == scores[best].argmax()
    np.testing.assert_allclose(found["boxes"][0], boxes[best], atol=1e-4)


@pytest.mark.slow
def test_letter_box_in_the_cfg_and_the_flags_decide_how_images_are_resized(files):
    (files / "small.cfg").write_text(CFG.replace(net(), net(extra="letter_box=1")))
    assert main(arguments(files)) == 0
    assert main(arguments(files, output=str(files / "2"), resize="stretch", input_size="32x64", name="other")) == 0
    assert read_metadata(str(files / "models" / "small" / "1")).resize == "letterbox"
    other = read_metadata(str(files / "2"))
    assert (other.resize, other.input_hw, other.name) == ("stretch", (32, 64), "other")


@pytest.mark.slow
def test_weights_that_are_no_numbers_are_imported_with_a_warning(files, capsys):
    write_weights(files / "small.weights", np.full(len(random_values(CFG)), -1.0))
    assert main(arguments(files)) == 0
    warning = capsys.readouterr().err
    assert "warning" in warning and "4 of 5 convolutions, the first on line 8 of the cfg" in warning


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("small.weights", None, "No such file or directory: "),
        ("small.weights", b"", "small.weights: expected 13,300 bytes (20 of header and the cfg's 3,320 float32 values), got 0"),
        ("small.cfg", b"[net]\xff", "small.cfg: expected text, got 0xff as byte 5\n"),
        ("small.cfg", CFG.encode() + b"[crnn]\n", "small.cfg: line 50: section [crnn] is not supported"),
        ("small.names", b"cat\ndog\n", "small.names: expected 3 names, one a line, for the cfg's classes=3, got 2"),
        ("small.names", b"cat\n\ndog\n", "small.names: line 2 is empty, expected a class name"),
        ("models/small/1", b"", "models/small/1 exists already; remove it, or choose the next version number"),
    ],
)
def test_a_file_that_cannot_be_used_gives_one_line_and_writes_nothing(files, name, content, message, capsys):
    (files / name).parent.mkdir(parents=True, exist_ok=True)
    (files / name).unlink(missing_ok=True) if content is None else (files / name).write_bytes(content)
    before = sorted(files.rglob("*"))
    assert main(arguments(files)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith("error: ") and message in err and "Traceback" not in err
    assert sorted(files.rglob("*")) == before


def test_a_cfg_and_weights_that_are_swapped_are_named_so(files, capsys):
    write_weights(files / "small.weights", np.full(len(random_values(CFG)), -1.0))  # bytes that are no text
    assert main(arguments(files, cfg=str(files / "small.weights"), weights=str(files / "small.cfg"))) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: nothing was imported: {files}/small.weights: expected text, got 0x") and err.count("\n") == 1
    assert err.endswith("; are --cfg and --weights swapped?\n") and not (files / "models").exists()


@pytest.mark.parametrize("size", ["0", "x", "32x", "32x32x32"])
def test_an_input_size_that_cannot_be_is_refused(files, size, capsys):
    with contextlib.suppress(SystemExit):  # of argparse
        assert main(arguments(files, input_size=size)) == 2
    assert re.search(r"multiples of 32|expected one number or HEIGHTxWIDTH", capsys.readouterr().err.splitlines()[-1])


MODELS = ["yolo-fastest-1.1@320", "yolo-fastest-1.1@416", "mobilenetv2-yolov3-nano-coco@320", "mobilenetv2-yolov3-nano-coco@416"]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_real_models_find_in_photos_what_opencv_finds(model, tmp_path):
    folder = fixtures_dir()
    expected = json.loads((folder / "photos_reference_opencv.json").read_text())["models"][model]
    side = expected["input"]
    cfg, weights, names = (str(folder / path) for path in (expected["cfg"], expected["weights"], "darknet/coco.names"))
    import_darknet(cfg, weights, names, str(tmp_path / "1"), input_hw=(side, side))
    class_names = read_metadata(str(tmp_path / "1")).class_names
    photos = [cv2.imread(str(folder / path), cv2.IMREAD_COLOR_RGB) for path in expected["images"]]
    batch = np.stack([cv2.resize(photo, (side, side), interpolation=cv2.INTER_LINEAR) for photo in photos])
    found = detected(tmp_path / "1", batch)
    for index, photo in enumerate(expected["images"].values()):
        wanted = photo["detections"]
        count = int(found["num_detections"][index])
        assert found["classes"][index, :count].tolist() == [each["class_id"] for each in wanted]
        np.testing.assert_allclose(found["scores"][index, :count], [each["score"] for each in wanted], atol=1e-4)
        boxes = found["boxes"][index, :count] * np.array([photo["width"], photo["height"]] * 2)
        wanted_boxes = np.array([each["box"] for each in wanted]).reshape(-1, 4)
        assert (np.diag(iou_matrix(boxes, wanted_boxes)) >= 0.99).all()
        assert [class_names[each["class_id"]] for each in wanted] == [each["name"] for each in wanted]
