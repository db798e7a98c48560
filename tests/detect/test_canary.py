"""A canary: a share of the images meets another version, and no image suffers from it."""

import dataclasses
import json
import shutil
import threading

import apache_beam as beam
import cv2
import numpy as np
import pytest
from apache_beam.metrics import MetricsFilter

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.canary import Canary
from pipeline.detect.detect_objects import DetectObjects
from pipeline.detect.detector import Detector
from pipeline.detect.load_detector import load_detector, shared_detector
from pipeline.detect.loaded_model import LoadedModel, ModelFailed, OutOfMemory, Output
from pipeline.errors import ModelError
from pipeline.launch.streaming import line_of
from pipeline.records import EncodedImage, ImageRef, identity_hash
from pipeline.report.annotate import can_be_drawn
from pipeline.stats.process import PROCESS
from pipeline.stream.live import LiveStats
from tests.detect.versioned_models import HW, NEVER, elsewhere, look, opened_detectors, save_version, version_of

pytestmark = pytest.mark.usefixtures("warm_preparations")
CPU = DetectConfig(batch_sizes=(1, 2), concurrent_batches=2, score_threshold=0.0, canary_share=0.4)
LIVE = dataclasses.replace(CPU, canary_mode="live")


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


def test_in_the_shadow_the_rows_are_those_of_the_version_in_use(model, open_detector, capfd):
    detector = open_detector(model)
    look(detector)
    assert versions(detector) == [("7", "7")] * 12
    shown = detector.canary_stats(30.0)
    assert (shown.images, shown.failed, shown.left_out) == (sum(CHOSEN), 0, 0)
    assert (shown.stable_images, shown.stable_failed) == (12, 0)
    assert (shown.agreement, round(shown.score_shift_sum / shown.matched, 4)) == (1.0, 0.01)
    assert 0 < sum(CHOSEN) < 12
    counted = detector.counted_swaps()
    assert (counted["canary_images"], counted["canary_objects"]) == (sum(CHOSEN), 2 * sum(CHOSEN))
    assert not detector.counted_swaps()
    assert "model detector: 40.0% of the images meet canary 8, shadow" in capfd.readouterr().err


def test_live_the_rows_of_its_share_are_its_own_whatever_the_order(model, open_detector):
    detector = open_detector(model, LIVE)
    look(detector)
    expected = [("8", "8") if chosen else ("7", "7") for chosen in CHOSEN]
    assert versions(detector) == expected
    assert versions(detector, IMAGES[::-1]) == expected[::-1]
    shown = detector.canary_stats(30.0)
    assert (shown.images, shown.stable_images, shown.agreement) == (2 * sum(CHOSEN), 24 - 2 * sum(CHOSEN), None)


def test_a_share_is_that_share_of_many_images():
    canary = Canary(LoadedModel(METADATA, "8", Broken(None)), "7", dataclasses.replace(CPU, canary_share=0.05), list)
    chosen = sum(canary.wants(EncodedImage(ImageRef(f"gs://b/{n}.jpg"), b"")) for n in range(20_000))
    canary.close()
    assert abs(chosen / 20_000 - 0.05) < 0.005


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_none_and_all_are_shares(model, open_detector, share):
    detector = open_detector(model, dataclasses.replace(LIVE, canary_share=share))
    look(detector)
    assert {version for version, _ in versions(detector)} == ({"8"} if share else {"7"})


METADATA = DetectorMetadata("detector", HW, "stretch", ("a",), classes_output="", count_output="")


class Sure:
    """An engine that always finds the same object."""

    batch_sizes = (1,)
    images_in_flight = 4

    def __init__(self, confidence):
        self.confidence = confidence
        self.closed = False

    def __call__(self, images):
        box = np.array([[0.25, 0.25, 0.5, 0.5]], np.float32)
        return [Output({"boxes": box, "scores": np.array([self.confidence], np.float32)}) for _ in images]

    def close(self):
        self.closed = True


class Broken(Sure):
    """An engine that fails as it is told to."""

    def __init__(self, failure):
        super().__init__(0.08)
        self.failure = failure

    def __call__(self, images):
        if isinstance(self.failure, ModelFailed):
            return [self.failure for _ in images]
        raise self.failure


class Hanging(Sure):
    """An engine that does not come back until it is told to."""

    def __init__(self):
        super().__init__(0.08)
        self.free = threading.Event()

    def __call__(self, images):
        self.free.wait()
        return super().__call__(images)


