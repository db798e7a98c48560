"""Versions of a model: which is wanted, and how one takes the place of another while images are under way."""

import dataclasses
import shutil

import cv2
import numpy as np
import pytest

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.detector import load_detector
from pipeline.records import EncodedImage, ImageRef
from tests.detect.versioned_models import HW, save_version, version_of

CPU = DetectConfig(batch_sizes=(1, 2, 4), streams=2, score_threshold=0.0)
NEVER = 1e6  # seconds: tests look themselves


def image(name="a"):
    pixels = np.zeros((*HW, 3), np.uint8)
    pixels[20:60, 30:90] = 255
    return EncodedImage(ImageRef(name), cv2.imencode(".png", pixels)[1].tobytes())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A store of versions 6 to 9, of which tests copy."""
    folder = tmp_path_factory.mktemp("saved")
    for version in (6, 7, 8, 9):
        save_version(folder, version)
    return folder


@pytest.fixture
def model(tmp_path, saved):
    """A folder with version 7."""
    return release(saved, tmp_path / "detector", 7)


def release(saved, path, version):
    shutil.copytree(saved / str(version), path / str(version))
    return path


@pytest.fixture
def open_detector():
    opened = []

    def load(path, version=None, **settings):
        model = ModelConfig(path=str(path), model_version=version, model_poll_s=NEVER)
        opened.append(load_detector(model, dataclasses.replace(CPU, **settings)))
        return opened[-1]

    yield load
    for detector in opened:
        detector.close()


def look(detector, times=2):
    for _ in range(times):
        detector.watched.look()


def test_a_newer_version_is_used_once_two_looks_found_it_the_same(model, saved, open_detector, capfd):
    detector = open_detector(model)
    release(saved, model, 8)
    look(detector, 1)
    assert detector.model.version == "7"
    look(detector, 1)
    assert detector.model.version == "8"
    result = detector.detect([image()])[0]
    assert (result.model_version, version_of(result)) == ("8", "8")
    look(detector)
    said = capfd.readouterr().err.splitlines()
    assert [line.split(", loaded in ")[0] for line in said] == ["model detector: version 7 -> 8"]
    assert detector.counted_swaps() == {"swaps": 1}
    assert detector.counted_swaps() == {}
