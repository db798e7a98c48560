"""ONNX files run as they are, in each engine that takes them: their boxes are those of the network's formula, in NumPy."""

import glob
import os

import numpy as np
import pytest

from models.metadata import DetectorMetadata
from pipeline.commands.import_model import main as import_model
from pipeline.config import DetectConfig
from pipeline.detect.batcher import Batcher
from pipeline.detect.engine import FunctionEngine, OutOfMemory
from pipeline.detect.onnxruntime_engine import _OnnxRuntime
from pipeline.errors import ModelError
from tests.detect.test_families import best_of, centres_to_corners, picture
from tests.onnx_files import HW, NAMES, head, write_yolo
from tests.tiny_models import detected

onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnxruntime is not installed")
pytest.importorskip("openvino", reason="the extra openvino is not installed")

SETTINGS = {"score_threshold": 0.45, "max_detections": 300, "iou_threshold": 0.6}
ENGINES = ["openvino", "onnxruntime"]

PICTURES = [picture(HW[::-1], seed) for seed in range(7)]  # as large as the input, so that no resize changes them


def expected(pixels):
    """Boxes, classes and confidences of what the network finds, by descending confidence."""
    weights, offsets = head()
    pooled = [pixels.reshape(HW[0] // s, s, HW[1] // s, s, 3).mean((1, 3)).reshape(-1, 3).T / 255 for s in (8, 16, 32)]
    rows = (weights @ np.concatenate(pooled, 1) + offsets[0]).T
    return best_of(centres_to_corners(rows[:, :4]), rows[:, 4:], score=SETTINGS["score_threshold"], iou=SETTINGS["iou_threshold"])


def found_in(path, **settings):
    return detected(path, [image for image, _ in PICTURES], DetectConfig(**SETTINGS, **settings))


def check(results):
    for (_, pixels), result in zip(PICTURES, results, strict=True):
        boxes, classes, scores = expected(pixels)
        assert result.detections.class_ids.tolist() == [*classes]
        np.testing.assert_allclose(result.detections.confidences, scores, atol=1e-4)
        np.testing.assert_allclose(result.detections.boxes_xyxy, boxes, atol=1e-2)
        assert {*result.detections.class_names} <= {*NAMES}
    assert sum(len(result.detections) for result in results) > 40


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("batch", "sizes"), [("batch", (1, 2, 4)), (1, (1,)), (3, (3,))], ids=["any batch", "one", "three"])
def test_a_file_gives_the_boxes_of_its_network(tmp_path, engine, batch, sizes):
    """Batches only where the file allows them; OpenVINO keeps its cores busy with one image a request."""
    results, detector = found_in(write_yolo(tmp_path / "toy.onnx", batch), engine=engine)
    check(results)
    assert detector.model.batcher.batch_sizes == ((1,) if engine == "openvino" and batch == "batch" else sizes)
    assert (detector.model.metadata.name, detector.model.metadata.class_names) == ("toy", NAMES)
    assert len(detector.model.version) == 12


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_for_images_of_any_size_is_recognised_by_its_answer(tmp_path, engine):
    """Its own shapes are free; `yolo export format=onnx dynamic=True` writes such files."""
    results, _ = found_in(write_yolo(tmp_path / "toy.onnx", any_size=True), engine=engine)
    check(results)


def test_a_file_that_answers_for_a_batch_as_for_one_image_gets_one_at_a_time(tmp_path):
    results, detector = found_in(write_yolo(tmp_path / "toy.onnx", mixes=True), engine="onnxruntime")
    check(results)
    assert (detector.model.batcher.batch_sizes, len(detector.model.notes)) == ((1,), 1)


def test_without_an_engine_it_runs_in_the_one_for_this_machine(tmp_path):
    results, detector = found_in(write_yolo(tmp_path / "toy.onnx"), device="cpu")
    check(results)
    assert type(detector.model.batcher.engine).__name__ == "OpenVinoEngine"


@pytest.mark.parametrize("engine", ENGINES)
def test_an_import_copies_the_file_with_its_description(tmp_path, engine, capfd):
    file = write_yolo(tmp_path / "toy.onnx", notes={})
    (tmp_path / "names").write_text("\n".join(NAMES))
    assert import_model([file, "--names", str(tmp_path / "names"), "--output", str(tmp_path / "m" / "1")]) == 0
    assert "toy, YOLO of Ultralytics, input 64x96 (letterbox), 3 class names, " in capfd.readouterr().out
    assert {*os.listdir(tmp_path / "m" / "1")} == {"model.onnx", "assets.extra"}
    results, detector = found_in(tmp_path / "m", engine=engine)
    check(results)
    assert detector.model.version == "1"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("notes", "message"),
    [
        pytest.param({"task": "segment"}, "its properties says its task is 'segment'", id="another task"),
        pytest.param({"names": "[", "task": "detect"}, "cannot be understood", id="damaged notes"),
        pytest.param(None, r"^model .*toy.onnx: ", id="no ONNX file"),
    ],
)
def test_what_cannot_run_is_one_line(tmp_path, engine, notes, message):
    if notes:
        write_yolo(tmp_path / "toy.onnx", notes=notes)
    else:
        (tmp_path / "toy.onnx").write_bytes(b"\x08\x08text")
    with pytest.raises(ModelError, match=message) as caught:
        found_in(tmp_path / "toy.onnx", engine=engine)
    assert "\n" not in str(caught.value)


