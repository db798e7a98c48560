"""XLA compiles for any device: a CPU shows that boxes stay the same, and that what it cannot compile runs as before."""

import contextlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from models.import_darknet import import_darknet
from models.metadata import read_metadata
from pipeline.commands.import_model import main as import_model
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_detector import load_detector
from tests.conftest import REPO
from tests.detect.test_families import NAMES, picture, save
from tests.forked_jobs import run_forked
from tests.models.darknet_cases import STEM, conv, random_values, write_weights, yolo
from tests.tiny_models import save_model
from tests.without_keras import tf
from tests.yolo_exports import export_yolo

PICTURES = [picture(size_wh, seed)[0] for seed, size_wh in enumerate([(200, 133), (97, 231), (96, 64)])]
NETWORK = (  # with each kind of layer: routes, groups, shortcuts, max pooling, upsampling, two heads
    STEM
    + conv(12, 3, 1, extra="pad=1\ngroups=12\nbatch_normalize=1")
    + "[shortcut]\nfrom=-2\nactivation=mish\n[maxpool]\nsize=3\nstride=1\n"
    + conv(16, extra="pad=1", activation="linear")
    + yolo("0,1", extra="scale_x_y=1.05")
    + "[route]\nlayers=-3\n[upsample]\nstride=2\n"
    + conv(16, extra="pad=1", activation="linear")
    + yolo("2,3")
)


def save_suppressing(folder):
    """A model that suppresses in a loop whose shapes depend on the image, which XLA refuses."""

    def kept(boxes_and_scores):
        boxes, scores = boxes_and_scores
        rows = tf.image.non_max_suppression(boxes, scores, 20)
        left = 20 - tf.shape(rows)[0]
        return tf.pad(tf.gather(boxes, rows), [[0, left], [0, 0]]), tf.pad(tf.gather(scores, rows), [[0, left]])

    def predict(images):
        light = tf.reduce_mean(images, [1, 2, 3])[:, None]
        corner = tf.random.stateless_uniform((60, 2), (1, 2), 0.0, 0.7)
        boxes, scores = (
            tf.concat([corner, corner + 0.2], -1)[None] + 0.0 * light[..., None],
            0.4 + 0.0 * light + tf.linspace(0.0, 0.5, 60),
        )
        types = tf.TensorSpec((20, 4)), tf.TensorSpec((20,))
        boxes, scores = tf.map_fn(kept, (boxes, scores), fn_output_signature=types)
        return {"boxes": boxes, "scores": scores, "classes": 0.0 * scores}

    return save(folder, predict)


def found(path, compiled, **settings):
    detect = DetectConfig(engine="tensorflow", device="cpu", compiled=compiled, score_threshold=0.05, **settings)
    with contextlib.closing(load_detector(ModelConfig(str(path)), detect)) as detector:
        return [result.detections for result in detector.detect(PICTURES)], detector.model.notes


def check_same(path, least=5):
    as_it_is, notes = found(path, "no")
    compiled, no_notes = found(path, "yes")
    assert notes == no_notes == ()
    for a, b in zip(as_it_is, compiled, strict=True):
        assert a.class_ids.tolist() == b.class_ids.tolist()
        np.testing.assert_allclose(a.confidences, b.confidences, atol=1e-4)
        np.testing.assert_allclose(a.boxes_xyxy, b.boxes_xyxy, atol=0.05)
    assert sum(map(len, as_it_is)) > least


@pytest.fixture(scope="module")
def darknet(tmp_path_factory):
    """A version of a tiny Darknet network."""
    folder = tmp_path_factory.mktemp("darknet")
    (folder / "toy.cfg").write_text(NETWORK)
    write_weights(folder / "toy.weights", random_values(NETWORK))
    (folder / "names").write_text("\n".join(NAMES))
    import_darknet(*(str(folder / name) for name in ("toy.cfg", "toy.weights", "names")), str(folder / "m" / "1"))
    return folder / "m" / "1"


