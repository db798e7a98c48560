"""OpenVINO finds what TensorFlow finds, without TensorFlow in the job's process; and an image that it fails on fails alone."""

import dataclasses
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from models.evaluate.agreement import compare
from models.import_darknet import import_darknet
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.batcher import Batcher
from pipeline.detect.engine import ModelFailed, OutOfMemory
from pipeline.detect.load_detector import load_detector
from pipeline.detect.openvino_convert import HIDDEN, convert, read_description, write_network
from pipeline.detect.openvino_engine import INT8, open_network
from pipeline.detect.versions import files_of, fingerprint, locate
from pipeline.errors import ModelError
from pipeline.log_lines import log_lines
from tests.bright_model import INPUT_HW, export_bright_model
from tests.conftest import REPO
from tests.detect.sample_rows import check_equal, rows
from tests.fixtures import fixtures_dir
from tests.tiny_models import detected, png, save_model
from tests.yolo_exports import export_yolo

openvino = pytest.importorskip("openvino", reason="the extra openvino is not installed")

BROKEN, HUGE = 13, 14  # first pixels that a toy fails on


@pytest.fixture(scope="module")
def digits():
    """The bundled detector's folder, from the cache of the user."""
    return locate("digits", None)[0]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hybrid-detection-pipeline" / "openvino"


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.matrix), {"score_threshold": 0.01, "iou_threshold": 0.2, "max_detections": 7}],
    ids=str,
)
def test_the_bundled_detector_gives_the_same_rows_on_both_engines(digits, settings):
    check_equal(rows(digits, engine="openvino", **settings), rows(digits, **settings), 50)


def as_of_0_1_0(network, target):
    """Writes a network as release 0.1.0 did: it ends with the best class of each box and its score."""
    from openvino import opset8

    found = openvino.Core().read_model(f"{network}/model.xml")
    boxes, scores = (found.output(role).get_node().input_value(0) for role in ("boxes", "scores"))
    best = opset8.topk(scores, opset8.constant(np.int64(1)), -1, "max", "value", "i32")
    outputs = {"boxes": boxes}
    for role, picked in (("classes", best.output(1)), ("scores", best.output(0))):
        outputs[role] = opset8.squeeze(picked, opset8.constant(np.array([-1]))).output(0)
    results = [opset8.result(value) for value in outputs.values()]
    for role, result in zip(outputs, results, strict=True):
        result.output(0).get_tensor().set_names({role})
    metadata = dataclasses.replace(read_description(network), classes_output="classes")
    write_network(target, openvino.Model(results, found.get_parameters(), "old"), metadata)


@pytest.mark.matrix
@pytest.mark.usefixtures("cache")
def test_an_int8_version_of_0_1_0_finds_what_it_found(tmp_path):
    """It has no scores of other classes, so that a job which asks for them is refused."""
    folder = export_yolo(tmp_path / "1", "4+C,M")
    convert(folder, folder, ModelConfig(path=folder), str(tmp_path / "new"))
    as_of_0_1_0(str(tmp_path / "new"), f"{folder}/{INT8}")
    check_equal(*(rows(folder, engine="openvino", precision=one, score_threshold=0.4) for one in ("int8", "float32")), 50)
    with pytest.raises(ModelError, match="its int8 network has one class a box: quantize it again, or leave out"):
        rows(folder, engine="openvino", precision="int8", labels_per_box="several")


def test_openvino_reports_nothing_to_anyone():
    """It counts imports and conversions over the network, without asking."""
    code = "import pipeline.detect.openvino_engine, openvino; print(openvino.tools.ovc.telemetry_utils.tm.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "openvino.tools.ovc.telemetry_stub"


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_a_darknet_model_finds_the_same_in_photos_at_each_precision(tmp_path):
    darknet = fixtures_dir() / "darknet"
    files = [darknet / name for name in ("yolo-fastest-1.1.cfg", "yolo-fastest-1.1.weights", "coco.names")]
    import_darknet(*map(str, files), str(tmp_path / "1"), input_hw=(320, 320))
    photos = sorted((fixtures_dir() / "photos").glob("*.jpg"))
    expected = rows(str(tmp_path / "1"), photos)
    for precision, least in (("float32", 0.999), ("bfloat16", 0.93)):
        found = rows(str(tmp_path / "1"), photos, engine="openvino", precision=precision)
        assert compare(found, expected)["agreement"] >= least


