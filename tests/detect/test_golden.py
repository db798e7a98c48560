"""Golden images: a version that does not find in them what a trusted one has found is not used."""

import contextlib
import dataclasses
import json
import shutil
import threading
from pathlib import Path

import cv2
import numpy as np
import pytest

from models import digits
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.golden import GOLDEN, GoldenImage, disagreement, read_golden
from pipeline.detect.load_detector import load_detector
from pipeline.detect.saved_model import name_and_version
from pipeline.detect.write_golden import main, write_golden
from pipeline.errors import ModelError
from pipeline.records import DeadLetter, DetectedImage, Detections, EncodedImage, ImageRef
from pipeline.storage.files import write_file
from tests.detect.versioned_models import HW, save_version, upload_version
from tests.fixtures import REPO
from tests.tiny_models import bright_box

CPU = DetectConfig(batch_sizes=(1, 2), concurrent_batches=2, score_threshold=0.0)
PLAIN = DetectConfig()
SAMPLES = REPO / "models" / "digits" / "samples"


def row_of(*found):
    """A golden row; of each object its left edge, class and confidence."""
    detections = [
        {"box_xyxy": [x, 0.0, x + 10.0, 10.0], "class_id": ord(name), "class_name": name, "confidence": confidence}
        for x, name, confidence in found
    ]
    return {"image": {"uri": "a.png"}, "detections": detections}


def golden_of(*found, name="a.png", iou_threshold=0.45):
    row = row_of(*found)
    return GoldenImage(name, name.encode(), {**row, "image": {"uri": name}}, 0.25, iou_threshold)


def finding(*found):
    """Detects the same objects in each image."""

    def detect_in(images):
        boxes = np.array([[x, 0, x + 10, 10] for x, _, _ in found], np.float32).reshape(-1, 4)
        scores = np.array([confidence for *_, confidence in found], np.float32)
        names = tuple(name for _, name, _ in found)
        detections = Detections(boxes, np.array([ord(name) for name in names], np.int32), scores, names)
        return [DetectedImage(image.ref, 100, 100, "m", "1", detections) for image in images]

    return detect_in


A, B, FAINT = (0.0, "a", 0.9), (30.0, "b", 0.8), (60.0, "a", 0.3)


@pytest.mark.parametrize(
    ("expected", "found", "settings", "agrees"),
    [
        pytest.param([], [], {}, False, id="nothing, as expected, which shows nothing"),
        pytest.param([A], [A], {"classes": ("b",)}, False, id="nothing of the class that the job asks for"),
        pytest.param([], [], {"min_agreement": 0.0}, True, id="nothing, and nobody looks"),
        pytest.param([A, B], [A, B], {}, True, id="the same"),
        pytest.param([A, B], [(1.0, "a", 0.6), (29.0, "b", 0.4)], {}, True, id="about the same, less sure"),
        pytest.param([A, B], [A], {}, False, id="one of two"),
        pytest.param([A, B], [A, (30.0, "c", 0.8)], {}, False, id="another class"),
        pytest.param([A, B], [A, (40.0, "b", 0.8)], {}, False, id="another place"),
        pytest.param([], [A], {}, False, id="something where nothing is"),
        pytest.param([A], [], {}, False, id="nothing where something is"),
        pytest.param([A, B], [A], {"min_agreement": 0.66}, True, id="one of two is enough here"),
        pytest.param([A, B], [], {"min_agreement": 0.0}, True, id="nobody looks"),
        pytest.param([A, FAINT], [A], {"score_threshold": 0.5}, True, id="the job leaves out what is faint"),
        pytest.param([A], [A, (60.0, "a", 0.2)], {"score_threshold": 0.1}, True, id="nothing was known of what is fainter"),
        pytest.param([A, B], [B], {"classes": ("b",)}, True, id="the job asks for one class"),
        pytest.param([A, B], [A], {"max_detections": 1}, True, id="the job asks for one object"),
    ],
)
def test_what_is_found_is_compared_with_what_is_expected(expected, found, settings, agrees):
    problem = disagreement([golden_of(*expected)], finding(*found), dataclasses.replace(PLAIN, **settings))
    assert (problem is None) == agrees


