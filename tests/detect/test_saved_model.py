"""Finding, understanding and loading SavedModels, the project's own and foreign ones."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from models.metadata import METADATA_PATH, DetectorMetadata, write_metadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.describe_model import describe
from pipeline.detect.load_detector import load_detector
from pipeline.detect.load_model import load, name_and_version
from pipeline.detect.model_arrays import Signature, Tensor
from pipeline.detect.versions import files_of, fingerprint, locate
from pipeline.errors import ModelError
from pipeline.records import EncodedImage, ImageRef
from tests.conftest import write_bright_image
from tests.tiny_models import bright_box, save_model

CPU = DetectConfig(batch_sizes=(1, 2), concurrent_batches=2)
BOX = [160, 60, 480, 300]  # of an image of 640 x 480


@pytest.fixture(scope="module")
def bright_image(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "bright.png"
    write_bright_image(path, (640, 480), tuple(BOX))
    return EncodedImage(ImageRef(str(path)), path.read_bytes())


def images_spec(batch=None, hw=(96, 128), dtype="uint8", name="images"):
    return tf.TensorSpec((batch, *hw, 3), dtype, name)


def as_object_detection_api(input_tensor):
    """As TensorFlow's Object Detection API exports models: one image of any size, yxyx shares, classes from 1, as floats."""
    box = bright_box(input_tensor)
    return {
        "detection_boxes": tf.stack([tf.gather(box, [1, 0, 3, 2], axis=1), tf.zeros_like(box)], 1),
        "detection_scores": tf.constant([[0.75, 0.0]]),
        "detection_classes": tf.constant([[2.0, 1.0]]),
        "num_detections": tf.constant([2.0]),
    }


def as_scores_of_the_range(images):
    """Confidences show what 255 (halved) and 0 (from 0.5 down) became."""
    box = tf.cast(bright_box(images), tf.float32)
    high, low = tf.reduce_max(images, [1, 2, 3]), tf.reduce_min(images, [1, 2, 3])
    return {
        "boxes": tf.stack([box, box], 1),
        "scores": tf.stack([high * 0.5, 0.5 - low * 0.125], 1),
        "classes": tf.tile([[0, 1]], [tf.shape(images)[0], 1]),
    }


def as_raw_candidates(images):
    """Overlapping candidates in pixels of the input, centre and size, with scores of every class."""
    x0, y0, x1, y1 = tf.unstack(tf.cast(bright_box(images), tf.float32) * [128.0, 96.0, 128.0, 96.0], axis=1)
    box = tf.stack([(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0], 1)
    scores = tf.constant([[[0.1, 0.9], [0.1, 0.8], [0.7, 0.1]]])
    return {"candidates": tf.stack([box, box + 0.5, box], 1), "class_scores": tf.tile(scores, [tf.shape(images)[0], 1, 1])}


def as_four_at_once(images):
    return {"boxes": bright_box(images)[:, None], "scores": tf.fill([4, 1], 0.75)}


RAW = {
    "boxes_output": "candidates",
    "scores_output": "class_scores",
    "box_format": "cxcywh",
    "box_units": "pixels",
    "nms": "pipeline",
    "class_names": ("ant", "bee"),
}


@pytest.mark.parametrize(
    ("predict", "spec", "config", "rows", "batch_sizes"),
    [
        pytest.param(
            as_object_detection_api,
            {"batch": 1, "hw": (None, None), "name": "input_tensor"},
            {},
            [("class 2", 0.75)],  # its own number, which is the id of its category in COCO
            (1,),
            id="object detection api without config",
        ),
        pytest.param(
            as_object_detection_api,
            {"batch": 1, "hw": (None, None), "name": "input_tensor"},
            {"input_hw": (96, 128), "resize": "letterbox", "class_names": ("ant", "bee"), "letterbox_value": 0},
            [("bee", 0.75)],
            (1,),
            id="object detection api with names and size",
        ),
        pytest.param(
            as_scores_of_the_range, {"dtype": "float32"}, {}, [("class 0", 0.5), ("class 1", 0.5)], (1, 2), id="floats are 0 to 1"
        ),
        pytest.param(
            as_scores_of_the_range,
            {"dtype": "float32"},
            {"value_range": (-1.0, 1.5)},
            [("class 0", 0.75), ("class 1", 0.625)],
            (1, 2),
            id="floats of a given range",
        ),
        pytest.param(as_raw_candidates, {}, RAW, [("bee", 0.9), ("ant", 0.7)], (1, 2), id="suppressed here"),
        pytest.param(as_four_at_once, {"batch": 4}, {}, [("class 0", 0.75)], (4,), id="fixed batch, one class"),
    ],
)
def test_foreign_models_find_the_same_box(tmp_path, bright_image, predict, spec, config, rows, batch_sizes):
    folder = save_model(tmp_path / "foreign", predict, images_spec(**spec))
    detector = load_detector(ModelConfig(path=folder, **config), CPU)
    results = detector.detect([bright_image] * 3)
    for result in results:
        found = result.detections
        assert [(name, round(float(c), 4)) for name, c in zip(found.class_names, found.confidences, strict=True)] == rows
        assert np.abs(found.boxes_xyxy - BOX).max() <= 5.01  # a pixel of the model's input
    assert detector.batch_sizes == batch_sizes
    assert (detector.model.metadata.name, detector.model.version) == ("foreign", fingerprint(folder, files_of(folder)))


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory):
    """A foreign model that needs no config."""
    return save_model(tmp_path_factory.mktemp("models") / "plain", as_raw_and_plain, images_spec())


