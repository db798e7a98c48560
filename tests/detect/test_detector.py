"""The detector: encoded images in, one result or dead letter for each out, in their order."""

import contextlib
import dataclasses
import pickle
import shutil
import subprocess
import sys
import threading

import cv2
import numpy as np
import pytest
from msgspec.structs import replace

from pipeline.config import DetectConfig, ModelConfig, ReadConfig
from pipeline.detect.detector import Detector, limits_of
from pipeline.detect.engine import FunctionEngine, ModelFailed, OpenedModel
from pipeline.detect.load_detector import DetectorSpec, load_detector, shared_detector
from pipeline.errors import DeviceFailedError, ModelError
from pipeline.feed.prefetch import Prefetcher
from pipeline.limits import MEMORY
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, ImageRef, identity_hash
from tests.detect.versioned_models import FAST, METADATA, loaded, write_version
from tests.feed.feeding import feeders
from tests.processes import wait_until
from tests.tiny_models import bright_box, detected, png, save_model
from tests.without_keras import tf

CPU = DetectConfig(batch_sizes=(1, 2, 4), concurrent_batches=2)
BOX = (160, 60, 480, 300)


def bright(name="a", wh=(640, 480), box=BOX, value=255):
    pixels = np.zeros((wh[1], wh[0], 3), np.uint8)
    pixels[box[1] : box[3], box[0] : box[2]] = value
    return png(name, pixels)


@pytest.fixture(scope="module", params=["tensorflow", "openvino"])
def detector(request, bright_model):
    return load_detector(ModelConfig(path=bright_model), dataclasses.replace(CPU, engine=request.param), samples=2)


def test_each_image_has_its_own_result_in_order_among_broken_ones(detector):
    images = [bright(f"{n}", box=(10 * n, 0, 10 * n + 200, 240)) for n in range(30)]
    images[7] = EncodedImage(ImageRef("7"), b"")
    images[8] = EncodedImage(ImageRef("8"), b"text")
    results = detector.detect(images)
    assert [result.ref.uri for result in results] == [str(n) for n in range(30)]
    dead = [(result.ref.uri, result.stage, result.reason) for result in results if isinstance(result, DeadLetter)]
    assert dead == [("7", "decode", "empty"), ("8", "decode", "not_an_image")]
    found = [result for result in results if isinstance(result, DetectedImage)]
    for result in found:
        left = 10 * int(result.ref.uri)
        assert np.abs(result.detections.boxes_xyxy - [left, 0, left + 200, 240]).max() <= 5.01
        assert (result.width, result.height, result.model_name, result.model_version) == (640, 480, "bright", "3")
    assert sum(result.timing.led_batch for result in found) >= 28
    assert detector.detect([]) == []


def test_times_of_all_stages_are_noted(detector):
    timing = detector.detect([replace(bright(), read_seconds=0.25)])[0].timing
    assert (timing.read, timing.led_batch) == (0.25, 1)
    assert min(timing.decode, timing.predict, timing.postprocess, timing.latency, timing.model) > 0


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"score_threshold": 0.95}, []),
        ({"classes": ("other",)}, []),
        ({"classes": ("rectangle", "other")}, ["rectangle"]),
        ({"max_megapixels": 0.1}, "too_large"),
        ({"feeder_processes": 1, "concurrent_batches": 1, "batch_sizes": (4,), "scaled_decode": False}, ["rectangle"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ["tensorflow", "openvino"])
def test_settings_have_an_effect(bright_model, settings, names, engine):
    (result,), _ = detected(bright_model, [bright()], dataclasses.replace(CPU, engine=engine, **settings))
    assert (result.reason if isinstance(result, DeadLetter) else list(result.detections.class_names)) == names


def test_feeder_processes_start_before_the_model_is_loaded_and_end_if_it_cannot_be():
    before = feeders()

    def load(_detect):
        assert wait_until(lambda: feeders() - before)
        raise ModelError("no model")

    with pytest.raises(ModelError, match="no model"):
        load_detector(load, CPU)
    assert feeders() == before


@pytest.fixture
def host_with(monkeypatch):
    """Sets how many processes a launcher has started on a host, and how much memory is free there, bytes."""
    monkeypatch.setattr(MEMORY, "limit_bytes", None)

    def of(launched, free_bytes):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(launched))
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setattr("pipeline.limits.memory_room_bytes", lambda: free_bytes)

    return of