def test_the_agreement_is_that_of_all_golden_images_and_the_worst_is_named():
    golden = [golden_of(A, B, name="0001-good.png"), golden_of(A, name="0002-bad.png", iou_threshold=0.7)]
    assert disagreement(golden, finding(A, B), PLAIN) == (
        "its agreement with its golden images is 0.857, expected 0.9 or more (min_agreement); it differs most in 0002-bad.png; "
        "they were made at iou_threshold 0.45 and 0.7, this job has 0.45"
    )


def test_a_golden_image_that_fails_speaks_against_the_version():
    def detect_in(images):
        return [DeadLetter(image.ref, "detect", "model_failed", "it broke") for image in images]

    assert disagreement([golden_of(A)], detect_in, PLAIN) == "fails on its golden image a.png: it broke"


def test_many_golden_images_are_looked_at_a_few_at_a_time():
    sizes = []

    def detect_in(images):
        sizes.append(len(images))
        return finding(A)(images)

    assert disagreement([golden_of(A, name=f"{n}.png") for n in range(10)], detect_in, PLAIN) is None
    assert sizes == [4, 4, 2]


def as_elsewhere(images):
    """Like a version, but each box lies elsewhere."""
    import tensorflow as tf

    return {"boxes": 1.0 - bright_box(images)[:, None], "scores": tf.fill([tf.shape(images)[0], 1], 0.9)}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for n, x in enumerate((10, 30)):
        pixels = np.zeros((*HW, 3), np.uint8)
        pixels[20:60, x : x + 40] = 255
        cv2.imwrite(str(folder / f"{n}.png"), pixels)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory, images):
    """Versions 7 and 8, which agree, and 9, which does not; 8 and 9 have what 7 has found."""
    folder = tmp_path_factory.mktemp("models") / "detector"
    save_version(folder, 7), save_version(folder, 8), save_version(folder, 9, outputs=as_elsewhere)
    for version in (8, 9):
        write_golden(f"{folder}/7", [f"{images}/"], f"{folder}/{version}", 0.05, 0.45)
    return folder