def as_raw_and_plain(images):
    n = tf.shape(images)[0]
    plain = {"boxes": bright_box(images)[:, None], "scores": tf.fill([n, 1], 0.75), "classes": tf.zeros([n, 1], tf.int32)}
    return {**plain, "columns": tf.zeros([n, 4, 100]), "class_scores": tf.zeros([n, 1, 3]), "count": tf.ones([n], tf.int32)}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"signature": "predict"}, "expected a signature 'predict', it has ['serving_default']; set model.signature"),
        (
            {"input_hw": (100, 100)},
            "expected images uint8 (N, 100, 100, 3) as input 'images', the signature takes uint8 (None, 9",
        ),
        ({"boxes_output": "x", "scores_output": "y"}, "expected outputs ['x', 'y'], the signature gives ['boxes', "),
        ({"boxes_output": "columns"}, "expected boxes (N, M, 4) as output 'columns', it is (None, 4, 100)"),
        ({"scores_output": "class_scores"}, "expected scores (N, M) as output 'class_scores', or (N, M, classes) without a"),
        ({"scores_output": "count"}, "expected scores (N, M) as output 'count'"),
        ({"boxes_output": ""}, "model.boxes_output: String should have at least 1 character, got ''"),
        ({"class_names": ("absent.txt",)}, "class_names absent.txt: expected a text file with one name a line"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_config_that_does_not_fit_the_model_is_one_clear_error(plain_model, config, message):
    with pytest.raises(ModelError) as caught:
        load(ModelConfig(path=plain_model, **config), CPU)
    assert str(caught.value).startswith(f"model {plain_model}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


IMAGES = Tensor((None, 96, 128, 3), "uint8")


def test_a_model_of_any_size_takes_images_at_their_own_unless_the_config_gives_one():
    tensors = {"images": Tensor((None, None, None, 3), "uint8")}, {"boxes": Tensor((None, 1, 4), "float32")}
    signature = Signature(tensors[0], {**tensors[1], "scores": Tensor((None, 1), "float32")}, dict)
    found = [describe(signature, None, ModelConfig(path="m", input_hw=hw), "m", CPU) for hw in (None, (96, 128))]
    assert [one.resize for one in found] == ["none", "stretch"] and found[1].input_hw == (96, 128)


@pytest.mark.parametrize(
    ("inputs", "config", "message"),
    [
        ({"image_bytes": Tensor((None,), "object")}, {}, "expected an input 'images', the signature takes ['image_bytes']"),
        ({}, {}, "expected an input 'images', the signature takes []"),
        ({"images": Tensor((None, 96, 128, 3), "int32")}, {}, "the signature takes int32 (None, 96, 128, 3)"),
        ({"images": Tensor(None, "uint8")}, {}, "the signature takes uint8 of any shape"),
        ({"images": Tensor((None, 96, 128, 1), "uint8")}, {}, "the signature takes uint8 (None, 96, 128, 1)"),
        ({"images": IMAGES}, {"resize": "none"}, "model.resize is none, but it takes images (None, 96, 128, 3) only; set"),
        (
            {"images": IMAGES, "sizes": Tensor((None,), "int32")},
            {},
            "expected a signature of the inputs ['images'], it takes ['images', 'sizes']",
        ),
    ],
)
def test_a_model_that_does_not_take_the_images_is_one_clear_error(inputs, config, message):
    outputs = {"boxes": Tensor((None, 1, 4), "float32"), "scores": Tensor((None, 1), "float32")}
    with pytest.raises(ModelError) as caught:
        describe(Signature(inputs, outputs, dict), None, ModelConfig(path="m", **config), "m", CPU)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def break_by_removing(name):
    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def break_by_writing(name, content):
    def write(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    return write


def claim_thresholds(folder):
    metadata = DetectorMetadata("m", (96, 128), "stretch", (), signature="serving_default", count_output="")
    write_metadata(str(folder), metadata)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(break_by_removing("saved_model.pb"), "expected a SavedModel (saved_model.pb) or version", id="no graph"),
        pytest.param(break_by_writing("saved_model.pb", b"junk"), "TensorFlow cannot load it", id="junk graph"),
        pytest.param(break_by_writing("assets.extra/detector.json", b"{"), "detector.json", id="junk description"),
        pytest.param(break_by_writing("assets.extra/detector.json", b"\xff"), "detector.json", id="description that is no text"),
        pytest.param(
            break_by_writing("assets.extra/tf_serving_warmup_requests", b"junk" * 9),
            "tf_serving_warmup_requests cannot be read",
            id="junk warm-up file",
        ),
        pytest.param(claim_thresholds, "expected a signature of the inputs ['images', 'iou_th", id="thresholds it lacks"),
    ],
)
def test_a_damaged_model_is_one_clear_error(tmp_path, plain_model, damage, message):
    folder = tmp_path / "model"
    shutil.copytree(plain_model, folder)
    damage(folder)
    with pytest.raises(ModelError) as caught:
        load(ModelConfig(path=str(folder)), CPU)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["absent", "empty", "file", "nosuchscheme://x/y"])
