"""A canary: a share of the images meets another version, and no image suffers from it; labels beside the versions say which."""

import contextlib
import dataclasses
import json
import shutil
import threading
from pathlib import Path

import apache_beam as beam
import cv2
import numpy as np
import pytest
from apache_beam.metrics import MetricsFilter

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.batcher import Batcher
from pipeline.detect.canary import Canary
from pipeline.detect.detect_objects import DetectObjects
from pipeline.detect.detector import Detector
from pipeline.detect.engine import ModelFailed, OutOfMemory
from pipeline.detect.load_detector import load_detector, shared_detector
from pipeline.detect.loaded_model import LoadedModel
from pipeline.launch.streaming import line_of
from pipeline.records import EncodedImage, ImageRef, identity_hash
from pipeline.report.annotate import can_be_drawn
from pipeline.stats.process import PROCESS
from pipeline.stream.live import LiveStats
from tests.bright_model import export_bright_model
from tests.detect.versioned_models import HW, NEVER, look, opened_detectors, save_version, upload_version, version_of

CPU = DetectConfig(batch_sizes=(1, 2), concurrent_batches=2, score_threshold=0.0, canary_share=0.4)
ALL = dataclasses.replace(CPU, canary_share=1.0)


def png(bright=255):
    pixels = np.zeros((*HW, 3), np.uint8)
    pixels[20:60, 30:90] = bright
    return cv2.imencode(".png", pixels)[1].tobytes()


IMAGES = [EncodedImage(ImageRef(f"{n}.png"), png()) for n in range(12)]
CHOSEN = [identity_hash(f"canary {image.ref.identity}") < 0.4 * 2**64 for image in IMAGES]


def release(path, versions, **labels):
    for version in versions:
        save_version(path, version)
    label(path, **labels)
    return path


def label(path, **labels):
    (path / "labels.json").write_text(json.dumps(labels), encoding="utf-8")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return release(tmp_path_factory.mktemp("models") / "detector", (7, 8), stable=7, canary=8)


@pytest.fixture
def model(tmp_path, saved):
    return shutil.copytree(saved, tmp_path / "detector")


@pytest.fixture
def open_detector():
    with opened_detectors() as load:
        yield lambda path, detect=CPU, version="stable": load(path, version, detect)


def versions(detector, images=IMAGES):
    return [(result.model_version, version_of(result)) for result in detector.detect(images)]


def test_the_rows_are_those_of_the_version_in_use(model, open_detector, capfd):
    detector = open_detector(model)
    look(detector)
    assert versions(detector) == [("7", "7")] * 12
    shown = detector.canary_stats(30.0)
    assert (shown.images, shown.failed, shown.skipped) == (sum(CHOSEN), 0, 0)
    assert (shown.stable_images, shown.stable_failed) == (12, 0)
    assert (shown.agreement, round(shown.score_shift_sum / shown.matched, 4)) == (1.0, 0.01)
    assert 0 < sum(CHOSEN) < 12
    counted = detector.counted_swaps()
    assert (counted["canary_images"], counted["canary_objects"]) == (sum(CHOSEN), 2 * sum(CHOSEN))
    assert not detector.counted_swaps()
    assert "model detector: canary 8 also gets 40.0% of the images" in capfd.readouterr().err


def test_a_share_is_that_share_of_many_images():
    canary = Canary(loaded("8", Broken(None)), "7", dataclasses.replace(CPU, canary_share=0.05), list)
    chosen = sum(canary.wants(ImageRef(f"gs://b/{n}.jpg")) for n in range(20_000))
    canary.close()
    assert abs(chosen / 20_000 - 0.05) < 0.005


METADATA = DetectorMetadata("detector", HW, "stretch", ("a",), classes_output="", count_output="")


class Sure:
    """An engine that always finds the same object."""

    batch_sizes = (1,)
    concurrent_batches = 4

    def __init__(self, confidence):
        self.confidence = confidence
        self.closed = False

    def run(self, pixels):
        return {"boxes": np.array([[[0.25, 0.25, 0.5, 0.5]]], np.float32), "scores": np.array([[self.confidence]], np.float32)}

    def close(self):
        self.closed = True


class Broken(Sure):
    """An engine that fails as it is told to."""

    def __init__(self, failure):
        super().__init__(0.08)
        self.failure = failure

    def run(self, pixels):
        raise self.failure


class Hanging(Sure):
    """An engine that does not come back until it is told to."""

    def __init__(self):
        super().__init__(0.08)
        self.free = threading.Event()

    def run(self, pixels):
        self.free.wait()
        return super().run(pixels)


class Elsewhere(Sure):
    """An engine that finds as many objects as the image is wide, and none where `Sure` finds one."""

    def run(self, pixels):
        corner, n = np.array([[[0.8, 0.8, 0.9, 0.9]]], np.float32), int(pixels.max())
        return {"boxes": corner.repeat(n, 1), "scores": np.linspace([0.5], [0.6], n, dtype=np.float32).T}