def test_the_images_and_what_was_found_lie_in_the_version(model, images):
    folder = model / "8" / GOLDEN
    assert sorted(path.name for path in folder.iterdir()) == ["0001-0.png", "0002-1.png", "detections.jsonl"]
    assert (folder / "0002-1.png").read_bytes() == (images / "1.png").read_bytes()
    first, _ = map(json.loads, (folder / "detections.jsonl").read_text(encoding="utf-8").splitlines())
    assert first["image"] == {"uri": "0001-0.png", "width": HW[1], "height": HW[0]}
    assert (first["score_threshold"], first["iou_threshold"], first["model"]["version"]) == (0.05, 0.45, "7")
    assert [(one["box_xyxy"], one["confidence"]) for one in first["detections"]] == [([10, 20, 50, 60], 0.07)]
    assert [path.name for path in (model / "8").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("version", ["7", "8"])
def test_a_version_that_agrees_or_has_none_is_used(model, version):
    detector = load_detector(ModelConfig(path=f"{model}/{version}"), CPU)
    detector.close()
    assert detector.model.version == version


def test_a_version_that_does_not_agree_is_not_used(model):
    with pytest.raises(ModelError) as caught:
        load_detector(ModelConfig(path=f"{model}/9"), CPU)
    assert str(caught.value) == (
        f"model {model}/9: its agreement with its golden images is 0.000, expected 0.9 or more (min_agreement); "
        "it differs most in 0001-0.png"
    )
    load_detector(ModelConfig(path=f"{model}/9"), dataclasses.replace(CPU, min_agreement=0.0)).close()


def test_a_job_does_not_start_on_a_version_that_does_not_agree(model, images, tmp_path, run_job):
    places = ("--input", f"{images}/", "--output", tmp_path / "out", "--model", f"{model}/9")
    code, _, said = run_job(*places)
    assert (code, said.splitlines()[-1][:70]) == (2, f"error: model {model}/9: its agreement with"[:70])
    assert not list((tmp_path / "out").glob("detections/*"))
    assert run_job(*places, "--min-agreement", 0)[0] == 0


def test_a_running_detector_keeps_its_version_when_the_next_does_not_agree(model, tmp_path, capfd):
    mine = tmp_path / "detector"
    shutil.copytree(model / "8", mine / "8")
    detector = load_detector(ModelConfig(path=str(mine), model_poll_s=1e6), CPU)
    try:
        shutil.copytree(model / "9", mine / "9")
        detector.watched.look()
        detector.watched.look()
        assert detector.model.version == "8"
        assert detector.counted_swaps() == {"refusals": 1}
    finally:
        detector.close()
    assert "version 9 is refused, version 8 stays: its agreement with its golden images is 0.000" in capfd.readouterr().err


ROWS = Path(GOLDEN, "detections.jsonl")
SHARD = Path("variables", "variables.data-00000-of-00002")


@pytest.mark.parametrize(
    ("missing", "there"),
    [pytest.param(ROWS, None, id="golden rows"), pytest.param("variables/variables.data-00001-of-00002", SHARD, id="variables")],
)
@pytest.mark.parametrize("place", ["local", "storage"])
def test_a_version_that_is_not_all_there_is_left_alone_at_the_start_as_later(
    model, request, tmp_path, capfd, place, missing, there
):
    """It is copied file by file, and checked by what it may lack as yet."""
    mine = f"gs://{request.getfixturevalue('gcs_bucket').name}/m" if place == "storage" else str(tmp_path / "m")
    upload_version(model / "7", f"{mine}/7")
    upload_version(model / "9", f"{mine}/9", without="variables.data-00000-of-00001" if there else ROWS.name)
    if there:
        write_file(f"{mine}/9/{there}", b"")
    settings = ModelConfig(path=mine, model_poll_s=1e6)
    assert name_and_version(settings)[1] == "7"
    assert capfd.readouterr().err == f"model {mine}: version 9 is left alone, since it lacks {missing} (yet)\n".replace(
        "variables/variables.data-00001-of-00002", "1 of 2 files variables/variables.data-*"
    )
    with contextlib.closing(load_detector(settings, CPU)) as detector:
        assert detector.model.version == "7"
        assert detector.watched
        detector.watched.look(), detector.watched.look()
        assert (detector.model.version, detector.counted_swaps()) == ("7", {})
        if there:
            return
        write_file(f"{mine}/9/{ROWS}", (model / "9" / ROWS).read_bytes())
        detector.watched.look(), detector.watched.look()
        assert detector.counted_swaps() == {"refusals": 1}
    with pytest.raises(ModelError, match=r"is 0\.000, expected 0\.9"):
        load_detector(ModelConfig(path=f"{mine}/9"), CPU)


def test_a_model_that_is_named_by_itself_and_not_all_there_is_one_clear_line(model, tmp_path):
    shutil.copytree(model / "8", tmp_path / "8")
    (tmp_path / "8" / ROWS).unlink()
    for path, version in ((tmp_path / "8", None), (tmp_path, "8")):
        with pytest.raises(ModelError, match=r"detections\.jsonl") as caught:
            load_detector(ModelConfig(path=str(path), model_version=version), CPU)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("before", [True, False], ids=["beside another one", "the only one"])
def test_a_version_that_changes_while_it_is_loaded_is_not_taken(model, tmp_path, capfd, before):
    """Two looks must find it unchanged, at the start as well; the load lies between them."""
    if before:
        shutil.copytree(model / "7", tmp_path / "7")
    shutil.copytree(model / "8", tmp_path / "8")
    growing, written, ended = tmp_path / "8" / "assets.extra" / "more", threading.Event(), threading.Event()

    def copy() -> None:
        with growing.open("wb", buffering=0) as file:
            while not ended.wait(0.01):
                file.write(b"x")
                written.set()

    copying = threading.Thread(target=copy)
    copying.start()
    try:
        written.wait()
        if not before:
            with pytest.raises(ModelError, match="its files changed while it was loaded"):
                load_detector(ModelConfig(path=str(tmp_path), model_poll_s=1e6), CPU)
            return
        detector = load_detector(ModelConfig(path=str(tmp_path), model_poll_s=1e6), CPU)
    finally:
        ended.set()
        copying.join()
    with contextlib.closing(detector):
        assert detector.model.version == "7"
        assert "version 8 is refused, version 7 stays: its files changed while it was loaded" in capfd.readouterr().err
        assert detector.watched
        detector.watched.look(), detector.watched.look()
        assert detector.model.version == "8"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda folder: (folder / "0001-0.png").unlink(), "No such file", id="no image"),
        pytest.param(lambda folder: (folder / "detections.jsonl").write_text("{"), "line 1 is not JSON", id="no rows"),
        pytest.param(
            lambda folder: (folder / "detections.jsonl").write_text('{"image": {"uri": "../a"}, "detections": []}'),
            "expected names of files beside",
            id="an image elsewhere",
        ),
        pytest.param(
            lambda folder: (folder / "detections.jsonl").write_text('{"image": {"uri": "a"}, "detections": []}'),
            "expected score_threshold and iou_threshold in each row",
            id="no thresholds",
        ),
    ],
)
def test_golden_images_that_cannot_be_read_are_one_clear_line(model, tmp_path, damage, message):
    folder = shutil.copytree(model / "8", tmp_path / "8")
    damage(Path(folder, GOLDEN))
    with pytest.raises(ModelError, match=message) as caught:
        load_detector(ModelConfig(path=str(folder)), CPU)
    assert str(caught.value).startswith(f"model {folder}: {GOLDEN} cannot be read: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--out", "{model}/8"], "{model}/8/assets.extra/golden is there already; remove it first", id="twice"),
        pytest.param(["--out", "{model}"], "expected the folder of a model on this machine as --out", id="no version"),
        pytest.param(["--out", "gs://b/m/1"], "expected the folder of a model on this machine as --out", id="elsewhere"),
        pytest.param(["{model}/labels.png"], "labels.png", id="no such image"),
        pytest.param([], "{model}/7 finds no object in 1 images, which would show nothing", id="no object is sure enough"),
        pytest.param(["{broken}"], "1 images cannot be used, such as {broken}: ", id="no image"),
    ],
)
def test_the_command_says_in_a_line_why_it_writes_nothing(model, images, tmp_path, capsys, arguments, message):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"none")
    texts = [text.format(model=model, broken=broken) for text in (message, *arguments)]
    assert main(["--model", f"{model}/7", f"{images}/0.png", *texts[1:]]) == 2
    said = capsys.readouterr().err
    assert texts[0] in said
    assert said.count("\n") == 1
    assert not (model / "7" / GOLDEN).exists()


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.matrix), "bfloat16"])
def test_a_lower_precision_passes(tmp_path, precision):
    """The bundled detector at bfloat16 finds what it has found at float32 (the same where the CPU has no bfloat16)."""
    version = shutil.copytree(Path(digits.FOLDER, "1"), tmp_path / "digits" / "1")
    assert main(["--model", str(version), *(str(SAMPLES / f"scene_{n:03}.jpg") for n in range(8))]) == 0
    golden = read_golden(str(version))
    assert sum(len(image.row["detections"]) for image in golden) > 20
    load_detector(ModelConfig(path=str(version)), DetectConfig(precision=precision)).close()


def test_images_of_one_name_are_kept_apart(model, tmp_path, images):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(images / "0.png", tmp_path / folder / "same.png")
    version = shutil.copytree(model / "7", tmp_path / "7")
    write_golden(str(version), [f"{tmp_path}/a/same.png", f"{tmp_path}/b/same.png"], str(version), 0.05, 0.45)
    detector = load_detector(ModelConfig(path=str(version)), CPU)
    found = detector.detect([EncodedImage(ImageRef("x"), image.content) for image in detector.model.golden])
    detector.close()
    assert [image.name for image in detector.model.golden] == ["0001-same.png", "0002-same.png"]
    assert [len(result.detections.class_ids) for result in found] == [1, 1]