@pytest.mark.parametrize(("processes", "launched"), [(16, 1), (4, 4), (64, 1), (192, 1), (24, 8)])
def test_at_each_feeder_process_four_photos_of_5_mb_are_read_while_one_is_decoded(host_with, processes, launched):
    """However many there are on the host: a store may take 100 ms, and decoding 25 ms."""
    host_with(launched, free_bytes=400e9)
    limits, begun, go_on = limits_of(processes, DetectConfig(), ReadConfig()), threading.Semaphore(0), threading.Semaphore(0)

    def read(one):
        one.reserve(5_000_000)
        begun.release()
        go_on.acquire()
        return EncodedImage(one.ref, b"")

    with contextlib.ExitStack() as ended:
        ahead = ended.enter_context(contextlib.closing(Prefetcher(read, limits.read_threads, limits.read_ahead_bytes)))
        reads = ahead.begin([ImageRef(f"gs://photos/{number}.jpg") for number in range(5)])
        ended.callback(ahead.abandon, reads)
        ended.callback(go_on.release, 5)
        go_on.release()
        reads[0].result.result()
        assert all(begun.acquire(timeout=10) for _ in range(5))


@pytest.mark.parametrize(("processes", "launched"), [(2, 1), (192, 1), (24, 8)])
def test_images_that_are_read_ahead_take_a_quarter_of_the_free_memory_at_most(host_with, processes, launched):
    host_with(launched, free_bytes=1e9)
    limits = limits_of(processes, DetectConfig(), ReadConfig(read_threads=1024))
    assert limits.read_ahead_bytes * processes * launched <= 250e6


def test_images_of_the_sample_carry_a_thumbnail(bright_model):
    results = load_detector(ModelConfig(path=bright_model), CPU, samples=2).detect([bright(str(n)) for n in range(20)])
    wanted = sorted((result.ref.identity for result in results), key=identity_hash)[:2]
    with_thumbnail = {result.ref.identity for result in results if result.thumbnail}
    assert set(wanted) <= with_thumbnail
    assert len(with_thumbnail) < 20
    thumbnail = next(result.thumbnail for result in results if result.thumbnail)
    assert cv2.imdecode(np.frombuffer(thumbnail, np.uint8), cv2.IMREAD_COLOR).shape == (480, 640, 3)


def test_one_detector_serves_all_who_ask_with_the_same_settings(bright_model):
    first = shared_detector(DetectorSpec(ModelConfig(path=bright_model), CPU))
    assert shared_detector(pickle.loads(pickle.dumps(DetectorSpec(ModelConfig(path=bright_model), CPU)))) is first
    assert shared_detector(DetectorSpec(ModelConfig(path=bright_model), DetectConfig(batch_sizes=(1,)))) is not first


@pytest.fixture(scope="module")
def picky_model(tmp_path_factory):
    """A model that fails in its graph on any batch with a pixel of value 13."""

    def predict(images):
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(images != 13), ["unlucky pixel"])]):
            box = bright_box(tf.identity(images))
        return {"boxes": box[:, None], "scores": tf.fill([tf.shape(images)[0], 1], 0.75)}

    folder = tmp_path_factory.mktemp("models") / "picky"
    return save_model(folder, predict, tf.TensorSpec((None, 96, 128, 3), tf.uint8, "images"))