def test_no_model_there_is_one_clear_error(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("file").touch()
    with pytest.raises(ModelError, match=f"model {path}: ") as caught:
        locate(path)
    assert "\n" not in str(caught.value)


def test_class_names_may_stand_in_a_file(tmp_path, plain_model):
    names = tmp_path / "names.txt"
    names.write_text("ant\n bee \n\n", encoding="utf-8")
    assert load(ModelConfig(path=plain_model, class_names=(str(names),)), CPU).metadata.class_names == ("ant", "bee")
    names.write_text("ant\n\nbee\n", encoding="utf-8")
    with pytest.raises(
        ModelError, match=r"names.txt: expected a text file with one name a line: line 2 is empty, expected a class"
    ):
        load(ModelConfig(path=plain_model, class_names=(str(names),)), CPU)


@pytest.fixture(scope="module")
def convolutions(tmp_path_factory):
    """A model whose scores come out of convolutions."""
    kernels = [tf.constant(np.random.default_rng(n).normal(0, 0.1, (3, 3, i, 32)), tf.float32) for n, i in enumerate((3, 32, 32))]

    def predict(images):
        features = images
        for kernel in kernels:
            features = tf.nn.relu(tf.nn.conv2d(features, kernel, 2, "SAME") + 0.1)
        scores = tf.sigmoid(tf.reduce_mean(features, [1, 2]) * 2)
        return {"boxes": tf.zeros([tf.shape(images)[0], 32, 4]), "scores": scores}

    return save_model(tmp_path_factory.mktemp("models") / "convolutions", predict, images_spec(dtype="float32"))


@pytest.mark.slow
def test_bfloat16_rounds_a_little_and_float32_does_not(convolutions):
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("TensorFlow rewrites to bfloat16 only for CPUs that have it")
    images = np.random.default_rng(9).integers(0, 255, (2, 96, 128, 3), np.uint8)
    plain = tf.saved_model.load(convolutions).signatures["serving_default"]
    exact = plain(images=tf.constant(images, tf.float32) / 255.0)["scores"]
    full, half = (
        [one for part in load(ModelConfig(path=convolutions), settings).engine.run(images) for one in part.arrays["scores"]]
        for settings in (CPU, dataclasses.replace(CPU, precision="bfloat16"))
    )
    assert np.allclose(full, exact, atol=1e-5)
    difference = np.abs(np.array(half) - exact).max()
    assert 1e-5 < difference < 2e-2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "device: expected auto, cpu, gpu or gpu:<number>, got 'tpu'"),
        ({"device": "gpu:x"}, "device: expected auto, cpu, gpu or gpu:<number>, got 'gpu:x'"),
        ({"device": "gpu:99"}, "device gpu:99: TensorFlow sees"),
    ],
)
def test_a_device_that_is_not_there_is_one_clear_error(bright_model, settings, message):
    with pytest.raises(ModelError) as caught:
        load(ModelConfig(path=bright_model), dataclasses.replace(CPU, **settings))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", [None, "mine"])
def test_name_and_version_of_a_model_are_known_without_loading_it(name, bright_model, gcs_bucket):
    """As its rows will say them, also of one on object storage, of which only its description is read."""
    config = ModelConfig(path=bright_model, name=name)
    loaded = load(config, DetectConfig())
    loaded.engine.close()
    gcs_bucket.blob("m/bright/3/saved_model.pb").upload_from_string(b"not read")
    gcs_bucket.blob(f"m/bright/3/{METADATA_PATH}").upload_from_filename(f"{locate(bright_model)[0]}/{METADATA_PATH}")
    assert name_and_version(config) == (loaded.metadata.name, loaded.version) == (name or "bright", "3")
    assert name_and_version(ModelConfig(path=f"gs://{gcs_bucket.name}/m/bright", name=name)) == (name or "bright", "3")


def test_a_model_without_a_number_has_the_fingerprint_of_its_files_as_its_version(tmp_path, bright_model):
    """A copy is the same version, wherever and whenever it was made; another network, or another description, is not."""
    versions = []
    for name in ("one", "copy", "changed"):
        shutil.copytree(f"{bright_model}/3", tmp_path / name)
        if name == "changed":
            with open(tmp_path / name / "assets.extra" / "detector.json", "a") as description:
                description.write(" ")
        versions.append(name_and_version(ModelConfig(path=str(tmp_path / name)))[1])
    assert versions[0] == versions[1] != versions[2] and len(versions[0]) == 12
