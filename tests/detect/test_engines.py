"""A toy engine, of one class and one function, through the whole transform; and the transform, tested with it."""

import contextlib
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.window import FixedWindows, TimestampedValue
from packaging.requirements import Requirement

from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig, load_config
from pipeline.config.engines import ENGINES, engine_help
from pipeline.detect.batcher import Batcher
from pipeline.detect.detect_objects import DetectObjects, DetectorHandler, StartDetecting, detect_images
from pipeline.detect.engine import ModelFailed, OutOfMemory
from pipeline.detect.load_detector import DetectorSpec, load_detector
from pipeline.detect.load_model import name_and_version
from pipeline.detect.loaded_model import LoadedModel
from pipeline.errors import ConfigError, DeviceFailedError, ModelError
from pipeline.own_python import command_of, environment
from pipeline.records import DeadLetter, DetectedImage, EncodedImage, ImageRef, detection_row
from tests.fixtures import REPO
from tests.shard_rows import rows_in
from tests.tiny_models import png

HW = (48, 64)
UNLUCKY = 13  # the grey of images on which the toy fails
BOX = (16, 6, 48, 30)  # of images as large as the input


class NumPyEngine:
    """Finds the bright rectangle of an image; one image after the other."""

    batch_sizes = (1,)
    concurrent_batches = 2

    def __init__(self):
        self.closed = False

    def run(self, pixels):
        if (pixels == UNLUCKY).any():
            raise ModelFailed("13 is unlucky")
        rows, columns = (np.flatnonzero((pixels[0, ..., 0] > 127).any(axis)) for axis in (1, 0))
        found = [[columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]] if len(rows) else []
        boxes = np.array(found, np.float32).reshape(1, -1, 4)
        return {"boxes": boxes, "scores": np.full(boxes.shape[:2], 0.75)}

    def close(self):
        self.closed = True


def test_the_extras_that_engines_name_are_there():
    """Those of their own name install their packages, on Python 3.11 and newer; the help names them, and no others."""
    needed = [Requirement(each) for each in importlib.metadata.requires("hybrid-detection-pipeline") or ()]

    def of_extra(extra):
        return {each.name for each in needed if each.marker and each.marker.evaluate({"extra": extra, "python_version": "3.11"})}

    assert [kind.extra for kind in ENGINES.values() if not of_extra(kind.extra)] == []
    own = [name for name, kind in ENGINES.items() if kind.extra == name]
    assert [name for name in own if ENGINES[name].package not in of_extra(name)] == []
    assert "; openvino, onnxruntime and triton need the extra of their name; tensorrt needs onnxruntime-gpu" in engine_help()
    assert {*own} == {"tensorflow", "openvino", "onnxruntime", "triton"}


METADATA = DetectorMetadata("toy", HW, "stretch", ("rectangle",), box_units="pixels", threshold_inputs=False)


def load_toy(_detect: DetectConfig, *requests) -> LoadedModel:
    return LoadedModel(METADATA, "7", Batcher(NumPyEngine(), HW), requests)


def image(name, grey=0, box=None):
    pixels = np.full((*HW, 3), grey, np.uint8)
    if box:
        pixels[box[1] : box[3], box[0] : box[2]] = 255
    return png(name, pixels)


def test_a_toy_engine_detects_through_the_whole_transform():
    images = [image("found", box=BOX), image("empty"), image("unlucky", grey=UNLUCKY), EncodedImage(ImageRef("text"), b"text")]

    rectangle = {"box_xyxy": [*map(float, BOX)], "class_id": 0, "class_name": "rectangle", "confidence": 0.75}
    rows = [(uri, {"name": "toy", "version": "7"}, objects) for uri, objects in (("found", [rectangle]), ("empty", []))]

    def row_of(result):
        row = detection_row(result)
        return row["image"]["uri"], row["model"], row["detections"]

    def letters_are(letters):
        seen = {letter.ref.uri: (letter.stage, letter.reason, letter.message) for letter in letters}
        assert seen.pop("unlucky") == ("detect", "model_failed", "the model fails on this image alone: 13 is unlucky")
        assert seen.pop("text")[:2] == ("decode", "not_an_image") and not seen

    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        found = pipeline | beam.Create(images) | DetectObjects(load_toy)
        assert_that(found.detected | beam.Map(row_of), equal_to(rows), "Rows")
        assert_that(found.dead, letters_are, "Letters")


LOADED = []


def load_noted(detect):
    """A toy that the test knows of, since the pipeline runs in this process."""
    LOADED.append(load_toy(detect))
    return LOADED[-1]


@pytest.mark.slow
def test_a_notebook_that_tries_one_threshold_after_the_other_keeps_the_last_ones_model():
    for threshold in (0.2, 0.3, 0.3):
        with beam.Pipeline(runner=FnApiRunner()) as pipeline:
            found = pipeline | beam.Create([image("found", box=BOX)]) | DetectObjects(load_noted, score_threshold=threshold)
            assert_that(found.detected | beam.Map(lambda result: len(result.detections)), equal_to([1]))
    assert [model.batcher.engine.closed for model in LOADED] == [True, False]


