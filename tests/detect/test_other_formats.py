"""A model of another format is told by its name, with the command that converts it; those that run here are run."""

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from pipeline.config import ModelConfig
from pipeline.detect.load_model import name_and_version
from pipeline.detect.other_formats import what_it_is
from pipeline.detect.versions import locate
from pipeline.errors import ModelError
from tests.without_keras import tf
from tests.yolo_exports import keras_yolo

COMMANDS = {
    "m.pt": "yolo export model={}/m.pt format=saved_model",
    "m.h5": 'compile=False).export(sys.argv[2])" {}/m.h5 m/1',
    "m.keras": 'compile=False).export(sys.argv[2])" {}/m.keras m/1',
    "m.tflite": "it is a TensorFlow Lite model, of which no tool makes a SavedModel; export one from what it was made of",
    "m.weights": "detect-objects import --cfg {0}/m.cfg --weights {0}/m.weights --names CLASS_NAMES.txt --output m/1",
    "m.pb": "tf.saved_model.simple_save",
}


def refused(path):
    with pytest.raises(ModelError) as caught:
        locate(str(path))
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"model {path}: expected a SavedModel")
    return str(caught.value)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_is_told_by_its_name(name, tmp_path):
    """Nothing in it is looked at; also where it is on Cloud Storage, or in the folder that is given."""
    (tmp_path / name).write_bytes(b"")
    assert COMMANDS[name].format(tmp_path) in refused(tmp_path / name)
    assert f"{tmp_path}/{name} lies there: it is" in refused(tmp_path)
    assert COMMANDS[name].format("gs://bucket") in what_it_is(f"gs://bucket/{name}")


def test_what_nobody_knows_is_not_guessed(tmp_path):
    (tmp_path / "model").write_bytes(b"what is this?")
    assert refused(tmp_path / "model").endswith("found none; check --model")
    assert refused(tmp_path / "absent").endswith("found none; check --model")
    with pytest.raises(ModelError, match=r"^model nosuchscheme://x/y: cannot be reached: "):
        locate("nosuchscheme://x/y")


@pytest.mark.parametrize("name", ["yolov8n", "yolo11s-seg", "yolov5s"])
def test_a_name_of_ultralytics_is_no_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(name).endswith(
        f"yolo export model={name}.pt format=saved_model makes one; then give --model {name}_saved_model"
    )


def test_a_file_name_that_is_a_command_is_quoted(tmp_path):
    """What somebody copies from the line runs nothing of the file's."""
    (tmp_path / "$(touch x).h5").write_bytes(b"")
    assert f"'{tmp_path}/$(touch x).h5' '$(touch x)'/1; " in refused(tmp_path)


def test_an_onnx_file_in_a_folder_is_named(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"")
    assert f"{tmp_path}/m.onnx is an ONNX model; give --model {tmp_path}/m.onnx" in refused(tmp_path)


def test_the_path_of_the_file_in_it_means_its_folder(tmp_path, bright_model):
    """With the version that the folder says; an export's folder says where the model lies in it."""
    shutil.copytree(f"{bright_model}/3", tmp_path / "m" / "7")
    assert locate(f"{tmp_path}/m/7/saved_model.pb") == (f"{tmp_path}/m/7", "7")
    assert name_and_version(ModelConfig(path=f"{tmp_path}/m/7/saved_model.pb"))[1] == "7"
    (tmp_path / "exported").mkdir()
    (tmp_path / "m" / "7").rename(tmp_path / "exported" / "saved_model")
    assert refused(tmp_path / "exported").endswith(f"give --model {tmp_path}/exported/saved_model")


def test_the_path_of_the_file_means_its_folder_in_the_current_one(bright_model, monkeypatch):
    monkeypatch.chdir(f"{bright_model}/3")
    assert locate("saved_model.pb") == (f"{bright_model}/3", "3")


def frozen_graph(path):
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    names = {"detection_boxes": (1, 5, 4), "detection_scores": (1, 5), "detection_classes": (1, 5), "num_detections": (1,)}

    def predict(image_tensor):
        nothing = tf.cast(tf.reduce_sum(image_tensor), tf.float32) * 0
        return [tf.add(tf.zeros(shape), nothing, name=name) for name, shape in names.items()]

    made = tf.function(predict).get_concrete_function(tf.TensorSpec((None, None, None, 3), tf.uint8, "image_tensor"))
    path.write_bytes(convert_variables_to_constants_v2(made).graph.as_graph_def().SerializeToString())


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param("m o.keras", lambda path: keras_yolo().save(path), id="Keras"),
        pytest.param("m o.pb", frozen_graph, id="frozen", marks=pytest.mark.matrix),
    ],
)
def test_the_command_makes_a_saved_model(name, make, tmp_path):
    """As it is printed, in a shell; the folder that it names is one."""
    make(tmp_path / name)
    command = re.fullmatch(r".*this makes one of it: (.*?)(?: \(with .*)?; then give --model '(.*)'", refused(tmp_path / name))
    environment = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command[1], shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert locate(str(tmp_path / command[2])) == (f"{tmp_path}/{command[2]}/1", "1")

    loaded = tf.saved_model.load(str(tmp_path / command[2] / "1")).signatures["serving_default"]
    assert isinstance(loaded.structured_outputs, dict) and np.size(list(loaded.structured_outputs)) >= 1
