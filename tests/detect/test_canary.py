"""A canary: a share of the images meets another version, and no image suffers from it; labels beside the versions say which."""

import contextlib
import dataclasses
import threading

import numpy as np
import pytest

from pipeline.detect.canary import Canary
from pipeline.detect.detector import Detector
from pipeline.detect.engine import ModelFailed, OutOfMemory
from pipeline.limits import MEMORY
from pipeline.log_lines import log_lines
from pipeline.records import EncodedImage, ImageRef, identity_hash
from pipeline.report.annotate import annotate
from tests.detect.versioned_models import FAST, ONE, image, label, loaded, look, version_of, write_version
from tests.processes import in_thread

CPU = dataclasses.replace(FAST, canary_share=0.4)
ALL = dataclasses.replace(FAST, canary_share=1.0)
WAIT_S = 300.0  # for images under way; no test needs it
IMAGES = [image(n) for n in range(12)]
CHOSEN = [identity_hash(f"canary {image.ref.identity}") < 0.4 * 2**64 for image in IMAGES]


@pytest.fixture
def model(tmp_path):
    """A folder with versions 7 and 8, the canary."""
    for version in (7, 8):
        write_version(tmp_path / "detector", version)
    label(tmp_path / "detector", stable=7, canary=8)
    return tmp_path / "detector"


def versions_of(results):
    return [(result.model_version, version_of(result)) for result in results]


@log_lines()
def test_the_rows_are_those_of_the_version_in_use(model, open_detector, capfd):
    detector = open_detector(model, "stable", CPU)
    look(detector)
    assert versions_of(detector.detect(IMAGES)) == [("7", "7")] * 12
    shown = detector.canary_stats(WAIT_S)
    assert (shown.images, shown.failed, shown.skipped) == (sum(CHOSEN), 0, 0)
    assert (shown.stable_images, shown.stable_failed) == (12, 0)
    assert (shown.agreement, round(shown.score_shift_sum / shown.matched, 4)) == (1.0, 0.01)
    assert 0 < sum(CHOSEN) < 12
    counted = detector.counted_swaps()
    assert (counted["canary_images"], counted["canary_objects"]) == (sum(CHOSEN), 2 * sum(CHOSEN))
    assert not detector.counted_swaps()
    assert "model detector: canary 8 also gets 40.0% of the images" in capfd.readouterr().err


def test_a_share_is_that_share_of_many_images():
    canary = Canary(loaded("8", find_one), "7", dataclasses.replace(CPU, canary_share=0.05), list)
    chosen = sum(canary.wants(ImageRef(f"gs://b/{n}.jpg")) for n in range(20_000))
    canary.close()
    assert abs(chosen / 20_000 - 0.05) < 0.005


def find_one(pixels):
    return {"boxes": np.array([[[0.25, 0.25, 0.5, 0.5]]], np.float32), "scores": np.array([[0.08]], np.float32)}


def find_elsewhere(pixels):
    """As many objects as the image is bright, and none where `find_one` finds one."""
    corner, n = np.array([[[0.8, 0.8, 0.9, 0.9]]], np.float32), int(pixels.max())
    return {"boxes": corner.repeat(n, 1), "scores": np.linspace([0.5], [0.6], n, dtype=np.float32).T}


def detector_with(run, detect, samples=0, **how):
    """Version 7 finds one object in each image, and is sure to 0.07."""
    detector = Detector(loaded("7", lambda pixels: {**find_one(pixels), "scores": np.float32([[0.07]])}), detect, samples)
    detector.use_canary(loaded("8", run, **how))
    return detector


def shown_after(detector, images=IMAGES):
    """The results of images, and the figures of the canary."""
    with contextlib.closing(detector):
        return detector.detect(images), detector.canary_stats(WAIT_S)


def test_the_images_that_differ_most_are_kept_for_the_report():
    sizes = (3, 9, 1, 5, 2, 7)
    images = [EncodedImage(ImageRef(f"{n}.png", signed_uri=f"{n}.png?secret"), image(n, bright=n).content) for n in sizes]
    _, shown = shown_after(detector_with(find_elsewhere, dataclasses.replace(ALL, iou_threshold=1.0), samples=1), images * 2)
    assert [(each.different, each.stable.ref.uri, each.canary.ref.uri) for each in shown.disagreements] == [
        (1 + n, f"{n}.png", f"{n}.png") for n in (9, 7, 5, 3)
    ]
    assert [(title, len(image.detections)) for title, image in shown.pictures()[:2]] == [("version 7", 1), ("canary 8", 9)]
    assert all(annotate(image) and not image.ref.signed_uri for _, image in shown.pictures())


def test_a_report_without_pictures_keeps_no_image():
    _, shown = shown_after(detector_with(find_elsewhere, ALL))
    assert (shown.images, shown.disagreements) == (12, ())


@pytest.mark.parametrize(
    "failure", [ModelFailed("no"), OutOfMemory("none left"), ValueError("?"), MemoryError()], ids=lambda f: type(f).__name__
)
def test_a_canary_that_fails_harms_no_image(failure):
    closed = threading.Event()

    def fail(pixels):
        raise failure

    results, shown = shown_after(detector_with(fail, CPU, close=closed.set))
    assert versions_of(results) == [("7", "7")] * 12
    assert (shown.images, shown.failed, shown.stable_failed) == (sum(CHOSEN), sum(CHOSEN), 0)
    assert closed.is_set()


