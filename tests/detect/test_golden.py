"""Golden images: a version that does not find in them what a trusted one has found is not used."""

import dataclasses
import json
import shutil

import cv2
import numpy as np
import pytest

from pipeline.commands.golden import main
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect import load_model
from pipeline.detect.golden import GOLDEN, GoldenImage, disagreement
from pipeline.detect.load_detector import load_detector
from pipeline.detect.write_golden import write_golden
from pipeline.errors import ModelError
from pipeline.log_lines import log_lines
from pipeline.records import DeadLetter, DetectedImage, Detections
from tests.detect.versioned_models import FAST, HW, look, save_version, write_version

PLAIN = DetectConfig()


def golden_of(*found, name="a.png", iou_threshold=0.45):
    """A golden image; of each object its left edge, class and confidence."""
    detections = [
        {"box_xyxy": [x, 0.0, x + 10.0, 10.0], "class_id": ord(name), "class_name": name, "confidence": confidence}
        for x, name, confidence in found
    ]
    thresholds = {"score_threshold": 0.25, "iou_threshold": iou_threshold}
    return GoldenImage(name, name.encode(), {"image": {"uri": name}, "detections": detections, **thresholds})


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
        pytest.param([A, B], [(1.0, "a", 0.6), (29.0, "b", 0.4)], {}, True, id="about the same, less sure"),
        pytest.param([A, B], [A], {}, False, id="one of two"),
        pytest.param([A, B], [A, (30.0, "c", 0.8)], {}, False, id="another class"),
        pytest.param([A, B], [A, (40.0, "b", 0.8)], {}, False, id="another place"),
        pytest.param([], [A], {}, False, id="something where nothing is"),
        pytest.param([A, B], [A], {"min_agreement": 0.66}, True, id="one of two is enough here"),
        pytest.param([A, B], [], {"min_agreement": 0.0}, True, id="nobody looks"),
        pytest.param([A, FAINT], [A], {"score_threshold": 0.5}, True, id="the job leaves out what is faint"),
        pytest.param([A], [A, (60.0, "a", 0.2)], {"score_threshold": 0.1}, True, id="nothing was known of what is fainter"),
        pytest.param([A, B], [B], {"classes": ("b",)}, True, id="the job asks for one class"),
        pytest.param([A, B], [A], {"max_detections": 1}, True, id="the job asks for one object"),
        pytest.param([A], [A, (0.0, "b", 0.5)], {"labels_per_box": "several"}, True, id="a second class of the same box"),
    ],
)
def test_what_is_found_is_compared_with_what_is_expected(expected, found, settings, agrees):
    problem = disagreement([golden_of(*expected)], finding(*found), dataclasses.replace(PLAIN, **settings))
    assert (problem is None) == agrees


def test_the_agreement_is_that_of_all_golden_images_and_the_worst_is_named():
    golden = [golden_of(A, B, name="0001-good.png"), golden_of(A, name="0002-bad.png", iou_threshold=0.7)]
    assert disagreement(golden, finding(A, B), PLAIN) == (
        "its agreement with its golden images is 0.857, expected 0.9 or more (min_agreement); it differs most in 0002-bad.png, "
        "made at iou_threshold 0.7, here 0.45"
    )


def test_a_golden_image_that_fails_speaks_against_the_version():
    def detect_in(images):
        return [DeadLetter(image.ref, "detect", "model_failed", "it broke") for image in images]

    assert disagreement([golden_of(A)], detect_in, PLAIN) == "fails on its golden image a.png: it broke"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for n, x in enumerate((10, 30)):
        pixels = np.zeros((*HW, 3), np.uint8)
        pixels[20:60, x : x + 40] = 255
        (folder / str(n)).mkdir()
        cv2.imwrite(str(folder / str(n) / "a.png"), pixels)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory, images):
    """Versions 7 and 8, which agree, and 9, which does not; 8 and 9 have what 7 has found."""
    folder = tmp_path_factory.mktemp("models") / "detector"
    save_version(folder, 7)
    write_version(folder, 8, classes=["class 0"])
    write_version(folder, 9, classes=["class 0"], box=[0, 0, 10, 10])
    write_golden(f"{folder}/7", [f"{images}/"], f"{folder}/8", 0.05, 0.45)
    shutil.copytree(folder / "8" / GOLDEN, folder / "9" / GOLDEN)
    return folder


