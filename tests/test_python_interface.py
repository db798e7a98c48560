"""What Python code gives the detector without Beam: paths, arrays, Pillow's images and bytes; and settings that are wrong."""

import contextlib
import dataclasses
import re
import threading
from pathlib import Path

import cv2
import numpy as np
import PIL.Image
import pytest

from pipeline import (
    DeadLetter,
    DetectConfig,
    DetectedImage,
    DetectObjects,
    EncodedImage,
    ImageRef,
    ModelConfig,
    detect_images,
    load_detector,
)
from pipeline.config import ReadConfig
from pipeline.detect.batcher import Batcher
from pipeline.detect.loaded_model import LoadedModel
from pipeline.errors import ConfigError, ModelError
from tests.detect.test_engines import BOX, HW, METADATA, NumPyEngine, image, load_toy
from tests.processes import wait_until

PIXELS = np.zeros((*HW, 3), np.uint8)
PIXELS[BOX[1] : BOX[3], BOX[0] : BOX[2], 0] = 255  # a red rectangle; the toy looks at the red channel
SIDEWAYS = 6  # EXIF: turn by 90 degrees to the right


@pytest.fixture(scope="module")
def detector():
    with contextlib.closing(load_detector(load_toy, feeder_processes=1)) as detector:
        yield detector


def pillow(orientation: int = 1) -> PIL.Image.Image:
    """The photo as Pillow opens it; stored turned to the left where EXIF says so."""
    picture = PIL.Image.fromarray(np.rot90(PIXELS) if orientation == SIDEWAYS else PIXELS)
    picture.getexif()[0x0112] = orientation
    return picture


@pytest.fixture
def photo(tmp_path):
    (tmp_path / "photo.png").write_bytes(cv2.imencode(".png", PIXELS[..., ::-1])[1].tobytes())
    return tmp_path / "photo.png"


@pytest.mark.parametrize(
    ("kind", "uri"),
    [
        pytest.param(str, "photo.png", id="path"),
        pytest.param(Path, "photo.png", id="Path"),
        pytest.param(lambda path: f"file://{path}", "photo.png", id="file URI"),
        pytest.param(Path.read_bytes, "images[1]", id="bytes"),
        pytest.param(lambda path: bytearray(path.read_bytes()), "images[1]", id="bytearray"),
        pytest.param(lambda path: PIXELS, "images[1]", id="array"),
        pytest.param(lambda path: PIXELS[::-1][::-1], "images[1]", id="array that is a view"),
        pytest.param(PIL.Image.open, "images[1]", id="Pillow's file"),
        pytest.param(lambda path: pillow(), "images[1]", id="Pillow's image"),
        pytest.param(lambda path: pillow(SIDEWAYS), "images[1]", id="Pillow's image with an orientation"),
        pytest.param(lambda path: PIL.Image.open(path).convert("RGBA"), "images[1]", id="Pillow's image with alpha"),
        pytest.param(lambda path: ImageRef(str(path)), "photo.png", id="ImageRef"),
        pytest.param(lambda path: EncodedImage(ImageRef("mine"), path.read_bytes()), "mine", id="EncodedImage"),
    ],
)
def test_an_image_is_given_as_people_have_it(kind, uri, photo, detector):
    """Each kind finds the red rectangle where it is; those without a name have their place in the iterable as one."""
    first, found = detect_images((one for one in (np.zeros((*HW, 3), np.uint8), kind(photo))), detector)
    assert isinstance(found, DetectedImage) and (found.width, found.height) == HW[::-1]
    np.testing.assert_array_equal(found.detections.boxes_xyxy, [BOX])
    assert (first.ref.uri, len(first.detections), found.ref.uri.rpartition("/")[2]) == ("images[0]", 0, uri)


def test_an_array_of_opencv_is_bgr_where_it_is_said_to_be(detector):
    """The toy sees the red channel only: the same array is empty as RGB."""
    as_rgb, *_ = detect_images([PIXELS[..., ::-1]], detector)
    as_bgr, *_ = detect_images([PIXELS[..., ::-1]], detector, bgr=True)
    assert (len(as_rgb.detections), len(as_bgr.detections)) == (0, 1)


def test_an_array_of_several_images_is_images(detector):
    assert [len(found.detections) for found in detect_images(np.stack([PIXELS, PIXELS * 0, PIXELS]), detector)] == [1, 0, 1]


def test_a_file_that_is_not_there_is_a_dead_letter(detector):
    (letter,) = detect_images(["absent.jpg"], detector)
    assert isinstance(letter, DeadLetter) and (letter.stage, letter.reason) == ("read", "not_found")