def test_each_result_has_the_window_and_the_time_of_its_image():
    def seen(letter, window=beam.DoFn.WindowParam, time=beam.DoFn.TimestampParam):
        return letter.ref.uri, float(time), float(window.start)

    with beam.Pipeline() as pipeline:
        images = (
            pipeline
            | beam.Create(range(40))
            | beam.Map(lambda n: TimestampedValue(EncodedImage(ImageRef(str(n)), b"no image"), n))
            | beam.WindowInto(FixedWindows(10))
        )
        dead = (images | DetectObjects(load_toy)).dead | beam.Map(seen)
        assert_that(dead, equal_to([(str(n), float(n), n // 10 * 10.0) for n in range(40)]))


class LargeBatches(NumPyEngine):
    batch_sizes = (1, 32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kilobytes", "chunks"),
    [
        pytest.param(1, [32] * 4 + [22], id="small images: by their number"),
        pytest.param(4_000, [16] * 9 + [6], id="large images: by the bytes that the detector may hold"),
        pytest.param(70_000, [1] * 3, id="one image always passes"),
    ],
)
def test_a_chunk_that_is_started_at_once_is_bounded_by_images_and_by_bytes(kilobytes, chunks):
    def load(_detect):
        return LoadedModel(METADATA, "1", Batcher(LargeBatches(), HW))

    content = b"x" * (kilobytes * 1000)
    starting = StartDetecting(DetectorHandler(DetectorSpec(load, DetectConfig())))
    with beam.Pipeline() as pipeline:
        images = pipeline | beam.Create([sum(chunks)]) | beam.FlatMap(lambda n: [EncodedImage(ImageRef("a"), content)] * n)
        sizes = images | beam.ParDo(starting) | beam.Map(lambda chunk: len(chunk.images))
        assert_that(sizes, equal_to(chunks))


@pytest.mark.parametrize(
    ("requests", "settings", "message"),
    [
        pytest.param([image("a", grey=UNLUCKY).content], {}, "13 is unlucky", id="an image it fails on"),
        pytest.param([np.full((2, *HW, 3), UNLUCKY, np.uint8)], {}, "13 is unlucky", id="an array it fails on"),
        pytest.param([], {"classes": ("circle",)}, "model toy has no class 'circle'", id="a class it lacks"),
    ],
)
def test_a_model_that_is_refused_is_closed(requests, settings, message):
    toy = load_toy(DetectConfig(), *requests)
    with pytest.raises(ModelError, match=message):
        load_detector(lambda _: toy, DetectConfig(**settings))
    assert toy.batcher.engine.closed


class FullEngine(NumPyEngine):
    def run(self, pixels):
        raise OutOfMemory("no room for one image")


def test_an_engine_without_memory_for_one_image_fails_whoever_waits():
    """The bundle fails, and its runner tries again: the image is not to blame."""
    detector = load_detector(lambda _: LoadedModel(METADATA, "7", Batcher(FullEngine(), HW)), DetectConfig())
    with pytest.raises(DeviceFailedError, match="no room for one image"):
        detector.detect([image("a")])
    assert isinstance(detector.detect([EncodedImage(ImageRef("b"), b"")])[0], DeadLetter)


def test_the_twin_function_gives_the_results_of_the_transform_in_order_and_starts_a_bounded_number():
    """Without Beam: it reads images only as far ahead as keeps the detector busy."""
    detect = DetectConfig(batch_sizes=(1,), feeder_processes=1, concurrent_batches=1)
    images = [image(str(n), box=BOX) if n % 3 else EncodedImage(ImageRef(str(n)), b"text") for n in range(24)]
    read = []
    detector = load_detector(load_toy, detect)
    for number, result in enumerate(detect_images((read.append(one) or one for one in images), detector)):
        assert len(read) <= number + detector.chunks_in_flight + 1
        assert (result.ref.uri, isinstance(result, DetectedImage)) == (str(number), bool(number % 3))
    assert len(read) == 24
    detector.close()


PAGE = (REPO / "docs" / "models.md").read_text(encoding="utf-8").partition("### An engine of your own")[2].partition("\n### ")[0]


@pytest.fixture
def engine_of_the_page(tmp_path, monkeypatch):
    """A folder that is the current one, with the module of docs/models.md only."""
    (tmp_path / "my_engine.py").write_text(PAGE.split("```")[1].removeprefix("python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part])
    yield tmp_path
    sys.modules.pop("my_engine", None)


def opened_by_the_page(path):
    """Name and version of its model, in rows and beforehand."""
    model, detect = ModelConfig(str(path)), DetectConfig(engine="my_engine:open_model", feeder_processes=1)
    known = name_and_version(model, detect.engine)
    with contextlib.closing(load_detector(model, detect)) as detector:
        (found,) = detector.detect([image("a", box=BOX)])
    np.testing.assert_allclose(found.detections.boxes_xyxy, [BOX], atol=1)
    assert (found.model_name, found.model_version) == known
    return known


@pytest.mark.matrix
def test_the_command_of_the_page_runs_as_it_stands_in_an_empty_folder(engine_of_the_page):
    """Also as the console command, which does not have the current folder on its path; there, nothing is new any more."""
    (engine_of_the_page / "bright.tflite").write_text("127")
    (engine_of_the_page / "photos").mkdir()
    (engine_of_the_page / "photos" / "a.png").write_bytes(image("a", box=BOX).content)
    (flags,) = (shlex.split(flags) for flags in re.findall(r"^    python -m pipeline\.run (.*)$", PAGE, re.MULTILINE))
    module, console = [sys.executable, "-m", "pipeline.run"], [*command_of("pipeline.__main__"), "run"]
    path = {**environment(), "PYTHONPATH": os.pathsep.join([str(REPO), *filter(None, sys.path)])}
    for command, counted in [(module, "1 detected"), (console, "nothing is new")]:
        command += [*flags, "--feeder-processes", "1"]
        job = subprocess.run(command, check=False, capture_output=True, text=True, env=path, timeout=300)
        assert job.returncode == 0 and counted in job.stdout + job.stderr, job.stdout + job.stderr
    found = [(row["image"]["uri"], row["model"]["name"]) for row in rows_in(str(engine_of_the_page / "out"))]
    assert found == [(str(engine_of_the_page / "photos" / "a.png"), "bright")]


@pytest.mark.slow
def test_an_engine_of_ones_own_opens_any_file_whose_fingerprint_is_the_version(engine_of_the_page):
    """Another content is another version; a name of a version is refused, as nothing has versions."""
    versions = {}
    for name, content in [("a.tflite", "127"), ("b.pt", "127"), ("c.weights", "126"), ("detector.onnx", "127")]:
        (engine_of_the_page / name).write_text(content)
        versions[name] = opened_by_the_page(engine_of_the_page / name)
    assert [name for name, _ in versions.values()] == ["a", "b", "c", "detector"]
    a, b, c, onnx = (version for _, version in versions.values())
    assert a == b == onnx != c and re.fullmatch(r"[0-9a-f]{12}", a)
    with pytest.raises(ModelError, match="has no versions that --model-version could name"):
        load_detector(ModelConfig("a.tflite", model_version="7"), engine="my_engine:open_model")


@pytest.mark.parametrize(
    ("path", "files", "name"),
    [
        pytest.param("folder", ["1/x.tflite"], "folder", id="folder of another kind of model"),
        pytest.param("empty", [], "empty", id="empty folder"),
        pytest.param("resnet50-of-a-hub", [], "resnet50-of-a-hub", id="name"),
        pytest.param("hub://a/b", [], "b", id="address that only the engine knows"),
        pytest.param("", [], "own", id="nothing"),
    ],
)
def test_an_engine_of_ones_own_gets_what_is_given_as_it_is(path, files, name, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "from pipeline.detect.engine import OpenedModel\nfrom tests.detect.test_engines import METADATA, NumPyEngine\n"
        "given_to_it = []\n"
        "def open_model(*given):\n    given_to_it.append(given[:2])\n    return OpenedModel(NumPyEngine(), METADATA)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "empty").mkdir()
    for file in files:
        (tmp_path / path / file).parent.mkdir(parents=True)
        (tmp_path / path / file).write_text("x")
    own = importlib.import_module("own")
    model, detect = ModelConfig(path), DetectConfig(engine="own:open_model", feeder_processes=1)
    with contextlib.closing(load_detector(model, detect)) as detector:
        assert own.given_to_it == [(path, path)] and detector.watched is None
        assert (detector.model.metadata.name, detector.model.version) == name_and_version(model, detect.engine)
        assert (detector.model.metadata.name, bool(detector.model.version)) == (name, bool(files))
    del sys.modules["own"]


def test_an_engine_of_ones_own_gets_a_copy_of_a_file_on_object_storage(engine_of_the_page, gcs_bucket):
    """The generation is its version, so a listing shows it."""
    gcs_bucket.blob("m/bright.tflite").upload_from_string(b"127")
    gcs_bucket.blob("m/folder/bright.txt").upload_from_string(b"127")
    assert opened_by_the_page(f"gs://{gcs_bucket.name}/m/bright.tflite")[0] == "bright"


@pytest.mark.parametrize("engine", ["nothing:open_model", "my:thing", "pipeline.detect.engine:none"])
def test_an_engine_that_is_not_there_is_one_line(engine, bright_model):
    with pytest.raises(ModelError, match=rf"^engine {engine}: expected tensorflow, .* or package.module:function, but: "):
        load_detector(ModelConfig(bright_model), DetectConfig(engine=engine))


def test_a_name_that_is_no_engine_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match=r"expected auto, tensorflow, .* or package.module:function, got"):
        load_config([], {"detect.engine": "tensorrtt"})
