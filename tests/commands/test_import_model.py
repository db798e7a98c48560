"""`detect-objects import` says what a model is, and writes it with what the loader recognises, once it has run on a picture."""

import json
import shlex

import numpy as np
import onnx
import pytest
from PIL import Image

from models.metadata import read_metadata
from pipeline.commands.import_model import main
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_model import load, name_and_version
from tests.detect.test_mixed_batches import save_yolov4
from tests.onnx_files import write_yolo
from tests.tiny_models import bright_box, save_model
from tests.without_keras import tf
from tests.yolo_exports import export_yolo

HW = (32, 64)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """A detector with the outputs of the TF Object Detection API, without metadata."""

    def predict(images):
        boxes = tf.cast(tf.gather(bright_box(images), [1, 0, 3, 2], axis=1), tf.float32)[:, None]
        ones = tf.ones(tf.shape(boxes)[:2])
        contrast = tf.cast(tf.reduce_max(images, [1, 2, 3]) > tf.reduce_min(images, [1, 2, 3]), tf.float32)
        return {
            "detection_boxes": boxes,
            "detection_scores": contrast[:, None],
            "detection_classes": ones,
            "num_detections": ones[:, 0],
        }

    return save_model(tmp_path_factory.mktemp("other") / "api", predict, tf.TensorSpec((None, *HW, 3), tf.uint8, "images"))


@pytest.fixture
def photo(tmp_path):
    pixels = np.zeros((*HW, 3), np.uint8)
    pixels[8:16, 16:48] = 255
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return str(tmp_path / "photo.png")


@pytest.mark.slow
def test_a_saved_model_becomes_one_that_describes_itself(other_model, photo, tmp_path, capfd):
    """With its class names, and with the picture as a golden image."""
    (tmp_path / "m.names").write_text("lamp\n", encoding="utf-8")
    out = tmp_path / "lamps" / "1"
    assert main([other_model, "--names", f"{tmp_path}/m.names", "--image", photo, "--output", str(out)]) == 0
    what = "api, TF Object Detection API, input 32x64 (stretch), 1 class name, suppression by the model"
    use = f"use it with python -m pipeline.run --model {tmp_path}/lamps --model-version 1"
    others = "jobs with another --model-version stay as they are, and those without one use the newest, version"
    assert capfd.readouterr().out.splitlines()[-2:] == [f"{out}: {what}; 1 object in {photo}", f"{use}; {others} 1"]
    metadata = read_metadata(str(out))
    assert metadata.class_names == ("lamp",) and metadata.class_id_offset == 1 and metadata.box_format == "yxyx"
    (row,) = (out / "assets.extra/golden/detections.jsonl").read_text(encoding="utf-8").splitlines()
    (found,) = json.loads(row)["detections"]
    assert found["class_name"] == "lamp" and found["box_xyxy"] == pytest.approx([16, 8, 48, 16])
    assert [path.name for path in (tmp_path / "lamps").iterdir()] == ["1"], "scratch files stay behind"
    assert "assets.extra/golden/detections.jsonl" in json.loads((out / "assets.extra/files.json").read_text())


@pytest.mark.slow
def test_the_last_line_has_the_command_that_uses_the_version_and_tells_which_jobs_do_not(
    other_model, tmp_path, monkeypatch, capfd
):
    """An older number is not used by a job that names none; a folder without a number has no other version."""
    monkeypatch.chdir(tmp_path)
    others = "jobs with another --model-version stay as they are, and those without one use the newest, version"
    lines = {
        "m m/2": f"--model 'm m' --model-version 2; {others} 2",
        "m m/1/": f"--model 'm m' --model-version 1; {others} 2",
        "lamp": "--model lamp; jobs with another --model stay as they are",
    }
    for output, line in lines.items():
        assert main([other_model, "--output", output]) == 0
        assert capfd.readouterr().out.splitlines()[-1] == f"use it with python -m pipeline.run {line}"
        flags = shlex.split(line.partition(";")[0])
        named = ModelConfig(path=flags[1], model_version=flags[3] if flags[3:] else None)
        assert name_and_version(named)[0] == "api"
        assert not flags[3:] or name_and_version(named)[1] == flags[3]


