"""ONNX models become SavedModels that answer as ONNX Runtime does, or one line; their converter has an environment of its own."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from models.darknet.cfg import DarknetError
from models.import_onnx import import_onnx, tolerances
from models.onnx.environment import REQUIREMENTS, OnnxError, python_of_converter
from pipeline.import_model import main
from tests.fixtures import REPO
from tests.processes import has_ended, running, wait_until
from tests.tiny_models import save_model

CASES = Path(__file__).with_name("onnx_cases.py")
HW = (32, 64)
NAMES = ("boxes/out:0", "scores")


class TestEnvironment:
    """`install` makes an environment in the folder that it is given, as pip does."""

    @staticmethod
    def made(folder):
        Path(folder, "bin").mkdir(parents=True)
        Path(folder, "bin", "python").touch()

    def test_it_is_made_once_also_for_several_processes_at_once(self, tmp_path):
        calls, arrived = [], []

        def install(folder):
            calls.append(folder)
            wait_until(lambda: len(arrived) == 4)
            self.made(folder)

        def ask(number):
            arrived.append(number)
            return python_of_converter(str(tmp_path), install)

        with ThreadPoolExecutor(4) as threads:
            pythons = {*threads.map(ask, range(4))}
        python_of_converter(str(tmp_path), install)
        assert (len(calls), pythons) == (1, {f"{calls[0]}/bin/python"})
        assert os.path.isfile(*pythons)

    @pytest.mark.parametrize("stop", [OnnxError("no network"), KeyboardInterrupt()], ids=["failed", "interrupted"])
    def test_a_half_made_one_is_made_again_from_nothing(self, tmp_path, stop):
        def interrupted(folder):
            self.made(folder)
            raise stop

        there_before = []

        def install(folder):
            there_before.append(os.path.exists(folder))
            self.made(folder)

        with pytest.raises(type(stop)):
            python_of_converter(str(tmp_path), interrupted)
        assert os.path.isfile(python_of_converter(str(tmp_path), install))
        assert there_before == [False]

    def test_all_that_is_installed_is_pinned(self):
        lines = [line for line in Path(REQUIREMENTS).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        assert len(lines) > 50
        assert [line for line in lines if "==" not in line.partition(";")[0]] == []

    @pytest.mark.matrix
    @pytest.mark.slow
    def test_without_a_package_index_it_is_one_line(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        with pytest.raises(OnnxError, match=r"^the converter's environment cannot be made: ERROR: No matching distribution.*$"):
            python_of_converter(str(tmp_path))
        assert not [*tmp_path.glob("*/complete")]


def converter(change=None, *, notes=None, names=NAMES, outputs=("boxes", "scores")):
    """A `convert` whose network has its outputs transposed, as onnx2tf's may be; `change` spoils the answers of ONNX Runtime."""
    import tensorflow as tf

    draw = np.random.default_rng(3)
    weights = draw.normal(0, 1, (3, 9 * 9)).astype(np.float32)

    def answers(images):
        mixed = tf.reshape(tf.reduce_mean(images, [1, 2]) @ weights, [-1, 9, 9])
        scales = tf.constant([[400.0]] * 4 + [[1.0]] * 3 + [[1e-4]] * 2)
        return mixed * scales, tf.sigmoid(mixed)

    def predict(images):
        boxes, scores = answers(images)
        found = {"boxes": tf.transpose(boxes, [0, 2, 1]), "scores": scores}
        return {f"output_{place}": found[name] for place, name in enumerate(outputs)}

    def convert(arguments, scratch):
        assert [os.path.isfile(each) for each in arguments[:2]] == [True, True]
        save_model(Path(scratch, "converted"), predict, tf.TensorSpec((1, *HW, 3), tf.float32, "pixels"))
        arrays = {}
        for number in range(2):
            pixels = draw.uniform(0, 255**number, (1, *HW, 3)).astype(np.float32)
            found = [each.numpy() for each in answers(pixels)]
            (change or (lambda *_: None))(*found)
            arrays |= {f"image_{number}": pixels, **{f"output_{number}_{place}": each for place, each in enumerate(found)}}
        np.savez(Path(scratch, "reference.npz"), **arrays)
        answer = {"outputs": names, "input_hw": HW, "notes": notes or {}}
        Path(scratch, "answer.json").write_text(json.dumps(answer), encoding="utf-8")

    return convert


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x08\x08")
    return path