def test_an_image_that_breaks_the_model_is_one_dead_letter(picky_model):
    """With a thumbnail, so that the report shows it."""
    images = [bright(str(n), value=13 if n == 5 else 200) for n in range(12)]
    with contextlib.closing(load_detector(ModelConfig(path=picky_model), CPU, samples=2)) as detector:
        results = detector.detect([*images, EncodedImage(ImageRef("12"), b"no image")])
    dead, undecoded = (result for result in results if isinstance(result, DeadLetter))
    assert (dead.ref.uri, dead.stage, dead.reason) == ("5", "detect", "model_failed")
    assert "\n" not in dead.message and ("unlucky" in dead.message or "assertion" in dead.message)
    assert dead.thumbnail and not undecoded.thumbnail
    assert all(len(result.detections) == 1 for result in results if isinstance(result, DetectedImage))


def fail(pixels):
    if pixels.any():
        raise ModelFailed("no")
    return find_no_boxes(pixels)


def find_no_boxes(pixels):
    return {"boxes": np.zeros((1, 1, 3), np.float32), "scores": np.ones((1, 1), np.float32)}


@pytest.mark.parametrize(("run", "reason"), [(fail, "model_failed"), (find_no_boxes, "bad_output")])
def test_a_dead_letter_names_the_version_that_failed_and_no_other_image_a_model(run, reason):
    detector = Detector(loaded("7", run), CPU)
    before, damaged = detector.detect([bright(), EncodedImage(ImageRef("b"), b"text")])
    detector.in_use.swap(loaded("8", run))
    (after,) = detector.detect([bright()])
    detector.close()
    named = [(letter.reason, letter.model_name, letter.model_version) for letter in (before, after, damaged)]
    assert named == [(reason, "detector", "7"), (reason, "detector", "8"), ("not_an_image", "", "")]


NUMBERLESS = []  # greys of images, and up, for which the engine below tells no number of boxes


def open_numberless(_local, _folder, _model, detect):
    def run(pixels):
        greys = pixels.max((1, 2, 3))
        boxes = {"boxes": np.zeros((len(greys), 1, 4)), "scores": np.ones((len(greys), 1)), "classes": np.zeros((len(greys), 1))}
        return {**boxes, "count": np.where(greys >= NUMBERLESS[-1], np.nan, 1)}

    return OpenedModel(FunctionEngine(run, detect, gpu=detect.device == "gpu"), METADATA)


@pytest.fixture
def numberless():
    """Loads that engine; gives the detector."""
    NUMBERLESS[:] = [99]
    detect = dataclasses.replace(CPU, engine=f"{__name__}:open_numberless", feeder_processes=1)
    with contextlib.closing(load_detector(ModelConfig(name="detector"), detect)) as detector:
        yield detector


def test_outputs_that_are_no_detections_of_one_image_are_its_dead_letter(numberless):
    images = [bright(str(value), value=value) for value in (50, 200, 60)]
    found = [result.reason if isinstance(result, DeadLetter) else len(result.detections) for result in numberless.detect(images)]
    assert found == [1, "bad_output", 1]


def test_outputs_that_are_no_detections_of_a_blank_image_either_are_those_of_a_device_that_failed(numberless):
    NUMBERLESS.append(0)
    with pytest.raises(
        DeviceFailedError, match=r"on no blank image either: expected the number of boxes as the model's count, got"
    ):
        numberless.detect([bright(value=50), bright(value=200)])


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_model_whose_outputs_are_no_detections_is_refused(device):
    """For good: a supervisor that starts it again finds the same, also on a GPU."""
    NUMBERLESS[:] = [0]
    with pytest.raises(
        ModelError, match="fails on a blank image: expected the number of boxes as the model's count, got"
    ) as caught:
        load_detector(ModelConfig(name="detector"), dataclasses.replace(CPU, device=device, engine=f"{__name__}:open_numberless"))
    assert caught.value.exit_code == 2


def write_warm_up_file(folder, inputs):
    """Writes TF Serving's warm-up file with one request."""
    from tensorflow_serving.apis import prediction_log_pb2

    (folder / "assets.extra").mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(folder / "assets.extra" / "tf_serving_warmup_requests")) as writer:
        log = prediction_log_pb2.PredictionLog()
        for name, value in inputs.items():
            log.predict_log.request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
        writer.write(log.SerializeToString())