@pytest.mark.slow
def test_without_a_picture_of_an_object_there_is_no_golden_image(other_model, tmp_path, capfd):
    """But a warning, if there is a picture; one that cannot be read leaves nothing."""
    blank, broken = tmp_path / "blank.png", tmp_path / "photo.jpg"
    Image.new("RGB", (64, 32)).save(blank)
    broken.write_bytes(b"no photo")
    assert main([other_model, "--output", str(tmp_path / "1")]) == 0
    assert "no class names (give --names), suppression by the model; runs on a sample picture; " in capfd.readouterr().out
    assert read_metadata(str(tmp_path / "1")) and not (tmp_path / "1/assets.extra/golden").exists()
    assert main([other_model, "--image", str(blank), "--output", str(tmp_path / "2")]) == 0
    assert f"; warning: no object in {blank}" in capfd.readouterr().out
    assert main([other_model, "--image", str(broken), "--output", str(tmp_path / "m" / "3")]) == 2
    assert "photo.jpg" in capfd.readouterr().err.splitlines()[-1] and not (tmp_path / "m").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "save",
    [
        pytest.param(lambda folder: export_yolo(folder, "4+C,M"), id="Ultralytics"),
        pytest.param(lambda folder: save_yolov4(folder, 0.2), id="YOLOv4 of TensorFlow"),
    ],
)
def test_the_copy_is_loaded_as_the_model_itself_is(save, tmp_path):
    """Nothing of what the loader recognises is lost on the way through the metadata."""
    names, folder, out = tmp_path / "m.names", save(tmp_path / "given"), str(tmp_path / "m" / "1")
    names.write_text("ant\nbee\ncow\n", encoding="utf-8")
    assert main([folder, "--output", out, "--names", str(names)]) == 0
    found = []
    for model in (ModelConfig(path=folder, class_names=(str(names),)), ModelConfig(path=out)):
        loaded = load(model, DetectConfig(batch_sizes=(1,)))
        loaded.batcher.close()
        found.append(loaded.metadata)
    assert found[1] == found[0]


@pytest.mark.parametrize("file", ["toy.onnx", "cur/toy.onnx", "cur/../release/toy.onnx"])
def test_an_onnx_file_is_imported_by_any_path(file, tmp_path, monkeypatch):
    """As the help writes it: relative; also through a link to its folder. Weights beside it keep their name."""
    (tmp_path / "release").mkdir()
    (tmp_path / "cur").symlink_to("release")
    whole = onnx.load(write_yolo(tmp_path / "whole.onnx"))
    onnx.save(whole, tmp_path / "release/toy.onnx", save_as_external_data=True, location="toy.onnx.data", size_threshold=64)
    monkeypatch.chdir(tmp_path if "/" in file else tmp_path / "release")
    assert main([file, "--output", f"{tmp_path}/m/1"]) == 0
    assert {each.name for each in (tmp_path / "m/1").iterdir()} == {"model.onnx", "toy.onnx.data", "assets.extra"}
    assert read_metadata(str(tmp_path / "m/1")).name == "toy"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(lambda folder: None, "expected a SavedModel", id="an empty folder"),
        pytest.param(lambda folder: (folder / "m.pt").touch(), "yolo export", id="a PyTorch model"),
        pytest.param(lambda folder: (folder / "saved_model.pb").write_bytes(b"no"), "model ", id="a damaged one"),
    ],
)
def test_a_folder_without_a_model_is_refused_in_one_line(make, reason, tmp_path, capfd):
    folder = tmp_path / "given"
    folder.mkdir()
    make(folder)
    assert main([str(folder), "--output", str(tmp_path / "out" / "1")]) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and reason in last
    assert not (tmp_path / "out").exists()