@pytest.mark.parametrize(
    ("images", "message"),
    [
        pytest.param([None], r"images\[0\]: expected a path, .* got None$", id="None"),
        pytest.param(["absent.jpg", 5], r"images\[1\]: expected a path, .* got an int$", id="number"),
        pytest.param([PIXELS / 255], r"images\[0\]: .* got an array \(48, 64, 3\) float64$", id="array of floats"),
        pytest.param([PIXELS[..., 0]], r"images\[0\]: .* got an array \(48, 64\) uint8$", id="array of one channel"),
        pytest.param([PIXELS[:0]], r"images\[0\]: .* got an array \(0, 64, 3\) uint8$", id="array without pixels"),
        pytest.param("photo.jpg", r"^expected several images, .* got a str; give \[image\] for one image$", id="one path"),
        pytest.param(Path("photo.jpg"), "got a PosixPath; give", id="one Path"),
        pytest.param(PIXELS, r"got an array \(48, 64, 3\) uint8; give", id="one array"),
        pytest.param(b"\xff\xd8\xff", "got a bytes; give", id="bytes of one image"),
        pytest.param(pillow(), "got an Image; give", id="one image of Pillow"),
        pytest.param(image("a"), "got an EncodedImage; give", id="one record"),
        pytest.param(None, "got None", id="nothing"),
    ],
)
def test_what_is_no_image_is_a_type_error_that_names_it(images, message, detector):
    with pytest.raises(TypeError, match=message):
        list(detect_images(images, detector))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(
            lambda: DetectConfig(score_threshhold=0.3), "'score_threshhold'; did you mean 'score_threshold'?", id="typo"
        ),
        pytest.param(lambda: DetectConfig(conf=0.3), "'conf'; did you mean 'score_threshold'?", id="another tool's"),
        pytest.param(lambda: DetectConfig(score_threshold=3), "score_threshold: expected at most 1, got 3", id="value"),
        pytest.param(lambda: ModelConfig("m", nam="x"), "unknown key 'nam'; did you mean 'name'?", id="typo of a model's key"),
        pytest.param(lambda: ReadConfig(fps=0), "ReadConfig: fps: expected at least 0.001, got 0", id="another section"),
        pytest.param(lambda: DetectObjects("digits", score_threshhold=0.3), "did you mean 'score_threshold'?", id="transform"),
        pytest.param(lambda: DetectObjects("digits", score_threshold=3), "expected at most 1, got 3", id="value, transform"),
        pytest.param(lambda: DetectObjects("digits", engine="nope"), "expected .*tensorflow, .*got 'nope'", id="engine"),
        pytest.param(lambda: DetectObjects(None), "expected a path, a ModelConfig or a function, got None", id="no model"),
        pytest.param(lambda: load_detector("digits", score_threshhold=0.3), "did you mean 'score_threshold'?", id="detector"),
        pytest.param(lambda: load_detector("", score_threshold=0.3), "no model: expected", id="empty path"),
        pytest.param(lambda: dataclasses.replace(DetectConfig(), device="x"), "expected auto, cpu, gpu", id="replaced"),
    ],
)
def test_a_wrong_setting_in_python_is_one_line(make, message):
    with pytest.raises(ConfigError, match=re.escape(message).replace(r"\.\*", ".*")) as raised:
        make()
    assert "\n" not in str(raised.value) and "pydantic" not in str(raised.value)


class ClosesOnce(NumPyEngine):
    """As engines do that give their session back."""

    def close(self):
        assert not self.closed
        super().close()


def test_a_closed_detector_is_one_line_for_each_thread_and_may_be_closed_again():
    """Images that were under way are detected; a service may close it while others ask."""
    detector = load_detector(lambda _detect: LoadedModel(METADATA, "7", Batcher(ClosesOnce(), HW)), feeder_processes=1)
    ended = []

    def detect_on():
        try:
            while True:
                ended.append([len(found.detections) for found in detector.detect([image("a", box=BOX)])])
        except BaseException as err:  # noqa: BLE001  the thread ends, and the test looks at it
            ended.append(err)

    threads = [threading.Thread(target=detect_on) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(ended) > len(threads))
    detector.close()
    for thread in threads:
        thread.join()
    errors = [each for each in ended if each != [1]]
    assert [(type(each), str(each)) for each in errors] == [(ModelError, "the detector is closed")] * len(threads)
    detector.close()
    with pytest.raises(ModelError, match="the detector is closed"):
        next(detect_images([PIXELS], detector))