JOB = """
import sys
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_detector import load_detector
from pipeline.records import EncodedImage, ImageRef
import pipeline.run, pipeline.graph
detector = load_detector(ModelConfig(path=sys.argv[1]), DetectConfig(engine="openvino"))
print(len(detector.detect([EncodedImage(ImageRef("a"), open(sys.argv[2], "rb").read())])[0].detections))
print([name for name in ("tensorflow", "tfx_bsl", "keras") if name in sys.modules])
"""
WITHOUT_TENSORFLOW = """
import importlib.metadata, sys
sys.modules["tensorflow"] = None
known = importlib.metadata.version
def version(name):
    if name == "tensorflow":
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.version = version
"""


@pytest.fixture
def version(bright_model, tmp_path):
    """A version that is not converted yet."""
    return shutil.copytree(Path(bright_model) / "3", tmp_path / "m" / "3", ignore=shutil.ignore_patterns(HIDDEN))


def test_a_job_imports_no_tensorflow_and_a_second_one_converts_nothing(version, tmp_path, cache):
    """The second job has no TensorFlow, nor its description, and a copy of the version, which is the same version."""
    image, copy = tmp_path / "a.png", tmp_path / "copy" / "3"
    cv2.imwrite(str(image), np.pad(np.full((40, 40, 3), 255, np.uint8), ((20, 36), (30, 58), (0, 0))))

    def found_by(script, model):
        command = [sys.executable, "-c", script, model, str(image)]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=580, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    before = fingerprint(str(version), files_of(str(version)))
    assert found_by(JOB, version) == ["1", "[]"]
    assert fingerprint(str(version), files_of(str(version))) == before and not cache.exists()
    shutil.copytree(version, copy)
    assert found_by(WITHOUT_TENSORFLOW + JOB, copy)[0] == "1"


@pytest.mark.matrix
@log_lines()
def test_where_nothing_can_be_written_beside_the_version_the_network_goes_to_the_cache(version, cache, capfd):
    (version / HIDDEN).touch()  # so that no folder can be made
    load_detector(ModelConfig(path=str(version)), DetectConfig(engine="openvino")).close()
    assert len([*cache.iterdir()]) == 1
    assert f"model {version}: the network for OpenVINO goes to {cache}: File exists" in capfd.readouterr().err


def test_where_nothing_can_be_written_at_all_the_error_says_so(version, tmp_path, monkeypatch):
    """As in a pod whose root is read-only; it used to ask for an int8 version."""
    (version / HIDDEN).touch()
    (tmp_path / "no_folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no_folder"))
    with pytest.raises(ModelError, match=r"can be written neither beside it nor into the cache: .*; set XDG_CACHE_HOME") as err:
        load_detector(ModelConfig(path=str(version)), DetectConfig(engine="openvino"))
    assert "int8" not in str(err.value) and "\n" not in str(err.value)


@pytest.mark.matrix
def test_a_model_of_other_content_is_converted_again(version, bright_letterbox_model):
    for _ in range(2):
        load_detector(ModelConfig(path=str(version)), DetectConfig(engine="openvino")).close()
        shutil.copytree(Path(bright_letterbox_model) / "3", version, dirs_exist_ok=True, ignore=shutil.ignore_patterns(HIDDEN))
    assert len([*(version / HIDDEN).iterdir()]) == 2


def test_weights_behind_a_link_are_part_of_what_was_converted(tmp_path):
    """After the link to them had been moved, the former ones detected."""
    for name, threshold in (("low", 100.0), ("high", 200.0)):
        export_bright_model(tmp_path / name / "1", threshold=threshold)
    version = shutil.copytree(tmp_path / "low" / "1", tmp_path / "m" / "1", ignore=shutil.ignore_patterns("variables"))
    found = []
    for name in ("low", "high"):
        (version / "variables").unlink(missing_ok=True)
        (version / "variables").symlink_to(tmp_path / name / "1" / "variables")
        results, _ = detected(version, [png("a", np.full((*INPUT_HW, 3), 150, np.uint8))], DetectConfig(engine="openvino"))
        found.append(len(results[0].detections))
    assert found == [1, 0]


@pytest.mark.matrix
@pytest.mark.usefixtures("cache")
def test_an_operation_that_openvino_lacks_is_named(tmp_path):
    """Its own message begins with a place in its source."""

    def suppressed(images):
        boxes = tf.image.combined_non_max_suppression(tf.zeros((1, 8, 1, 4)), tf.reshape(images, (1, -1, 1))[:, :8] / 255, 4, 4)
        return {"boxes": boxes.nmsed_boxes, "scores": boxes.nmsed_scores}

    tf = pytest.importorskip("tensorflow")
    save_model(tmp_path / "1", suppressed, tf.TensorSpec((1, 8, 8, 3), tf.float32, "images"))
    with pytest.raises(
        ModelError, match=r"OpenVINO cannot convert it: No conversion rule found for .*CombinedNonMax.*; use --eng"
    ):
        load_detector(ModelConfig(path=str(tmp_path / "1")), DetectConfig(engine="openvino"))