@pytest.mark.parametrize("layout", ["4+C,M", pytest.param("M,5+C", marks=pytest.mark.matrix)])
def test_a_third_partys_model_finds_the_same_compiled(tmp_path, layout):
    check_same(export_yolo(tmp_path / "m", layout))


def test_a_darknet_model_finds_the_same_compiled(darknet):
    check_same(darknet)


@pytest.mark.parametrize("imported", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["own", "a copy by import"])
def test_in_float16_its_boxes_are_decoded_in_float32(darknet, tmp_path, imported):
    """Compiled as on a GPU: all but the decoding of boxes is float16. An import keeps what that needs."""
    version, described = str(darknet), read_metadata(str(darknet))
    if imported:
        version = str(tmp_path / "copy" / "1")
        assert import_model([str(darknet), "--output", version]) == 0
        assert read_metadata(version).threshold_inputs and described.threshold_inputs, "else it runs as a third party's"
    loaded = tf.saved_model.load(version)  # owns the variables
    images = tf.constant(np.random.default_rng(0).integers(0, 255, (2, *described.input_hw, 3), np.uint8))
    full, half = (
        tf.function(lambda x, f=loaded.signatures[name]: f(images=x), jit_compile=True)(images)
        for name in ("candidates", "candidates_float16")
    )
    assert {value.dtype for value in half.values()} == {tf.float32}
    np.testing.assert_allclose(half["scores"], full["scores"], atol=0.01)
    difference = np.abs(half["boxes"] - full["boxes"]).max()
    assert 0 < difference < 0.02, "float16 was used, and is near"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "signature", "sizes"),
    [
        ({"precision": "float16"}, "candidates_float16", [1, 8, 32]),
        pytest.param({"precision": "float16", "compiled": "no"}, "candidates", [1, 2, 4, 8, 16, 32], marks=pytest.mark.matrix),
    ],
    ids=["compiled", "not compiled"],
)
def test_on_a_gpu_a_darknet_model_in_float16_runs_its_own_network_compiled(
    darknet, tmp_path, monkeypatch, settings, signature, sizes
):
    """The GPU is absent; without XLA, TensorFlow makes float16 of the float32 network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    printed, errors = tmp_path / "printed", tmp_path / "errors"
    arguments = [str(darknet), json.dumps({"device": "gpu:0", **settings})]
    assert run_forked(arguments, printed, module="tests.detect.absent_gpus", errors=errors) == 0, errors.read_text()
    told = json.loads(printed.read_text())
    assert (told["signature"], told["sizes"]) == (signature, sizes)


def test_what_xla_cannot_compile_runs_as_it_is_and_a_line_says_so(tmp_path):
    def suppressed(images):
        light = tf.reduce_mean(images, [1, 2])[:, None, None, :1]
        boxes = tf.constant([[0.1, 0.1, 0.5, 0.5]])[None, :, None] + 0.0 * light
        answer = tf.image.combined_non_max_suppression(boxes, light[:, :, 0] * 0 + 0.9, 4, 4)
        return {"boxes": answer.nmsed_boxes, "scores": answer.nmsed_scores, "classes": answer.nmsed_classes}

    results, notes = found(save(tmp_path / "m", suppressed), "yes")
    (note,) = notes
    assert "XLA cannot compile it, so it runs as it is: " in note and "CombinedNonMaxSuppression" in note and "\n" not in note
    assert [len(each) for each in results] == [1, 1, 1]


def test_a_model_that_takes_images_at_their_own_size_is_not_compiled(tmp_path):
    def predict(images):
        light = tf.reduce_mean(images, [1, 2, 3])[:, None]
        return {"boxes": tf.zeros((1, 1, 4)) + light[..., None], "scores": 0.0 * light + 0.5}

    saved = save_model(tmp_path / "m", predict, tf.TensorSpec((None, None, None, 3), tf.float32, "images"))
    _, notes = found(saved, "yes")
    assert [note.partition(": ")[2] for note in notes] == ["takes each image at its own size, so XLA does not compile it"]


SWAPS = """
import os, re, shutil, sys
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_detector import load_detector
from tests.detect.test_compiled import PICTURES