def loaded(version, engine):
    return LoadedModel(METADATA, version, Batcher(engine, HW))


def detector_with(engine, detect, samples=0):
    detector = Detector(loaded("7", Sure(0.07)), detect, samples)
    detector.try_canary(loaded("8", engine))
    return detector


def test_the_images_that_differ_most_are_kept_for_the_report():
    sizes = (3, 9, 1, 5, 2, 7)
    images = [EncodedImage(ImageRef(f"{n}.png"), png(bright=n)) for n in sizes]
    detector = detector_with(Elsewhere(0.5), dataclasses.replace(CPU, canary_share=1.0, iou_threshold=1.0), samples=1)
    detector.detect([*images, *images])
    shown = detector.canary_stats(30.0)
    detector.close()
    assert [(each.different, each.stable.ref.uri, each.canary.ref.uri) for each in shown.disagreements] == [
        (1 + n, f"{n}.png", f"{n}.png") for n in (9, 7, 5, 3)
    ]
    assert [(title, len(image.detections)) for title, image in shown.pictures()[:2]] == [("version 7", 1), ("canary 8", 9)]
    assert all(can_be_drawn(image) for _, image in shown.pictures())


@pytest.mark.parametrize(
    ("engine", "samples"), [(Sure(0.08), 1), (Elsewhere(0.5), 0)], ids=["they agree", "a report without pictures"]
)
def test_otherwise_it_keeps_no_image(engine, samples):
    detector = detector_with(engine, ALL, samples)
    detector.detect(IMAGES)
    shown = detector.canary_stats(30.0)
    detector.close()
    assert (shown.images, shown.disagreements) == (12, ())


@pytest.mark.parametrize(
    "failure", [ModelFailed("no"), OutOfMemory("none left"), ValueError("?"), MemoryError()], ids=lambda f: type(f).__name__
)
def test_a_canary_that_fails_harms_no_image(failure):
    engine = Broken(failure)
    detector = detector_with(engine, CPU)
    assert versions(detector) == [("7", "7")] * 12
    shown = detector.canary_stats(30.0)
    detector.close()
    assert (shown.images, shown.failed, shown.stable_failed) == (sum(CHOSEN), sum(CHOSEN), 0)
    assert engine.closed


def test_a_canary_that_hangs_delays_no_image():
    engine = Hanging()
    detector = detector_with(engine, ALL)
    many = [EncodedImage(ImageRef(f"{n}.png"), png()) for n in range(60)]
    assert versions(detector, many) == [("7", "7")] * 60  # while it hangs
    shown = detector.canary_stats()
    assert (shown.images, shown.stable_images) == (0, 60)
    assert shown.skipped >= 60 - 16 - 2  # in its queue, and in its threads
    engine.free.set()
    assert detector.canary_stats(30.0).images == 60 - shown.skipped
    detector.close()


def test_an_image_that_is_none_is_nobody_s_failure():
    detector = detector_with(Sure(0.08), ALL)
    (letter,) = detector.detect([EncodedImage(ImageRef("a.png"), b"none")])
    shown = detector.canary_stats(30.0)
    detector.close()
    assert (letter.stage, shown.images, shown.stable_images) == ("decode", 0, 0)


def test_it_ends_when_its_label_goes_and_begins_when_it_comes(model, open_detector, capfd):
    label(model, stable=7)
    detector = open_detector(model)
    look(detector)
    assert detector.canary is None
    label(model, stable=7, canary=8)
    look(detector, 1)
    assert detector.canary is None  # somebody may be writing it still
    look(detector, 1)
    assert detector.canary.model.version == "8"
    label(model, stable=7)
    look(detector, 1)
    assert detector.canary is None
    assert "the canary ends; canary 8: 0 images" in capfd.readouterr().err


def test_a_canary_that_cannot_be_used_is_refused_once(model, open_detector, capfd):
    (model / "8" / "saved_model.pb").write_bytes(b"junk")
    detector = open_detector(model)
    look(detector, 4)
    assert detector.canary is None
    assert capfd.readouterr().err.count("canary 8 is refused: model") == 1
    assert detector.counted_swaps() == {"refusals": 1}
    assert versions(detector, IMAGES[:1]) == [("7", "7")]


def test_a_batch_job_has_it_too(saved):
    """Through Beam, whose metrics count it."""
    model = ModelConfig(path=str(saved), model_version="stable", model_poll_s=NEVER)
    detector = shared_detector(model, CPU)
    look(detector)
    before = PROCESS.model_events.copy()
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        found = pipeline | "Create" >> beam.Create(IMAGES) | "Detect" >> DetectObjects(model, CPU)
        rows = found.detected | "Row" >> beam.Map(lambda image: (image.ref.uri, image.model_version))
        made = {image.ref.uri: "7" for image in IMAGES}
        rows | "Check" >> beam.combiners.ToDict() | "Compare" >> beam.Map(_equal, made)
    detector.canary_stats(30.0)
    counted = PROCESS.model_events - before + detector.counted_swaps()
    assert counted["canary_images"] == sum(CHOSEN)
    (detections,) = pipeline.result.metrics().query(MetricsFilter().with_name("detected"))["counters"]
    assert detections.committed == 12