class Elsewhere(Sure):
    """An engine that finds as many objects as the image is wide, and none where `Sure` finds one."""

    def __call__(self, images):
        corner = np.array([[0.8, 0.8, 0.9, 0.9]], np.float32)
        sizes = [int(image.max()) for image in images]
        return [Output({"boxes": corner.repeat(n, 0), "scores": np.linspace(0.5, 0.6, n, dtype=np.float32)}) for n in sizes]


def detector_with(engine, detect, samples=0):
    detector = Detector(LoadedModel(METADATA, "7", Sure(0.07)), detect, samples)
    detector.try_canary(LoadedModel(METADATA, "8", engine))
    return detector


def test_in_the_shadow_the_images_that_differ_most_are_kept_for_the_report():
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
    detector = detector_with(engine, dataclasses.replace(CPU, canary_share=1.0), samples)
    detector.detect(IMAGES)
    shown = detector.canary_stats(30.0)
    detector.close()
    assert (shown.images, shown.disagreements) == (12, ())


@pytest.mark.parametrize("detect", [CPU, LIVE], ids=["shadow", "live"])
@pytest.mark.parametrize(
    "failure", [ModelFailed("no"), OutOfMemory("none left"), ValueError("?"), MemoryError()], ids=lambda f: type(f).__name__
)
def test_a_canary_that_fails_harms_no_image(detect, failure):
    engine = Broken(failure)
    detector = detector_with(engine, detect)
    assert versions(detector) == [("7", "7")] * 12
    shown = detector.canary_stats(30.0)
    detector.close()
    assert (shown.images, shown.failed, shown.stable_failed) == (sum(CHOSEN), sum(CHOSEN), 0)
    assert engine.closed


def test_a_canary_that_hangs_in_the_shadow_delays_no_image():
    engine = Hanging()
    detector = detector_with(engine, dataclasses.replace(CPU, canary_share=1.0))
    many = [EncodedImage(ImageRef(f"{n}.png"), png()) for n in range(60)]
    assert versions(detector, many) == [("7", "7")] * 60  # while it hangs
    shown = detector.canary_stats()
    assert (shown.images, shown.stable_images) == (0, 60)
    assert shown.left_out >= 60 - 16 - 2  # in its queue, and in its threads
    engine.free.set()
    assert detector.canary_stats(30.0).images == 60 - shown.left_out
    detector.close()


def test_a_live_canary_that_hangs_is_waited_for_once_and_not_again_before_it_answers():
    engine, stable = Hanging(), Sure(0.07)
    detector = Detector(LoadedModel(METADATA, "7", stable), LIVE)
    hanging = LoadedModel(METADATA, "8", engine)
    settings = dataclasses.replace(LIVE, canary_share=1.0)
    canary = Canary(hanging, "7", settings, lambda images: detector._detect_with(hanging, images), longest_s=0.2)
    detector.use_canary(canary)
    assert versions(detector, IMAGES[:1]) == [("7", "7")]
    assert versions(detector, IMAGES[1:]) == [("7", "7")] * 11
    shown = detector.canary_stats()
    assert (shown.images, shown.failed, shown.left_out) == (1, 1, 11)
    engine.free.set()
    assert detector.canary_stats(30.0).images == 1  # what came late does not count again
    assert versions(detector, IMAGES[:1]) == [("8", "8")]
    detector.close()
    assert engine.closed


def test_an_image_that_is_none_is_nobody_s_failure():
    detector = detector_with(Sure(0.08), dataclasses.replace(CPU, canary_share=1.0))
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
    assert "canary dropped; canary 8: 0 images" in capfd.readouterr().err


def test_the_version_in_use_is_no_canary(model, open_detector):
    label(model, stable=7, canary=7)
    detector = open_detector(model)
    look(detector, 3)
    assert detector.canary is None


def test_a_canary_that_cannot_be_used_is_refused_once(model, open_detector, capfd):
    (model / "8" / "saved_model.pb").write_bytes(b"junk")
    detector = open_detector(model)
    look(detector, 4)
    assert detector.canary is None
    assert capfd.readouterr().err.count("canary 8 is refused: model") == 1
    assert versions(detector, IMAGES[:1]) == [("7", "7")]


AUTO = dataclasses.replace(CPU, canary_share=1.0, canary_auto=True, canary_images=10)