model, later, dump = sys.argv[1:]

def modules():
    return len({found[0] for found in map(re.compile(r"module_\\d+").match, os.listdir(dump)) if found})

settings = {"engine": "tensorflow", "device": "cpu", "compiled": "yes", "batch_sizes": (1, 2), "score_threshold": 0.05}
detector = load_detector(ModelConfig(model, model_poll_s=3600.0), DetectConfig(**settings))
started = modules()
shutil.move(later, model + "/2")
detector.watched.poll(), detector.watched.poll()
swapped = modules()
results = [result for count in (1, 2, 3) for result in detector.detect(PICTURES[:count])]
assert {result.model_version for result in results} == {"2"} and all(len(result.detections) for result in results)
print(started, swapped, modules())
os._exit(0)
"""


@pytest.mark.matrix
def test_a_swap_compiles_each_batch_size_before_the_first_image(tmp_path, monkeypatch):
    """XLA writes down each module that it compiles."""
    for place in ("m/1", "later"):
        export_yolo(tmp_path / place, "4+C,M")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path}/dump")
    command = [sys.executable, "-c", SWAPS, f"{tmp_path}/m", f"{tmp_path}/later", f"{tmp_path}/dump"]
    told = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    started, swapped, in_the_end = map(int, told.split())
    assert 2 <= started < swapped == in_the_end


KEPT = """
import glob, os, sys
real = glob.glob
glob.glob = lambda path, **more: ["/dev/nvidia0"] if "nvidia" in path else real(path, **more)
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_detector import load_detector
from pipeline.records import ImageRef

detect = DetectConfig(engine="tensorflow", compiled="yes", batch_sizes=(1, 2), score_threshold=0.05)
for model in sys.argv[2:]:
    detector = load_detector(ModelConfig(model), detect)
    (found,) = detector.detect([ImageRef(sys.argv[1])])
    print(len(found.detections), [note for note in detector.model.notes if "XLA" in note])
os._exit(0)
"""


@pytest.mark.slow
def test_on_a_machine_with_a_gpu_xla_keeps_what_it_has_compiled_and_makes_a_damaged_file_anew(tmp_path, monkeypatch):
    """In a folder for this GPU and its driver. The test needs no GPU: a CPU's programs are kept in the same way."""
    model, cache = export_yolo(tmp_path / "m", "4+C,M"), tmp_path / "cache" / "hybrid-detection-pipeline" / "xla"
    program, photo = tmp_path / "bin" / "nvidia-smi", tmp_path / "photo.png"
    photo.write_bytes(PICTURES[0].content)
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.delenv("TF_XLA_FLAGS", raising=False)

    def job(gpu, *more):
        program.write_text(f"#!/bin/sh\necho '{gpu}'\n")
        program.chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", KEPT, str(photo), str(model), *more], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout

    first = job("NVIDIA T4, 570.1")
    (folder,) = cache.iterdir()
    kept = {path.name: path.stat() for path in folder.glob("*.pb")}
    assert len(kept) >= 2 and first.endswith(" []\n")
    both = job("NVIDIA T4, 570.1", save_suppressing(tmp_path / "suppressing"))
    assert both.startswith(first) and "XLA cannot compile it" in both.removeprefix(first), "which says nothing of the files"
    assert [*cache.iterdir()] == [folder]
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("*.pb")} == {
        n: each.st_mtime_ns for n, each in kept.items()
    }
    for name in kept:
        (folder / name).write_bytes(b"damaged")
    assert job("NVIDIA T4, 570.1") == first
    assert b"damaged" not in [path.read_bytes() for path in folder.glob("*.pb")]
    assert job("NVIDIA T4, 580.2") == first
    assert len([*cache.iterdir()]) == 2, "another driver has a folder of its own"