@pytest.mark.parametrize(
    ("request_of", "message"),
    [
        pytest.param(lambda: {"image_bytes": [bright().content]}, None, id="good image"),
        pytest.param(lambda: {"images": np.zeros((3, 96, 128, 3), np.uint8)}, None, id="good arrays"),
        pytest.param(lambda: {"image_bytes": [bright().content, b"text"]}, "expected an image, got 4 bytes", id="bad image"),
        pytest.param(lambda: {"images": np.full((1, 96, 128, 3), 13, np.uint8)}, "assertion", id="array that breaks the model"),
    ],
)
def test_requests_of_the_warm_up_file_are_run(tmp_path, picky_model, request_of, message):
    folder = shutil.copytree(picky_model, tmp_path / "model")
    write_warm_up_file(folder, request_of())
    if message is None:
        assert len(detected(folder, [bright()], CPU)[0][0].detections) == 1
        return
    with pytest.raises(ModelError, match=f"fails on a request of its warm-up file: .*{message}") as caught:
        load_detector(ModelConfig(path=str(folder)), CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.matrix
def test_batches_for_which_tensorflow_has_no_memory_are_not_used_again(tmp_path):
    """A batch of more than two images wants 2**52 bytes or more; TensorFlow tries for ten seconds before it gives up."""

    def predict(images):
        many = tf.cast(tf.maximum(tf.shape(images)[0] - 2, 0), tf.int64) * 2**50
        hoard = tf.reduce_sum(tf.fill([many], tf.cast(images[0, 0, 0, 0], tf.float32)))
        return {"boxes": bright_box(images)[:, None], "scores": tf.ones([tf.shape(images)[0], 1]) + hoard}

    folder = save_model(tmp_path / "model", predict, tf.TensorSpec((None, 96, 128, 3), tf.uint8, "images"))
    results, detector = detected(folder, [bright(str(n)) for n in range(8)], dataclasses.replace(CPU, batch_sizes=(1, 2, 4, 8)))
    assert detector.batch_sizes == (1, 2)
    assert [len(result.detections) for result in results] == [1] * 8


@pytest.mark.parametrize(
    ("says", "code"),
    [
        pytest.param({"fails": "no"}, 2, id="on a CPU"),
        pytest.param({"fails": "CUDA_ERROR_NO_DEVICE", "gpu": True}, 5, id="on a GPU"),
        pytest.param({"fails": "no memory"}, 5, id="for lack of memory"),
    ],
)
def test_a_model_that_fails_on_a_blank_image_is_one_clear_error(tmp_path, says, code):
    """One that a supervisor repeats, where the device may be to blame."""
    folder = write_version(tmp_path, 7, **says)
    with pytest.raises(ModelError, match=f"^model {folder}: fails on a blank image: {says['fails']}$") as caught:
        load_detector(ModelConfig(path=folder), FAST)
    assert caught.value.exit_code == code


_ENDS_BETWEEN_FEEDING_AND_DETECTING = """
import atexit, sys
import psutil
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_detector import load_detector
from pipeline.records import EncodedImage, ImageRef

detector = load_detector(ModelConfig(path=sys.argv[1]), DetectConfig(feeder_processes=1))
detector.detect([EncodedImage(ImageRef("before"), b"")])
(feeder,) = psutil.Process().children()
feeder.suspend()
started = detector.start([EncodedImage(ImageRef("text"), b"text")])

@atexit.register  # runs when executors take no more work, while threads still run
def fed_after_the_end():
    feeder.resume()
    print(type(started.exception(250)).__name__)
"""


@pytest.mark.slow
def test_an_image_that_is_fed_when_the_interpreter_ends_is_dropped_silently(bright_model):
    """A stopped job's last word is its one line: no traceback of a future comes after it."""
    command = [sys.executable, "-c", _ENDS_BETWEEN_FEEDING_AND_DETECTING, bright_model]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "KeyboardInterrupt\n", "")