def test_the_images_and_what_was_found_lie_in_the_version(model, images):
    folder = model / "8" / GOLDEN
    assert sorted(path.name for path in folder.iterdir()) == ["0001-a.png", "0002-a.png", "detections.jsonl"]
    assert (folder / "0002-a.png").read_bytes() == (images / "1" / "a.png").read_bytes()
    first, _ = map(json.loads, (folder / "detections.jsonl").read_text(encoding="utf-8").splitlines())
    assert first["image"] == {"uri": "0001-a.png", "width": HW[1], "height": HW[0]}
    assert (first["score_threshold"], first["iou_threshold"], first["model"]["version"]) == (0.05, 0.45, "7")
    assert [(one["box_xyxy"], one["confidence"]) for one in first["detections"]] == [([10, 20, 50, 60], 0.07)]
    assert [path.name for path in (model / "8").iterdir() if path.name.startswith(".")] == []


@log_lines()
def test_a_version_is_refused_while_its_golden_images_lack_their_rows_and_where_it_does_not_agree(
    model, tmp_path, open_detector, capfd
):
    """At the start, and later once the rest has been copied."""
    for version in ("8", "9"):
        shutil.copytree(model / version, tmp_path / version)
    rows = tmp_path / "9" / GOLDEN / "detections.jsonl"
    rows.rename(tmp_path / "away")
    detector = open_detector(tmp_path)
    assert f"9 is refused, version 8 stays: {GOLDEN} cannot be read: " in capfd.readouterr().err
    look(detector)
    (tmp_path / "away").rename(rows)
    look(detector, 4)
    assert (detector.model.version, detector.counted_swaps()) == ("8", {"refusals": 2})
    (line,) = capfd.readouterr().err.splitlines()
    assert "version 9 is refused, version 8 stays: its agreement with its golden images is 0.000" in line


@log_lines()
def test_a_version_that_changes_while_it_is_loaded_is_not_taken(tmp_path, open_detector, capfd):
    """Two looks must find it unchanged, at the start as well; the load lies between them."""
    write_version(tmp_path, 8, grows=True)
    with pytest.raises(ModelError, match="its files changed while it was loaded"):
        open_detector(tmp_path)
    write_version(tmp_path, 7)
    write_version(tmp_path, 9, grows=True)
    detector = open_detector(tmp_path)
    assert detector.model.version == "8"
    assert "version 9 is refused, version 8 stays: its files changed while it was loaded" in capfd.readouterr().err
    look(detector)
    assert detector.model.version == "9"


def test_a_version_on_storage_that_is_written_again_before_it_is_copied_is_not_taken(strict_gcs_bucket, monkeypatch):
    path, store_of = f"gs://{strict_gcs_bucket.name}/models", load_model.store_of
    write_version(path, 8)
    monkeypatch.setattr(load_model, "store_of", lambda file: write_version(path, 8) and store_of(file))
    for use in (lambda: load_detector(ModelConfig(path=f"{path}/8"), FAST), load_model.local_copy(f"{path}/8").__enter__):
        with pytest.raises(ModelError, match="its files changed while it was loaded"):
            use()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("0001-a.png", None, "No such file", id="no image"),
        pytest.param("detections.jsonl", None, r"detections\.jsonl", id="no rows"),
        pytest.param("detections.jsonl", "{", "line 1 is not JSON", id="no JSON"),
        pytest.param(
            "detections.jsonl", '{"image": {"uri": "../a"}, "detections": []}', "names of files beside", id="an image elsewhere"
        ),
        pytest.param(
            "detections.jsonl", '{"image": {"uri": "a"}, "detections": []}', "expected score_threshold and", id="no thresholds"
        ),
    ],
)
def test_golden_images_that_cannot_be_read_are_one_clear_line(model, tmp_path, name, content, message):
    folder = shutil.copytree(model / "8", tmp_path / "8")
    (folder / GOLDEN / name).unlink()
    if content:
        (folder / GOLDEN / name).write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        load_detector(ModelConfig(path=str(folder)), FAST)
    assert str(caught.value).startswith(f"model {folder}: {GOLDEN} cannot be read: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--out", "{model}/8"], "{model}/8/assets.extra/golden is there already; remove it first", id="twice"),
        pytest.param(["--out", "{model}"], "expected the folder of a model on this machine as --out", id="no version"),
        pytest.param(["--out", "gs://b/m/1"], "expected the folder of a model on this machine as --out", id="elsewhere"),
        pytest.param(["{model}/labels.png"], "labels.png", id="no such image"),
        pytest.param([], "{model}/7 finds no object in 1 image, which would show nothing", id="no object is sure enough"),
        pytest.param(["{broken}"], "1 image cannot be used, such as {broken}: ", id="no image"),
    ],
)
def test_the_command_says_in_a_line_why_it_writes_nothing(model, images, tmp_path, capsys, arguments, message):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"none")
    texts = [text.format(model=model, broken=broken) for text in (message, *arguments)]
    assert main(["--model", f"{model}/7", f"{images}/0/a.png", *texts[1:]]) == 2
    said = capsys.readouterr().err
    assert texts[0] in said
    assert said.count("\n") == 1
    assert not (model / "7" / GOLDEN).exists()