def test_a_canary_that_agrees_gets_the_label_and_is_used(model, open_detector, capfd):
    detector = open_detector(model, AUTO)
    look(detector)
    versions(detector, IMAGES[:6])
    detector.canary_stats(30.0)
    look(detector, 1)
    assert detector.canary  # it has not met ten
    versions(detector)
    detector.canary_stats(30.0)
    look(detector, 1)
    assert json.loads((model / "labels.json").read_text(encoding="utf-8")) == {"stable": 8}
    assert (detector.canary, detector.canary_stats().outcome) == (None, "promoted")
    look(detector)
    assert versions(detector, IMAGES[:1]) == [("8", "8")]
    assert "canary promoted; canary 8: " in capfd.readouterr().err


def test_a_canary_that_does_not_agree_loses_its_label(model, open_detector):
    shutil.rmtree(model / "8")
    save_version(model, 8, outputs=elsewhere)
    detector = open_detector(model, AUTO)
    look(detector)
    versions(detector)
    detector.canary_stats(30.0)
    look(detector, 3)
    assert json.loads((model / "labels.json").read_text(encoding="utf-8")) == {"stable": 7}
    assert (detector.canary_stats().agreement, detector.canary_stats().outcome) == (0.0, "dropped")
    assert versions(detector, IMAGES[:1]) == [("7", "7")]


@pytest.mark.parametrize(
    ("failed", "stable_failed", "matched", "objects", "verdict"),
    [
        pytest.param(0, 0, 950, 2000, "promoted", id="agrees"),
        pytest.param(0, 0, 890, 2000, "dropped", id="agrees too little"),
        pytest.param(10, 0, 950, 2000, "promoted", id="fails a little more"),
        pytest.param(11, 0, 950, 2000, "dropped", id="fails more than that"),
        pytest.param(15, 10, 950, 2000, "promoted", id="the other fails, too"),
        pytest.param(0, 0, 0, 0, "", id="no image has an object yet"),
        pytest.param(11, 0, 0, 0, "dropped", id="fails more, and no image has an object"),
    ],
)
def test_the_bounds_are_agreement_and_failures(failed, stable_failed, matched, objects, verdict):
    canary = Canary(LoadedModel(METADATA, "8", Sure(0.08)), "7", DetectConfig(canary_images=1000), list)
    canary._count(images=1000, failed=failed, stable_images=1000, stable_failed=stable_failed, matched=matched, objects=objects)
    canary.close()
    assert canary.verdict() == verdict


@pytest.mark.parametrize(
    ("version", "mode", "message"),
    [
        (None, "shadow", "canary_auto: expected a label as model_version, such as stable"),
        ("stable", "live", "canary_auto: expected canary_mode shadow"),
    ],
)
def test_what_cannot_be_decided_by_itself_is_refused(saved, version, mode, message):
    settings = dataclasses.replace(AUTO, canary_mode=mode)
    with pytest.raises(ModelError, match=message):
        load_detector(ModelConfig(path=str(saved), model_version=version), settings)


@pytest.mark.parametrize("detect", [CPU, LIVE], ids=["shadow", "live"])
def test_a_batch_job_has_it_too(saved, detect):
    """Through Beam, whose metrics count it."""
    model = ModelConfig(path=str(saved), model_version="stable", model_poll_s=NEVER)
    detector = shared_detector(model, detect)
    look(detector)
    before = PROCESS.model_events.copy()
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        found = pipeline | "Create" >> beam.Create(IMAGES) | "Detect" >> DetectObjects(model, detect)
        rows = found.detected | "Row" >> beam.Map(lambda image: (image.ref.uri, image.model_version))
        made = {image.ref.uri: "8" if chosen and detect is LIVE else "7" for image, chosen in zip(IMAGES, CHOSEN, strict=True)}
        rows | "Check" >> beam.combiners.ToDict() | "Compare" >> beam.Map(_equal, made)
    detector.canary_stats(30.0)
    counted = PROCESS.model_events - before + detector.counted_swaps()
    assert counted["canary_images"] == sum(CHOSEN)
    (detections,) = pipeline.result.metrics().query(MetricsFilter().with_name("detected"))["counters"]
    assert detections.committed == 12


def _equal(found, expected):
    assert found == expected


def test_the_lines_of_a_stream_say_what_it_shows():
    detector = detector_with(Sure(0.08), dataclasses.replace(CPU, canary_share=1.0))
    detector.detect(IMAGES)
    detector.canary_stats(30.0)
    line = line_of(LiveStats(), detector)(10.0)
    detector.close()
    assert "; canary 8: 12 images, agreement 1.000, scores +0.010, failed 0.0% (stable 0.0%), " in line
    assert LiveStats().line(10.0) in line