def written(folder):
    return sorted(path.name for path in folder.rglob("*"))


def test_the_saved_model_has_the_names_and_axes_of_the_onnx_model(model, tmp_path):
    """Whatever the converter made of them."""
    import tensorflow as tf

    said = import_onnx(str(model), str(tmp_path / "m" / "1"), convert=converter())
    assert said.startswith("the largest difference from ONNX Runtime is ")
    network = tf.saved_model.load(str(tmp_path / "m" / "1")).signatures["serving_default"]
    assert {name: tuple(spec.shape) for name, spec in network.structured_outputs.items()} == {
        "boxes_out_0": (1, 9, 9),
        "scores": (1, 9, 9),
    }
    assert [*network.structured_input_signature[1]] == ["images"]
    assert written(tmp_path / "m")[0] == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "model.onnx"]


def spoil_boxes(boxes, scores):
    boxes[0, 0, 0] += 4


def spoil_small_scores(boxes, scores):
    """Confidences of an image without objects: nothing beside boxes in pixels."""
    boxes[:, 7:] = 0


def not_a_number(boxes, scores):
    scores[0, 2, 2] = np.nan


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        pytest.param({"change": spoil_boxes}, "output 'boxes/out:0' differs from ONNX Runtime's by", id="a box"),
        pytest.param({"change": spoil_small_scores}, "output 'boxes/out:0' differs from ONNX Runtime's by", id="small scores"),
        pytest.param({"change": not_a_number}, "output 'scores' differs from ONNX Runtime's by inf", id="no number"),
        pytest.param({"outputs": ("scores", "boxes")}, "differs from ONNX Runtime's by", id="other order"),
        pytest.param(
            {"outputs": ("scores",)}, r"expected outputs boxes/out:0, scores of the converted model, it has 1", id="one"
        ),
    ],
)
def test_a_conversion_that_answers_otherwise_is_refused_and_leaves_nothing(model, tmp_path, convert, message):
    with pytest.raises(OnnxError, match=f"^refused: .*{message}"):
        import_onnx(str(model), str(tmp_path / "m" / "1"), convert=converter(**convert))
    assert written(tmp_path) == ["model.onnx"]


@pytest.mark.parametrize(
    ("got", "want", "expected"),
    [
        pytest.param(np.zeros((1, 0, 6)), np.zeros((1, 0, 6)), 0, id="no boxes"),
        pytest.param([[[1.0, 2]]], [[[1.0, 2]]], 0, id="equal"),
        pytest.param([[[101.0], [1]]], [[[100.0], [1]]], 10, id="of a channel's largest value"),
        pytest.param([[[100.0, 1.1]] * 3], [[[100.0, 1]] * 3], 100, id="of another channel"),
        pytest.param([[np.inf, np.nan]], [[np.inf, np.nan]], 0, id="the same that are no numbers"),
        pytest.param([[np.nan, 1]], [[1.0, 1]], np.inf, id="no number"),
        pytest.param([[1, 2]], [[1, 2]], 0, id="integers"),
    ],
)
def test_differences_are_counted_in_tolerances(got, want, expected):
    np.testing.assert_allclose(tolerances(np.array(got), np.array(want)), expected, rtol=1e-2)