def _equal(found, expected):
    assert found == expected


def test_the_lines_of_a_stream_say_what_it_shows():
    detector = detector_with(Sure(0.08), ALL)
    detector.detect(IMAGES)
    detector.canary_stats(30.0)
    line = line_of(LiveStats(), detector)(10.0)
    detector.close()
    assert "; canary 8: 12 images, agreement 1.000, scores +0.010, failed 0.0% (stable 0.0%), " in line
    assert LiveStats().line(10.0) in line


def test_what_is_promoted_by_hand_is_promoted(model, open_detector, capfd):
    detector = open_detector(model, ALL)
    look(detector)
    label(model, stable=8)
    look(detector)
    assert (detector.canary, detector.model.version) == (None, "8")
    assert "the canary ends; canary 8: 0 images" in capfd.readouterr().err


@pytest.mark.parametrize("version", ["stable", None], ids=["labelled", "newest"])
def test_a_canary_that_is_the_version_in_use_is_one_line(model, open_detector, capfd, version):
    """Said again only once something has changed."""
    label(model, stable=8, canary=8)
    detector = open_detector(model, ALL, version)
    look(detector, 3)
    assert detector.canary is None
    (line,) = capfd.readouterr().err.splitlines()
    assert line == (
        f"model {model.name}: labels.json calls version 8 canary, which is the one in use: there is no canary; "
        "--model-version names the one to be in use beside it"
    )
    if version:
        label(model, stable=7, canary=8)
        look(detector, 3)
        assert (detector.model.version, detector.canary.model.version) == ("7", "8")
        label(model, stable=8, canary=8)
        look(detector, 3)
        assert capfd.readouterr().err.count("labels.json calls version 8 canary") == 1


def test_a_job_that_ends_while_its_canary_is_loaded_has_refused_none(model, open_detector, capfd):
    detector = open_detector(model, ALL)
    looking = threading.Thread(target=look, args=(detector,))
    looking.start()
    detector.watched.close()
    looking.join()
    assert "refused" not in capfd.readouterr().err
    assert (detector.canary, detector.counted_swaps()) == (None, {})


def start_of(detector):
    """What a detector's figures say of a canary that never came up."""
    figures = detector.canary_stats()
    return figures.version, figures.as_dict()["why_no_images"]


def test_a_canary_is_said_at_the_start(model, open_detector, capfd):
    """Before it is up, and for the end where the job is done before that; once it is up, its images count."""
    detector = open_detector(model, ALL)
    said = capfd.readouterr().err
    assert said.startswith(f"model {model.name}: canary 8 gets 100.0% of the images once it is loaded, after two looks")
    assert said.count("\n") == 1
    assert start_of(detector) == ("8", "it is not loaded yet")
    look(detector)
    assert start_of(detector) == ("8", "no image came while it was loaded")
    detector.detect(IMAGES)
    assert detector.canary_stats(30.0).images == len(IMAGES)


def test_a_canary_of_another_name_is_refused_at_the_start(model, tmp_path, open_detector, capfd):
    """Which takes a look at what it says of itself, not minutes of loading."""
    shutil.rmtree(model / "8")
    upload_version(Path(export_bright_model(tmp_path / "other" / "8", resize="stretch")) / "8", model / "8")
    detector = open_detector(model, ALL)
    version, why = start_of(detector)
    assert version == "8" and why.startswith(f"it is refused: model {model}/8: its name is bright, that of the version in use")
    assert capfd.readouterr().err.count("canary 8 is refused") == 1
    assert detector.counted_swaps() == {"refusals": 1}
    look(detector, 3)
    assert start_of(detector)[1] == why
    assert capfd.readouterr().err == ""


def test_a_canary_that_is_not_there_is_said(model, saved, open_detector, capfd):
    shutil.rmtree(model / "8")
    detector = open_detector(model, ALL)
    assert start_of(detector) == ("8", "labels.json calls version 8 canary, which is not there")
    look(detector, 3)
    assert capfd.readouterr().err == f"model {model.name}: labels.json calls version 8 canary, which is not there\n"
    upload_version(saved / "8", model / "8")
    look(detector)
    assert detector.canary.model.version == "8"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_version": "7"}, "model_version 7 is a number; give a label such as stable"),
        ({"model_version": "stable", "model_poll_s": 0.0}, "model_poll_s is 0, so nobody looks for it"),
    ],
    ids=["pinned", "not watched"],
)
def test_a_canary_that_nobody_looks_for_is_said(model, capfd, changes, why):
    with contextlib.closing(load_detector(ModelConfig(path=str(model), **changes), ALL)) as detector:
        assert start_of(detector) == ("8", why)
    assert capfd.readouterr().err == f"model {model.name}: canary 8: 0 images: {why}\n"