def test_a_canary_that_hangs_delays_no_image():
    free = threading.Event()
    detector = detector_with(lambda pixels: free.wait() and find_one(pixels), ALL)
    assert versions_of(detector.detect([image(n) for n in range(60)])) == [("7", "7")] * 60  # while it hangs
    shown = detector.canary_stats()
    assert (shown.images, shown.stable_images) == (0, 60)
    assert shown.skipped >= 60 - 16 - 2  # in its queue, and in its threads
    free.set()
    assert detector.canary_stats(WAIT_S).images == 60 - shown.skipped
    detector.close()


def test_a_canary_that_hangs_takes_no_memory_of_pixels_where_two_chunks_are_all_that_fits():
    free, batches = threading.Event(), dataclasses.replace(ONE, batch_sizes=(32,))

    def find(pixels):
        return {name: array.repeat(len(pixels), 0) for name, array in find_one(pixels).items()}

    MEMORY.narrow(1)
    try:
        detector = Detector(loaded("7", find, batches), ALL)
        detector.use_canary(loaded("8", lambda pixels: free.wait() and find(pixels), batches))
        assert detector.chunks_in_flight == 2
        assert {result.model_version for result in detector.detect([image(n) for n in range(320)])} == {"7"}
        assert detector.canary_stats().images == 0
        free.set()
        detector.close()
    finally:
        MEMORY.narrow(None)


def test_an_image_that_cannot_be_decoded_is_no_version_s_failure():
    (letter,), shown = shown_after(detector_with(find_one, ALL), [EncodedImage(ImageRef("a.png"), b"none")])
    assert (letter.stage, shown.images, shown.stable_images) == ("decode", 0, 0)


def why_none(detector):
    """What a detector's figures say of a canary that met no image."""
    figures = detector.canary_stats()
    assert figures.images == 0
    return figures.as_dict()["why_no_images"]


@pytest.mark.slow
@log_lines()
def test_it_follows_its_label(model, open_detector, capfd):
    """From the start on a line says why there is none yet, and the end of the job says so again."""
    label(model, stable=7)
    detector = open_detector(model, "stable", ALL)
    look(detector)
    assert (detector.canary, detector.canary_stats(), capfd.readouterr().err) == (None, None, "")
    write_version(model, 9)
    label(model, stable=7, canary=9)
    look(detector, 1)
    assert (detector.canary, why_none(detector)) == (None, "it is not loaded yet")  # somebody may be writing it still
    look(detector, 1)
    assert detector.canary.model.version == "9"
    assert why_none(detector) == "no image came while it was loaded"
    label(model, stable=7, canary=8)
    look(detector, 1)
    assert detector.canary.model.version == "8"
    label(model, stable=8)  # it is promoted by hand
    look(detector)
    assert (detector.canary, detector.model.version) == (None, "8")
    said = capfd.readouterr().err.splitlines()
    assert [line.partition(": ")[2][:41] for line in said if "loaded in" not in line] == [
        "canary 9: 0 images: it is not loaded yet",
        "canary 9 also gets 100.0% of the images",
        "the canary ends; canary 9: 0 images: no i",
        "canary 8 also gets 100.0% of the images",
        "the canary ends; canary 8: 0 images: no i",
    ]


@log_lines()
def test_a_canary_that_cannot_be_used_is_refused_once(model, open_detector, capfd):
    write_version(model, 8, broken="it is no model")
    detector = open_detector(model, "stable", ALL)
    look(detector, 4)
    assert detector.canary is None
    assert why_none(detector).startswith(f"it is refused: model {model}/8: it is no model")
    assert capfd.readouterr().err.count("canary 8 is refused: it is no model") == 1
    assert detector.counted_swaps() == {"refusals": 1}
    assert versions_of(detector.detect(IMAGES[:1])) == [("7", "7")]


@pytest.mark.parametrize("version", ["stable", None], ids=["labelled", "newest"])
@log_lines()
def test_a_canary_that_is_the_version_in_use_or_not_there_is_one_line(model, open_detector, capfd, version):
    """Printed again only once something has changed."""
    label(model, stable=8, canary=8)
    detector = open_detector(model, version, ALL)
    look(detector, 3)
    assert detector.canary is None
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("model detector: canary 8: 0 images: labels.json calls it canary, and it is in use; --model-version")
    label(model, stable=8, canary=5)
    look(detector, 3)
    (line,) = capfd.readouterr().err.splitlines()
    assert line == "model detector: canary 5: 0 images: labels.json calls it canary, and it is not there"


@pytest.mark.slow
@log_lines()
def test_a_job_that_ends_while_its_canary_is_loaded_has_refused_none(model, open_detector, capfd):
    detector = open_detector(model, "stable", ALL)
    with in_thread(lambda: look(detector)):
        detector.watched.close()
    assert "refused" not in capfd.readouterr().err
    assert detector.counted_swaps() == {}
