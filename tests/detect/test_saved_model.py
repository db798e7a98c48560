"""Finding, describing and loading SavedModels, the project's own and those from elsewhere."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from models.metadata import METADATA_PATH, read_metadata, write_metadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.describe_model import describe
from pipeline.detect.load_model import load, name_and_version
from pipeline.detect.model_arrays import Signature, Tensor
from pipeline.detect.versions import locate
from pipeline.errors import ModelError
from pipeline.records import EncodedImage, ImageRef
from tests.conftest import write_bright_image
from tests.detect.sample_rows import SAMPLES, rows
from tests.tiny_models import bright_box, detected, save_model
from tests.without_keras import tf

CPU = DetectConfig(batch_sizes=(1, 2), concurrent_batches=2)
BOX = [160, 60, 480, 300]  # of an image of 640 x 480


def as_raw_candidates(images):
    """Overlapping candidates, centre and size in pixels; scores show what 255 (halved) and 0 (from 0.5 down) became."""
    x0, y0, x1, y1 = tf.unstack(tf.cast(bright_box(images), tf.float32) * [128.0, 96.0, 128.0, 96.0], axis=1)
    box = tf.stack([(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0], 1)
    high, low = tf.reduce_max(images, [1, 2, 3]) * 0.5, 0.5 - tf.reduce_min(images, [1, 2, 3]) * 0.125
    ant, bee = tf.stack([0.0 * high, 0.0 * high, low], 1), tf.stack([high, high - 0.1, 0.0 * high], 1)
    return {"candidates": tf.stack([box, box + 0.5, box], 1), "class_scores": tf.stack([ant, bee], 2)}


def test_a_model_from_elsewhere_is_run_as_the_config_says(tmp_path):
    write_bright_image(tmp_path / "bright.png", (640, 480), tuple(BOX))
    image = EncodedImage(ImageRef("bright.png"), (tmp_path / "bright.png").read_bytes())
    folder = save_model(tmp_path / "other", as_raw_candidates, tf.TensorSpec((None, 96, 128, 3), "float32", "images"))
    outputs = {"boxes_output": "candidates", "scores_output": "class_scores", "class_names": ("ant", "bee")}
    boxes = {"box_format": "cxcywh", "box_units": "pixels", "nms": "pipeline"}
    results, detector = detected(folder, [image] * 3, CPU, **outputs, **boxes, value_range=(-1.0, 1.5))
    for result in results:
        seen = result.detections
        assert (seen.class_names, seen.confidences.tolist()) == (("bee", "ant"), [0.75, 0.625])
        assert np.abs(seen.boxes_xyxy - BOX).max() <= 5.01  # a pixel of the model's input
    assert (detector.batch_sizes, detector.model.metadata.name) == ((1, 2), "other")


IMAGES = {"images": Tensor((None, 96, 128, 3), "uint8")}
OUTPUTS = {
    "boxes": Tensor((None, 1, 4), "float32"),
    "scores": Tensor((None, 1), "float32"),
    "classes": Tensor((None, 1), "int32"),
    "columns": Tensor((None, 4, 100), "float32"),
    "class_scores": Tensor((None, 1, 3), "float32"),
    "count": Tensor((None,), "int32"),
}


def described(inputs=IMAGES, **config):
    return describe(Signature(inputs, OUTPUTS, dict), None, ModelConfig(path="m", **config), "m", CPU)


@pytest.mark.parametrize(
    ("inputs", "config", "message"),
    [
        (IMAGES, {"input_hw": (100, 100)}, "expected images uint8 (N, 100, 100, 3) as input 'images', the signature takes"),
        (IMAGES, {"boxes_output": "x", "scores_output": "y"}, "expected outputs ['x', 'y'], the signature gives ['boxes', "),
        (IMAGES, {"boxes_output": "columns"}, "expected boxes (N, M, 4) as output 'columns', it is (None, 4, 100)"),
        (IMAGES, {"scores_output": "class_scores"}, "scores (N, M) as output 'class_scores', or (N, M, classes) without a"),
        (IMAGES, {"scores_output": "count"}, "expected scores (N, M) as output 'count'"),
        (IMAGES, {"boxes_output": ""}, "model.boxes_output: String should have at least 1 character, got ''"),
        (IMAGES, {"class_names": ("absent.txt",)}, "class_names absent.txt: expected a text file with one name a line"),
        (IMAGES, {"resize": "none"}, "model.resize is none, but it takes images (None, 96, 128, 3) only; set"),
        ({"image_bytes": Tensor((None,), "object")}, {}, "expected an input 'images', the signature takes ['image_bytes']"),
        ({}, {}, "expected an input 'images', the signature takes []"),
        ({"images": Tensor((None, 96, 128, 3), "int32")}, {}, "the signature takes int32 (None, 96, 128, 3)"),
        ({"images": Tensor(None, "uint8")}, {}, "the signature takes uint8 of any shape"),
        ({"images": Tensor((None, 96, 128, 1), "uint8")}, {}, "the signature takes uint8 (None, 96, 128, 1)"),
        ({**IMAGES, "sizes": Tensor((None,), "int32")}, {}, "a signature of the inputs ['images'], it takes ['images', 'sizes']"),
    ],
)
def test_a_model_that_does_not_fit_its_config_or_takes_no_images_is_one_clear_error(inputs, config, message):
    with pytest.raises(ModelError) as caught:
        described(inputs, **config)
    assert str(caught.value).startswith("model m: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_of_any_size_takes_images_at_their_own_unless_the_config_gives_one():
    found = [described({"images": Tensor((None, None, None, 3), "uint8")}, input_hw=hw) for hw in (None, (96, 128))]
    assert [one.resize for one in found] == ["none", "stretch"] and found[1].input_hw == (96, 128)


def test_class_names_may_stand_in_a_file(tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("ant\n bee \n\n", encoding="utf-8")
    assert described(class_names=(str(names),)).class_names == ("ant", "bee")
    names.write_text("ant\n\nbee\n", encoding="utf-8")
    with pytest.raises(ModelError, match=r"names.txt: expected a text file with one name a line: line 2 is empty, expected a cl"):
        described(class_names=(str(names),))


WARM_UP = "tf_serving_warmup_requests"


@pytest.mark.parametrize(
    ("damaged", "content", "message"),
    [
        pytest.param("saved_model.pb", b"junk", "TensorFlow cannot load it", id="no graph"),
        pytest.param("assets.extra/detector.json", b"{", "detector.json", id="no JSON"),
        pytest.param("assets.extra/detector.json", b"\xff", "detector.json", id="no text"),
        pytest.param(f"assets.extra/{WARM_UP}", b"junk" * 9, f"{WARM_UP} cannot be read", id="no warm-up file"),
    ],
)
def test_a_damaged_model_is_one_clear_error(tmp_path, bright_model, damaged, content, message):
    folder = Path(shutil.copytree(f"{bright_model}/3", tmp_path / "model"))
    (folder / damaged).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load(ModelConfig(path=str(folder)), CPU)
    assert str(caught.value).startswith(f"model {folder}: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_thresholds_that_a_description_claims_and_the_signature_lacks_are_one_clear_error(tmp_path, bright_model):
    folder = shutil.copytree(f"{bright_model}/3", tmp_path / "model")
    write_metadata(folder, dataclasses.replace(read_metadata(folder), threshold_inputs=True))
    with pytest.raises(ModelError, match=r"expected a signature of the inputs \['images', 'iou_th"):
        load(ModelConfig(path=str(folder)), CPU)


@pytest.mark.slow
def test_bfloat16_rounds_a_little():
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("TensorFlow rewrites to bfloat16 only for CPUs that have it")

    def boxes(precision):
        found = rows("digits", SAMPLES[:1], precision=precision)
        return [one["box_xyxy"] for row in found for one in row["detections"]]

    assert 1e-3 < np.abs(np.subtract(boxes("bfloat16"), boxes("float32"))).max() < 2


@pytest.mark.parametrize(
    ("signature", "device", "message"),
    [
        ("other", "cpu", "expected a signature 'other', it has ['detect']; set model.signature"),
        ("detect", "gpu:99", "device gpu:99: TensorFlow sees"),
    ],
)
def test_a_signature_or_a_device_that_is_not_there_is_one_clear_error(bright_model, signature, device, message):
    with pytest.raises(ModelError) as caught:
        load(ModelConfig(path=bright_model, signature=signature), dataclasses.replace(CPU, device=device))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", [None, "mine"])
def test_name_and_version_of_a_model_are_known_without_loading_it(name, bright_model, gcs_bucket):
    """As its rows will say them, also of one on object storage, of which only its description is read."""
    config = ModelConfig(path=bright_model, name=name)
    loaded = load(config, DetectConfig())
    loaded.batcher.close()
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


OWN = "own:open_model"
FINGERPRINTS = [  # of models without a number as 0.1.0 and later releases have them, by an absolute path free of links
    pytest.param("mine", "auto", "8141de6fc4b9", id="SavedModel"),
    pytest.param("yolo", "auto", "16ce3d1ab7e4", id="folder of an ONNX file"),
    pytest.param("yolo/model.onnx", "auto", "16ce3d1ab7e4", id="file in its folder"),
    pytest.param("toy.onnx", "auto", "cb36314dabde", id="ONNX file"),
    pytest.param("bright.tflite", OWN, "bcdad6229fd6", id="file for an engine of one's own"),
    pytest.param("own", OWN, "66f5befea8d4", id="folder for an engine of one's own"),
    pytest.param("own/", OWN, "66f5befea8d4", id="folder with a slash"),
]


@pytest.mark.parametrize(("path", "engine", "version"), FINGERPRINTS)
def test_a_fingerprint_follows_the_weights_however_the_path_is_written(path, engine, version, tmp_path, monkeypatch):
    """Relative, through a link to the folder, or with `..` in it; a link to other weights is another version."""

    def write(folder, weights):
        for name in ("mine/saved_model.pb", "mine/assets.extra/notes", "yolo/model.onnx", "toy.onnx", "own/README"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"" if name.endswith(("notes", "README")) else b"graph")
        for name in ("mine/variables/variables.index", "yolo/model.onnx.data", "toy.onnx.data", "bright.tflite", "own/a/b.bin"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(weights)

    def versions():
        paths = (path, f"./{path}", f"../cur/{path}", f"{tmp_path}/cur/{path}", f"{folder}/yolo/../{path}", f"{folder}/{path}")
        return {name_and_version(ModelConfig(each), engine)[1] for each in paths}

    folder = tmp_path / "release-2026"
    write(folder, b"weights")
    write(tmp_path / "next", b"weights of another training")
    (tmp_path / "cur").symlink_to(folder)
    monkeypatch.chdir(folder)
    assert versions() == {version}
    monkeypatch.chdir(tmp_path)
    assert name_and_version(ModelConfig(f"cur/{path}"), engine)[1] == version
    (tmp_path / "cur").unlink()
    (tmp_path / "cur").symlink_to("next")
    assert name_and_version(ModelConfig(f"cur/{path}"), engine)[1] != version
    write(folder, b"weights of another training")
    (tmp_path / "cur").unlink()
    (tmp_path / "cur").symlink_to(folder)
    monkeypatch.chdir(folder)
    (trained,) = versions()
    assert trained != version


@pytest.mark.parametrize(("model", "engine"), [("mine", "auto"), ("own", OWN)])
def test_a_fingerprint_follows_weights_behind_a_link_in_the_model(model, engine, tmp_path):
    """A folder of weights that several models share, say."""
    for training in ("one", "two"):
        (tmp_path / training).mkdir()
        (tmp_path / training / "variables.index").write_text(training)
    (tmp_path / model).mkdir()
    (tmp_path / model / ("network.bin" if engine == OWN else "saved_model.pb")).write_text("graph")
    versions = set()
    for training in ("one", "two"):
        (tmp_path / model / "variables").symlink_to(tmp_path / training)
        versions.add(name_and_version(ModelConfig(f"{tmp_path}/{model}"), engine)[1])
        (tmp_path / model / "variables").unlink()
    assert len(versions) == 2