def test_a_gpu_that_onnx_runtime_does_not_use_is_refused(tmp_path):
    """ONNX Runtime itself would go on with the CPU."""
    with pytest.raises(ModelError, match="may use 0 GPUs; install onnxruntime-gpu"):
        found_in(write_yolo(tmp_path / "toy.onnx"), engine="onnxruntime", device="gpu")


@pytest.mark.parametrize(("device", "code"), [("gpu", 5), ("gpu:1", 2), ("cpu", 2)])
def test_a_session_that_a_gpu_does_not_open_is_an_error_of_the_device(tmp_path, monkeypatch, device, code):
    """The file has been opened on the CPU before. A second GPU, which is not there, is a wrong command."""
    real, session = glob.glob, onnxruntime.InferenceSession

    def open_session(content, options, *, providers, **more):
        if isinstance(content, bytes) and (device == "cpu" or len(providers) > 1):
            raise RuntimeError("CUDA failure 100: no CUDA-capable device is detected ; GPU=0 ; hostname=a")
        return session(content, options, providers=providers, **more)

    monkeypatch.setattr(glob, "glob", lambda path, **more: ["/dev/nvidia0"] if "nvidia" in path else real(path, **more))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", open_session)
    with pytest.raises(ModelError) as caught:
        found_in(write_yolo(tmp_path / "toy.onnx"), engine="onnxruntime", device=device)
    assert caught.value.exit_code == code, caught.value


def test_an_engine_that_does_not_run_such_files_is_refused_and_the_others_are_named(tmp_path):
    """TensorFlow was the default, so that OpenVINO ran instead of it even where it was asked for."""
    with pytest.raises(ModelError, match=r"^engine tensorflow: expected SavedModel, got ONNX file; use --engine openvino or onn"):
        found_in(write_yolo(tmp_path / "toy.onnx"), engine="tensorflow")
    with pytest.raises(ModelError, match=r"^engine onnxruntime: expected ONNX file, got SavedModel; use --engine tensorflow or"):
        detected("digits", [], DetectConfig(engine="onnxruntime"))


class HungrySession:
    """A session of ONNX Runtime whose answer for any image but a blank one is larger than memory."""

    def get_providers(self):
        return ["CPUExecutionProvider"]

    def io_binding(self):
        return self

    def bind_cpu_input(self, _name, pixels):
        self.pixels = pixels

    def bind_output(self, *_):
        pass

    def run_with_iobinding(self, _):
        pass

    def get_outputs(self):
        return [self]

    def numpy(self):
        return np.zeros((len(self.pixels), 1 << 60 if self.pixels.any() else 1), np.uint8)


def test_an_image_for_whose_boxes_this_process_has_no_memory_now_does_not_fail_the_model():
    """NumPy's own words are none of those by which ONNX Runtime's errors are known."""
    detect = DetectConfig(batch_sizes=(1,), concurrent_batches=1)
    engine = _OnnxRuntime(HungrySession, ("scores",), DetectorMetadata("m", HW, "stretch", ("a",)), detect)
    batcher = Batcher(FunctionEngine(engine.run, detect), HW)
    try:
        assert [type(batcher.run(np.full((1, *HW, 3), grey, np.uint8))[0].error) for grey in (0, 9)] == [type(None), OutOfMemory]
    finally:
        batcher.close()