def test_class_names_come_from_the_file_else_from_the_model(model, tmp_path):
    (tmp_path / "names").write_text("cat\ndog\n")
    convert = converter(notes={"names": "{0: 'ant', 1: 'bee'}", "task": "detect", "stride": "32"})
    import_onnx(str(model), str(tmp_path / "1"), convert=convert)
    import_onnx(str(model), str(tmp_path / "2"), convert=convert, names_path=str(tmp_path / "names"))
    said = [json.loads((tmp_path / version / "metadata.yaml").read_text()) for version in "12"]
    assert [each["names"] for each in said] == [["ant", "bee"], ["cat", "dog"]]
    assert {each["task"] for each in said} == {"detect"}


@pytest.mark.parametrize("names", ["ant, bee", "__import__('os')", "7", "{1: 'bee'}"])
def test_class_names_that_are_none_are_refused_and_nothing_runs(model, tmp_path, names):
    with pytest.raises(OnnxError, match="expected class names by number in the model's metadata"):
        import_onnx(str(model), str(tmp_path / "1"), convert=converter(notes={"names": names}))
    assert written(tmp_path) == ["model.onnx"]


@pytest.mark.parametrize("case", ["no model", "no names", "output exists"])
def test_what_is_missing_shows_before_minutes_of_work(model, tmp_path, case):
    places = {"path": str(model), "output_dir": str(tmp_path / "m")}
    changed = {
        "no model": {"path": str(tmp_path / "absent.onnx")},
        "no names": {"names_path": str(tmp_path / "absent.names")},
        "output exists": {"output_dir": str(tmp_path)},
    }[case]

    def convert(arguments, scratch):
        raise AssertionError("too late")

    with pytest.raises((OSError, DarknetError)):
        import_onnx(**{**places, **changed}, convert=convert)
    assert written(tmp_path) == ["model.onnx"]


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_programs_of_the_converter_come_first_and_its_last_words_are_the_reason(model, tmp_path, monkeypatch, capsys):
    """onnx2tf finds onnxsim by PATH, and works in the current folder."""
    program(tmp_path / "bin" / "onnxsim", "echo chatter >&2; echo it stands in $(basename $PWD | cut -c1-8) >&2; exit 3")
    program(tmp_path / "bin" / "python", "exec onnxsim")
    monkeypatch.chdir(tmp_path)
    assert main([str(model), "--output", str(tmp_path / "m" / "1"), "--converter", "bin/python"]) == 2
    assert capsys.readouterr().err == f"import: {model}: it stands in .import-\n"
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
def test_a_stopped_import_ends_its_converter_and_leaves_nothing(model, tmp_path):
    program(tmp_path / "bin" / "python", f"echo $$ > {tmp_path}/pid; exec sleep 600")
    flags = [str(model), "--output", str(tmp_path / "m" / "1"), "--converter", str(tmp_path / "bin" / "python")]
    with running([sys.executable, "-m", "pipeline", "import", *flags], cwd=REPO, stderr=subprocess.PIPE) as command:
        pid = tmp_path / "pid"
        wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"), process=command)
        command.terminate()
        assert command.wait() == 130
        assert command.stderr.read().endswith(b"stopped\n")
    wait_until(lambda: has_ended(int(pid.read_text())))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "model.onnx", "pid"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param(["m.pt"], "it is a PyTorch model; this makes one of it: yolo export model=m.pt format=saved_model", id="pt"),
        pytest.param(["m.txt"], "m.txt: expected a file that ends with .onnx, .keras or .h5, or a folder", id="text"),
        pytest.param(["absent.pt"], "absent.pt: expected a file", id="absent"),
        pytest.param(["absent.onnx"], "import: absent.onnx: No such file or directory", id="absent ONNX"),
        pytest.param(["m.onnx", "--cfg", "m.cfg"], "--cfg belongs to models of Darknet", id="two formats"),
        pytest.param(
            [],
            "expected FILE, or a Darknet model's --cfg, --weights and --names; --cfg and --weights and --names are missing",
            id="no format",
        ),
    ],
)
def test_other_files_are_one_line(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("m.pt", "m.txt", "m.onnx"):
        Path(name).touch()
    try:
        code = main([*argv, "--output", "m/1"])
    except SystemExit as stop:  # from argparse
        code = stop.code
    assert (code, message in capsys.readouterr().err.splitlines()[-1]) == (2, True)


@pytest.fixture(scope="session")
def converting_python(tmp_path_factory):
    named = os.environ.get("ONNX_PYTHON")
    if not named:
        pytest.skip(
            "takes minutes, 2.5 GB and the package registry; ONNX_PYTHON=install makes the environment of detect-objects import, "
            "ONNX_PYTHON=<path> names the Python of one"
        )
    return python_of_converter() if named == "install" else named


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "side", "shape", "dtype", "flags"),
    [
        pytest.param("yolov8", 128, ["N", 3, "H", "W"], "FLOAT", ["--input-size", "128"], id="YOLOv8 of any size"),
        pytest.param("yolox", 96, [1, 3, 96, 96], "FLOAT", ["--names", "m.names"], id="YOLOX"),
        pytest.param("yolox", 96, [1, 96, 96, 3], "FLOAT", ["--names", "m.names"], id="channels last"),
        pytest.param("yolov8", 96, [2, 3, 96, 96], "UINT8", [], id="batches of two uint8 images"),
    ],
)
def test_small_onnx_models_are_imported_and_detect(
    converting_python, kind, side, shape, dtype, flags, tmp_path, monkeypatch, capsys
):
    """With onnx2tf and ONNX Runtime themselves; the pipeline recognises the family."""
    monkeypatch.chdir(tmp_path)
    Path("m.names").write_text("cat\ndog\npotted plant\n")
    make = [converting_python, "-I", str(CASES), json.dumps([kind, "m.onnx", side, shape, dtype])]
    subprocess.run(make, check=True)
    assert main(["m.onnx", "--output", "m/1", "--converter", converting_python, *flags]) == 0, capsys.readouterr().err
    assert {"yolov8": "YOLO of Ultralytics", "yolox": "YOLOX"}[kind] in capsys.readouterr().out
    run = [sys.executable, "-m", "pipeline", "run", "--model", "m", "--output", "out", "--score-threshold", "0.01"]
    image = str(REPO / "models/digits/samples/scene_001.jpg")
    done = subprocess.run(
        [*run, "--input", image], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(REPO)}
    )
    assert done.returncode == 0, done.stderr
    (row,) = [json.loads(line) for path in Path("out/detections").glob("*.jsonl") for line in path.open()]
    assert {each["class_name"] for each in row["detections"]} <= {"cat", "dog", "potted plant"}
    assert row["detections"]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("shape", "dtype", "flags", "message"),
    [
        pytest.param([1, 3, "H", "W"], "FLOAT", [], "it takes images of any size; give --input-size, for example 640", id="size"),
        pytest.param([1, 3, 96, 96], "FLOAT", ["--input-size", "64"], "takes images of 96x96 only", id="another size"),
        pytest.param([1, 3, 96, 96], "FLOAT16", [], "expected an input of float32 or uint8, it is tensor(float16)", id="half"),
        pytest.param(
            [1, 3, "H", "W"], "FLOAT", ["--input-size", "64"], "ONNX Runtime cannot run it: ", id="it has a size inside"
        ),
        pytest.param(None, "", [], "it cannot be read as ONNX: ", id="no ONNX"),
    ],
)
def test_an_onnx_model_that_cannot_be_converted_is_one_line(
    converting_python, shape, dtype, flags, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("m.onnx").write_bytes(b"no ONNX")
    if shape:
        make = [converting_python, "-I", str(CASES), json.dumps(["yolov8", "m.onnx", 96, shape, dtype])]
        subprocess.run(make, check=True)
    assert main(["m.onnx", "--output", "m/1", "--converter", converting_python, *flags]) == 2
    err = capsys.readouterr().err.splitlines()
    assert message in err[-1] and err[-1].startswith(f"import: {tmp_path}/m.onnx: ")
    assert written(tmp_path) == ["m.onnx"]
