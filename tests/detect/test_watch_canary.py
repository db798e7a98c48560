"""Which version is the canary, and who decides what becomes of it: the labels beside the versions, for all processes alike."""

import contextlib
import dataclasses
import json
import threading
from pathlib import Path

import cv2
import numpy as np
import pytest

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_detector import load_detector
from pipeline.errors import ModelError
from pipeline.records import EncodedImage, ImageRef
from pipeline.storage.files import read_file, write_file
from tests.bright_model import export_bright_model
from tests.detect.versioned_models import HW, elsewhere, look, opened_detectors, save_version, upload_version

pytestmark = pytest.mark.usefixtures("warm_preparations")
SHADOW = DetectConfig(batch_sizes=(1, 2), concurrent_batches=2, score_threshold=0.0, canary_share=1.0)
AUTO = dataclasses.replace(SHADOW, canary_auto=True, canary_images=10)


def png():
    pixels = np.zeros((*HW, 3), np.uint8)
    pixels[20:60, 30:90] = 255
    return cv2.imencode(".png", pixels)[1].tobytes()


IMAGES = [EncodedImage(ImageRef(f"{n}.png"), png()) for n in range(12)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Versions 7 and 8, which agree, and 9, which finds its boxes elsewhere."""
    folder = tmp_path_factory.mktemp("saved")
    save_version(folder, 7), save_version(folder, 8), save_version(folder, 9, outputs=elsewhere)
    return folder


@pytest.fixture
def open_detector():
    with opened_detectors() as load:
        yield lambda path, detect=AUTO, version="stable": load(path, version, detect)


def label(path, **labels):
    write_file(f"{path}/labels.json", json.dumps(labels).encode())


def labels_of(path):
    return json.loads(read_file(f"{path}/labels.json"))


@pytest.mark.parametrize(("canary", "place", "outcome"), [(8, "local", "promoted"), (9, "storage", "dropped")])
def test_of_two_processes_the_first_to_have_met_enough_decides_for_both(
    request, saved, tmp_path, open_detector, capfd, canary, place, outcome
):
    """Two detectors stand for them: they share nothing but the folder of versions."""
    path = f"{tmp_path}/detector" if place == "local" else f"gs://{request.getfixturevalue('gcs_bucket').name}/detector"
    upload_version(saved / "7", f"{path}/7")
    upload_version(saved / str(canary), f"{path}/{canary}")
    label(path, stable=7, canary=canary, other=7)
    first, second = open_detector(path), open_detector(path)
    look(first), look(second)
    assert (first.canary.model.version, second.canary.model.version) == (str(canary), str(canary))
    second.detect(IMAGES[:5])
    first.detect(IMAGES)
    first.canary_stats(30.0)
    look(second, 1)
    assert labels_of(path) == {"stable": 7, "canary": canary, "other": 7}  # it has met five
    look(first, 1)
    in_use = canary if outcome == "promoted" else 7
    assert labels_of(path) == {"stable": in_use, "other": 7}
    look(second)
    look(first)
    for detector in (first, second):
        assert (detector.canary, detector.canary_stats().outcome) == (None, outcome)
        assert {result.model_version for result in detector.detect(IMAGES)} == {str(in_use)}
    said = capfd.readouterr().err
    assert said.count(f"canary {outcome}; canary {canary}: ") == 2
    assert said.count("canary promoted") + said.count("canary dropped") == 2


def test_what_is_promoted_by_hand_is_promoted(saved, tmp_path, open_detector, capfd):
    for version in (7, 8):
        upload_version(saved / str(version), tmp_path / str(version))
    label(tmp_path, stable=7, canary=8)
    detector = open_detector(tmp_path, SHADOW)
    look(detector)
    label(tmp_path, stable=8)
    look(detector)
    assert (detector.canary_stats().outcome, detector.model.version) == ("promoted", "8")
    assert "canary promoted; canary 8: 0 images" in capfd.readouterr().err


@pytest.mark.parametrize("version", ["stable", None], ids=["labelled", "newest"])
def test_a_canary_that_is_the_version_in_use_is_one_line(saved, tmp_path, open_detector, capfd, version):
    """Said again only once something has changed."""
    for number in (7, 8):
        upload_version(saved / str(number), tmp_path / str(number))
    label(tmp_path, stable=8, canary=8)
    detector = open_detector(tmp_path, SHADOW, version)
    look(detector, 3)
    assert detector.canary is None
    (line,) = capfd.readouterr().err.splitlines()
    assert line == (
        f"model {tmp_path.name}: labels.json calls version 8 canary, which is the one in use: there is no canary; "
        "--model-version names the one to be in use beside it"
    )
    if version:
        label(tmp_path, stable=7, canary=8)
        look(detector, 3)
        assert (detector.model.version, detector.canary.model.version) == ("7", "8")
        label(tmp_path, stable=8, canary=8)
        look(detector, 3)
        assert capfd.readouterr().err.count("labels.json calls version 8 canary") == 1


def test_a_refused_canary_is_counted(saved, tmp_path, open_detector):
    for number in (7, 8):
        upload_version(saved / str(number), tmp_path / str(number))
    (tmp_path / "8" / "saved_model.pb").write_bytes(b"junk")
    label(tmp_path, stable=7, canary=8)
    detector = open_detector(tmp_path)
    look(detector, 4)
    assert detector.counted_swaps() == {"refusals": 1}


def test_a_job_that_ends_while_its_canary_is_loaded_has_refused_none(saved, tmp_path, open_detector, capfd):
    for number in (7, 8):
        upload_version(saved / str(number), tmp_path / str(number))
    label(tmp_path, stable=7, canary=8)
    detector = open_detector(tmp_path)
    looking = threading.Thread(target=look, args=(detector,))
    looking.start()
    while not detector.watched._preparation and looking.is_alive():
        looking.join(0.01)
    detector.watched.close()
    looking.join()
    assert "refused" not in capfd.readouterr().err
    assert (detector.canary, detector.counted_swaps()) == (None, {})


def start_of(detector):
    """What a detector's figures say of a canary that never came up."""
    figures = detector.canary_stats()
    assert figures.images == 0 and figures.as_dict()["why_no_images"] == figures.why_no_images
    return figures.version, figures.why_no_images


def test_a_canary_is_said_at_the_start(saved, tmp_path, open_detector, capfd):
    """Before it is up, and for the end where the job is done before that; once it is up, its images count."""
    for number in (7, 8):
        upload_version(saved / str(number), tmp_path / str(number))
    label(tmp_path, stable=7, canary=8)
    detector = open_detector(tmp_path, SHADOW)
    said = capfd.readouterr().err
    assert said.startswith(f"model {tmp_path.name}: canary 8 gets 100.0% of the images once it is loaded, after two looks")
    assert said.count("\n") == 1
    assert start_of(detector) == ("8", "it is not loaded yet")
    look(detector)
    assert start_of(detector) == ("8", "no image came while it was loaded")
    detector.detect(IMAGES)
    assert detector.canary_stats(30.0).why_no_images == ""


def test_a_canary_of_another_name_is_refused_at_the_start(saved, tmp_path, open_detector, capfd):
    """Which takes a look at what it says of itself, not minutes of loading."""
    upload_version(saved / "7", tmp_path / "7")
    upload_version(Path(export_bright_model(tmp_path / "other" / "8", resize="stretch")) / "8", tmp_path / "8")
    label(tmp_path, stable=7, canary=8)
    detector = open_detector(tmp_path, SHADOW)
    version, why = start_of(detector)
    assert version == "8" and why.startswith(f"it is refused: model {tmp_path}/8: its name is bright, that of the version in use")
    assert capfd.readouterr().err.count("canary 8 is refused") == 1
    assert detector.counted_swaps() == {"refusals": 1}
    look(detector, 3)
    assert start_of(detector)[1] == why
    assert capfd.readouterr().err == ""


def test_a_canary_that_is_not_there_is_said(saved, tmp_path, open_detector, capfd):
    upload_version(saved / "7", tmp_path / "7")
    label(tmp_path, stable=7, canary=8)
    detector = open_detector(tmp_path, SHADOW)
    assert start_of(detector) == ("8", "labels.json calls version 8 canary, which is not there")
    look(detector, 3)
    assert capfd.readouterr().err == f"model {tmp_path.name}: labels.json calls version 8 canary, which is not there\n"
    upload_version(saved / "8", tmp_path / "8")
    look(detector)
    assert detector.canary.model.version == "8"


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"model_version": "7"}, "model_version 7 is a number; give a label such as stable"),
        ({"model_version": "stable", "model_poll_s": 0.0}, "model_poll_s is 0, so nobody looks for it"),
    ],
    ids=["pinned", "not watched"],
)
def test_a_canary_that_nobody_looks_for_is_said(saved, tmp_path, capfd, model, why):
    for number in (7, 8):
        upload_version(saved / str(number), tmp_path / str(number))
    label(tmp_path, stable=7, canary=8)
    with contextlib.closing(load_detector(ModelConfig(path=str(tmp_path), **model), SHADOW)) as detector:
        assert start_of(detector) == ("8", why)
    assert capfd.readouterr().err == f"model {tmp_path.name}: canary 8: 0 images: {why}\n"


@pytest.mark.parametrize(
    ("model", "mode", "message"),
    [
        ({"model_version": "7"}, "shadow", "canary_auto: expected a label as model_version, such as stable"),
        ({"model_version": "stable"}, "live", "canary_auto: expected canary_mode shadow"),
        ({"model_version": "stable", "model_poll_s": 0.0}, "shadow", "canary_auto: expected a model_poll_s above 0"),
    ],
    ids=["pinned", "live", "not watched"],
)
def test_to_decide_where_nobody_can_is_refused_before_anything_is_loaded(tmp_path, model, mode, message):
    with pytest.raises(ModelError, match=message):
        load_detector(ModelConfig(path=str(tmp_path), **model), dataclasses.replace(AUTO, canary_mode=mode))