def test_a_missing_package_is_one_line_that_names_the_extra(bright_model, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"^engine openvino needs openvino; .*'hybrid-detection-pipeline\[openvino\]'$"):
        load_detector(ModelConfig(path=bright_model), DetectConfig(engine="openvino"))


def test_what_the_engine_does_not_have_is_one_line(bright_model):
    with pytest.raises(ModelError, match=r"engine openvino: expected device auto or cpu, got gpu; use --engine tensorflow"):
        load_detector(ModelConfig(path=bright_model), DetectConfig(engine="openvino", device="gpu"))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Returns the first pixel of an image as its score; fails on some."""
    from openvino import opset13 as ops

    images = ops.parameter([1, 4, 6, 3], np.uint8, name="images")
    pixel = ops.convert(ops.gather(ops.reshape(images, [-1], False), np.int32([0]), np.int32(0)), "i32")

    def has(value):
        return ops.convert(ops.equal(pixel, np.int32([value])), "i32")

    # for one value a shape that three numbers do not fit, for another one that takes terabytes
    three = ops.convert(ops.gather(ops.reshape(images, [-1], False), np.int32([0, 1, 2]), np.int32(0)), "f32")
    fitted = ops.reduce_max(ops.broadcast(three, ops.subtract(np.int32([3]), has(BROKEN))), np.int32(0))
    copies = ops.add(ops.multiply(has(HUGE), np.int32([1 << 15, 1 << 15, 1 << 14])), np.int32([1, 1, 1]))
    copied = ops.reshape(ops.tile(ops.reshape(fitted, [1, 1, 1], False), copies), [-1], False)
    lowest = ops.negative(ops.gather(copied, np.int32([0]), np.int32(0)))  # below any score
    scores = ops.maximum(ops.convert(ops.unsqueeze(pixel, 1), "f32"), lowest)
    boxes = ops.broadcast(np.zeros((1, 1, 1), np.float32), np.array([1, 1, 4], np.int64))
    model = openvino.Model([ops.result(boxes), ops.result(scores)], [images], "toy")
    for output, role in zip(model.outputs, ("boxes", "scores"), strict=True):
        output.get_tensor().set_names({role})
    folder = str(tmp_path_factory.mktemp("toy"))
    write_network(folder, model, DetectorMetadata("toy", (4, 6), "stretch", (), classes_output="", count_output=""))
    return folder


def images(values):
    return np.stack([np.full((4, 6, 3), value, np.uint8) for value in values])


def opened(toy, **settings):
    return Batcher(open_network(toy, DetectConfig(**settings)), (4, 6))


@pytest.mark.parametrize("settings", [{}, {"concurrent_batches": 3}, {"concurrent_batches": 1, "intra_op_threads": 1}], ids=str)
def test_each_image_gets_its_own_output_and_a_broken_one_fails_alone(toy, settings):
    batcher = opened(toy, **settings)
    batcher.warm_up()
    for _ in range(3):  # a failure leaves every request usable
        parts = batcher.run(images([*range(1, 12), BROKEN, *range(20, 30)]))
        (failed,) = [part for part in parts if part.error]
        assert isinstance(failed.error, ModelFailed) and (failed.start, failed.stop) == (11, 12)
        scores = [score for part in parts if not part.error for score in part.arrays["scores"].ravel().tolist()]
        assert scores == [*range(1, 12), *range(20, 30)]
    assert sum(part.batch_size for part in batcher.run(images(range(1, 9)))) == 8
    batcher.close()


def test_memory_that_does_not_suffice_for_one_image_is_an_error_and_later_images_are_found(toy):
    batcher = opened(toy, concurrent_batches=1)
    (part,) = batcher.run(images([HUGE]))
    assert isinstance(part.error, OutOfMemory)
    for value in (5, 6):  # the stream that failed is replaced
        assert batcher.run(images([value]))[0].arrays["scores"].item() == value
    batcher.close()


def test_a_saved_model_names_the_extra_where_tensorflow_is_not_installed(version, monkeypatch):
    """As long as no network of it is there."""

    def find_spec(name, *package, known=importlib.util.find_spec):
        return None if name == "tensorflow" else known(name, *package)

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    with pytest.raises(ModelError, match=r"a SavedModel, needs tensorflow; install the extra: .*\[tensorflow\]"):
        load_detector(ModelConfig(path=str(version)), DetectConfig(engine="openvino"))
