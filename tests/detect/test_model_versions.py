"""Versions of a model: which is wanted, and how one takes the place of another while images are under way."""

import contextlib
import dataclasses
import glob
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from models.manifest import MANIFEST, write_manifest
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.detect_objects import detect_images
from pipeline.detect.detector import Detector
from pipeline.detect.load_detector import load_detector
from pipeline.detect.load_model import name_and_version
from pipeline.detect.model_watcher import incompatible
from pipeline.detect.openvino_convert import converted
from pipeline.detect.openvino_engine import INT8
from pipeline.detect.versions import files_of, is_watchable, locate, resolve_versions, versions_in
from pipeline.errors import DeviceFailedError, ModelAwayError, ModelError
from pipeline.log_lines import log_lines
from pipeline.records import DetectedImage
from pipeline.stats.counted import COUNTED
from pipeline.storage.files import delete_files, write_file
from tests.conftest import REPO
from tests.detect.versioned_models import FAST, HW, ONE, image, label, loaded, look, save_version, version_of, write_version
from tests.feed.feeding import feeders
from tests.onnx_files import write_constant
from tests.processes import in_thread, wait_until
from tests.tiny_models import png

CPU = DetectConfig(batch_sizes=(1, 2, 4), concurrent_batches=2, score_threshold=0.0)
WAIT_S = 500.0  # no test depends on it: one that waits so long has hung


@pytest.fixture
def model(tmp_path):
    """A folder with version 7."""
    write_version(tmp_path / "detector", 7)
    return tmp_path / "detector"


def test_each_manifest_is_read_once_however_many_versions_there_are(tmp_path):
    """A job looks every 30 seconds. A file of the same size and time is not read again, so that its new content does not show."""
    for number in range(1, 366):
        write_manifest(write_version(tmp_path, number))
    assert not any(version.missing for version in versions_in(str(tmp_path)).values())
    for manifest in tmp_path.glob(f"*/{MANIFEST}"):
        before = manifest.stat()
        manifest.write_bytes(b"?" * before.st_size)
        os.utime(manifest, ns=(before.st_atime_ns, before.st_mtime_ns))
    versions = versions_in(str(tmp_path))
    assert len(versions) == 365 and not any(version.missing for version in versions.values())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Stores of versions 6 to 9, as SavedModels and as ONNX files."""
    folder = tmp_path_factory.mktemp("saved")
    for version in (6, 7, 8, 9):
        save_version(folder / "tensorflow", version)
        (folder / "onnx" / str(version)).mkdir(parents=True)
        write_constant(folder / "onnx" / str(version) / "model.onnx", HW, (0.2, 0.2, 0.7, 0.6), version / 100)
    return folder


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("tensorflow", "tensorflow"),
        ("openvino", "tensorflow"),
        ("openvino", "onnx"),
        pytest.param("onnxruntime", "onnx", marks=pytest.mark.matrix),
    ],
    ids=["TensorFlow", "OpenVINO", "OpenVINO, ONNX", "ONNX Runtime"],
)
def test_swaps_under_load_lose_no_image_and_each_row_says_which_version_made_it(saved, tmp_path, open_detector, engine, kind):
    """Beside a canary. Groups of images are never mixed: the version of a row is the one that made its boxes."""
    model, stop, results = tmp_path / "detector", threading.Event(), []
    shutil.copytree(saved / kind / "7", model / "7")
    shutil.copytree(saved / kind / "9", model / "9")
    label(model, stable=7, canary=9)
    detector = open_detector(model, "stable", dataclasses.replace(CPU, engine=engine, canary_share=1.0))

    def send():
        while not stop.is_set():
            results.extend(detector.detect([image(n) for n in range(8)]))

    with in_thread(send), contextlib.ExitStack() as sending:
        sending.callback(stop.set)
        look(detector)
        assert detector.canary.model.version == "9"
        shutil.copytree(saved / kind / "8", model / "8")
        for version in (8, 7):  # and back
            label(model, stable=version, canary=9)
            look(detector)
        count = len(results)
        wait_until(lambda: len(results) > count + 16)
    assert all(isinstance(result, DetectedImage) for result in results)
    assert {(result.model_version, version_of(result)) for result in results} == {("7", "7"), ("8", "8")}
    assert results[-1].model_version == "7"


@pytest.mark.parametrize(
    ("engine", "precision", "answers"), [("tensorflow", "bfloat16", "8"), ("openvino", "float32", "8"), ("openvino", "int8", "9")]
)
def test_a_version_that_is_swapped_in_runs_as_one_that_a_job_starts_with(
    tmp_path, saved, open_detector, engine, precision, answers
):
    """Also as a canary: with its int8 network it has the answers of that."""
    model, detect = tmp_path / "detector", dataclasses.replace(CPU, engine=engine, precision=precision, canary_share=1.0)
    for version, int8 in ((7, 6), (8, 9)):
        shutil.copytree(saved / "tensorflow" / str(version), model / str(version))
        add_int8(model / str(version), saved / "tensorflow" / str(int8))
    label(model, stable=7, canary=8)
    started, detector = open_detector(model / "8", None, detect), open_detector(model, "stable", detect)
    look(detector)
    canary = detector.canary.model
    label(model, stable=8)
    look(detector)
    assert version_of(detector.detect([image()])[0]) == version_of(started.detect([image()])[0]) == answers
    runs = {(one.version, type(one.batcher.engine), one.metadata) for one in (started.model, canary, detector.model)}
    assert len(runs) == 1 and runs.pop()[0] == "8"


@pytest.mark.parametrize("labels", [{"stable": 8}, {"stable": 7, "canary": 8}], ids=["the next version", "the canary"])
@log_lines()
def test_a_version_without_an_int8_network_is_refused_where_a_job_asks_for_one(tmp_path, saved, open_detector, capfd, labels):
    model = tmp_path / "detector"
    shutil.copytree(saved / "tensorflow" / "7", model / "7")
    add_int8(model / "7", saved / "tensorflow" / "6")
    label(model, stable=7)
    detector = open_detector(model, "stable", dataclasses.replace(CPU, engine="openvino", precision="int8", canary_share=1.0))
    shutil.copytree(saved / "tensorflow" / "8", model / "8")
    label(model, **labels)
    look(detector)
    assert (detector.model.version, detector.canary) == ("7", None)
    assert version_of(detector.detect([image()])[0]) == "6"
    said = capfd.readouterr().err
    assert "8 is refused" in said
    assert f"has no int8 network that can be read ({INT8}); make a version: detect-objects quantize" in said


def add_int8(folder, network_of):
    """Gives a version, as its int8 network, the network of another one: its answers then say that it was used."""
    network = converted(str(network_of), str(network_of), ModelConfig(path=str(network_of), name="detector"))
    shutil.copytree(network, folder / INT8)


@log_lines()
def test_a_version_with_a_manifest_is_used_at_the_first_look_that_finds_it_whole(model, tmp_path, open_detector, capfd):
    detector = open_detector(model)
    whole = write_version(tmp_path / "whole", 8)
    write_manifest(whole)
    shutil.copytree(whole, model / "8")
    graph = model / "8" / "model.onnx"
    content = graph.read_bytes()
    graph.write_bytes(content[:5])
    look(detector, 3)
    assert (detector.model.version, detector.counted_swaps()) == ("7", {})
    assert name_and_version(ModelConfig(path=str(model)))[1] == "7"
    assert capfd.readouterr().err == (f"model {model}: version 8 is incomplete (missing model.onnx) and ignored for now\n")
    with pytest.raises(ModelError, match=r"found none; version 8 is incomplete \(missing model.onnx\)"):
        open_detector(model / "8")
    graph.write_bytes(content)
    look(detector, 1)
    assert detector.model.version == "8"


@pytest.mark.parametrize("place", ["local", pytest.param("storage", marks=pytest.mark.matrix)])
@log_lines()
def test_a_version_is_waited_for_refused_once_taken_and_rolled_back(request, tmp_path, open_detector, capfd, place):
    path = f"gs://{request.getfixturevalue('gcs_bucket').name}/models/detector" if place == "storage" else f"{tmp_path}/detector"
    write_version(path, 7)
    detector = open_detector(path)
    write_file(f"{path}/8/part", b"no model yet")
    look(detector, 3)
    write_version(path, 8)
    for size in range(3):  # somebody is writing it
        write_file(f"{path}/8/part", b"x" * size)
        look(detector, 1)
    assert (detector.model.version, capfd.readouterr().err) == ("7", "")

    before = COUNTED.model_events.copy()
    write_version(path, 8, classes="b")
    look(detector, 4)
    why = "its class 0 is b, that of the version in use is a"
    assert capfd.readouterr().err == f"model detector: version 8 is refused, version 7 stays: {why}\n"
    for _ in ("before an image comes", "after one"):
        assert COUNTED.model_events - before == {"refusals": 1}, "which raises an alert"
        assert detector.counted_swaps() in ({"refusals": 1}, {})

    write_version(path, 8)
    look(detector, 1)
    assert detector.model.version == "7"
    look(detector, 2)
    assert detector.model.version == version_of(detector.detect([image()])[0]) == "8"
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("model detector: version 7 -> 8, loaded in ")

    delete_files(file.path for file in files_of(f"{path}/8"))
    look(detector, 1)
    assert detector.model.version == "7"
    assert detector.model_stats().in_use == ("detector", "7") and COUNTED.model_events - before == {"refusals": 1, "swaps": 2}
    assert (detector.counted_swaps(), detector.counted_swaps()) == ({"swaps": 2}, {})
    delete_files(file.path for file in files_of(f"{path}/7"))
    with pytest.raises(ModelError, match="found none"):
        look(detector, 1)
    assert version_of(detector.detect([image()])[0]) == "7"


def slow(version, concurrent_batches=2):
    """A version that waits where a test says so; the events of its first call, of going on and of its end."""
    called, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def run(pixels):
        called.set()
        assert go_on.wait(WAIT_S)
        return {"boxes": np.zeros((1, 1, 4)), "scores": np.full((1, 1), version / 100)}

    detect = DetectConfig(batch_sizes=(1,), concurrent_batches=concurrent_batches)
    return loaded(str(version), run, detect, close=closed.set), called, go_on, closed


def test_what_is_under_way_is_finished_by_its_version_which_is_closed_then():
    (old, called, go_on, closed), (new, _, new_may, new_closed) = slow(7), slow(8)
    detector = Detector(old, CPU)
    first = detector.start([image()])
    assert called.wait(WAIT_S)
    new_may.set()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(detector.in_use.swap, new)
        wait_until(lambda: detector.model is new)
        (second,) = detector.start([image()]).result()
        assert second.model_version == "8" and not first.done() and not closed.is_set()
        go_on.set()
    assert first.result()[0].model_version == "7" and closed.is_set()
    detector.close()
    assert new_closed.is_set()


def test_a_version_that_wants_more_images_at_once_loses_none():
    """An image that was waiting is done all the same."""
    (old, called, go_on, _), (new, _, new_may, _) = slow(7, concurrent_batches=1), slow(8, concurrent_batches=32)
    detector = Detector(old, dataclasses.replace(CPU, feeder_processes=1))
    before = [detector.start([image()]) for _ in range(20)]
    assert called.wait(WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(detector.in_use.swap, new)
        wait_until(lambda: detector.model is new)
        under_way = [detector.start([image()]) for _ in range(64)]
        go_on.set(), new_may.set()
    assert {result.result()[0].model_version for result in before + under_way} == {"7", "8"}
    detector.close()


PADDED = {"padding": "x" * 600_000}
FAILS = {**PADDED, "requests": ["no image"]}  # of its warm-up file


@pytest.fixture
def crowded(model, open_detector, monkeypatch):
    """A detector of version 7 that is to use version 8; its memory has no room for both: each takes 0.6 MB by its file."""
    for version in (7, 8):
        write_version(model, version, **PADDED)
    monkeypatch.setattr("pipeline.detect.model_watcher.gpu_bytes", lambda _: 1_000_000)
    label(model, stable=7)
    detector = open_detector(model, "stable")
    label(model, stable=8)
    return detector


@pytest.mark.parametrize("usable", [True, False])
@log_lines()
def test_where_two_versions_have_no_room_the_old_one_makes_way_and_images_wait(crowded, model, capfd, usable):
    """And if the next one cannot be used, the old one is loaded again."""
    if not usable:
        write_version(model, 8, **FAILS)
        look(crowded, 1)
    old, results = crowded.model.batcher, []
    with in_thread(lambda: results.extend(crowded.detect([image(n) for n in range(200)]))):
        look(crowded, 1)
    results += crowded.detect([image()])
    lines = capfd.readouterr().err.splitlines()
    now, said = ("8", "version 7 -> 8, loaded in ") if usable else ("7", "version 7 is in use again; ")
    assert lines[-1].startswith(f"model detector: {said}") and "memory has no room for two versions" in lines[-1]
    assert crowded.model.version == now and crowded.model.batcher is not old
    assert {(result.model_version, version_of(result)) for result in results} <= {("7", "7"), ("8", "8")}
    assert results[-1].model_version == now


@pytest.mark.parametrize(("free_mb", "waits"), [("0", True), ("80000", False), ("[N/A]", False)])
@log_lines()
def test_the_memory_that_other_processes_leave_of_a_gpu_counts_with_every_engine(
    model, open_detector, capfd, monkeypatch, tmp_path, free_mb, waits
):
    """ONNX Runtime does not tell how much it has; NVIDIA's driver does."""
    program, real = tmp_path / "bin" / "nvidia-smi", glob.glob
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{free_mb}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(glob, "glob", lambda path, **more: ["/dev/nvidia0"] if "nvidia" in path else real(path, **more))
    for version in (7, 8):
        write_version(model, version, gpu=True)
    label(model, stable=7)
    detector = open_detector(model, "stable")
    label(model, stable=8)
    look(detector)
    assert detector.model.version == "8"
    assert ("memory has no room for two versions" in capfd.readouterr().err) == waits


@log_lines()
def test_a_version_that_had_room_for_small_batches_alone_is_loaded_again_once_it_has_the_memory(model, open_detector, capfd):
    write_version(model, 8, beside_others=2)
    label(model, stable=7)
    detector = open_detector(model, "stable")
    label(model, stable=8)
    look(detector)
    assert (detector.model.version, detector.batch_sizes) == ("8", (1, 2, 4))
    assert "memory has no room for two versions" in capfd.readouterr().err


@log_lines()
def test_a_version_that_made_way_and_cannot_be_loaded_again_is_tried_at_each_look(crowded, model, tmp_path, capfd):
    """The next version is refused while the files of the old one are out of reach; once they are back, images are detected.

    The error is one that a supervisor repeats.
    """
    write_version(model, 8, **FAILS)
    look(crowded, 1)
    (model / "7").rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(ModelError, match="found none"):
            look(crowded, 1)
        with pytest.raises(ModelAwayError, match="it was in use, and made way for another version that cannot be used") as caught:
            crowded.detect([image()])
        assert caught.value.exit_code == 1
    (tmp_path / "away").rename(model / "7")
    look(crowded, 1)
    assert version_of(crowded.detect([image()])[0]) == "7"
    assert "model detector: version 7 is in use again; " in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("labels", [{"stable": 8}, {"stable": 7, "canary": 8}], ids=["the next version", "the canary"])
@log_lines()
def test_a_version_that_cannot_be_loaded_for_a_while_is_refused_with_pauses(
    model, tmp_path, open_detector, capfd, monkeypatch, labels
):
    """The disk is full: the version in use stays, and makes way no more, until the pause is over."""
    label(model, stable=7)
    detector = open_detector(model, "stable", dataclasses.replace(FAST, canary_share=1.0))
    write_version(model, 8, raises=f"{tmp_path}/room")
    label(model, **labels)
    monkeypatch.setattr("pipeline.detect.model_watcher.gpu_bytes", lambda _: 1 if labels["stable"] == 8 else None)
    look(detector, 2)
    in_use = detector.model.batcher
    look(detector, 3)
    assert (detector.model.version, detector.model.batcher, detector.canary) == ("7", in_use, None)
    said = capfd.readouterr().err
    assert said.count("8 is refused") == 1 and "No space left on device" in said
    assert detector.counted_swaps() == {"refusals": 1}
    (tmp_path / "room").touch()
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 61)
    look(detector, 1)
    assert "8" in (detector.model.version, detector.canary and detector.canary.model.version)


def test_a_job_begins_with_the_older_version_while_the_newest_cannot_be_loaded(model, tmp_path, open_detector):
    write_version(model, 8, raises=f"{tmp_path}/room")
    detector = open_detector(model)
    assert detector.model.version == "7" and detector.counted_swaps() == {"refusals": 1}


def test_where_the_newest_version_is_broken_and_the_gpu_is_sick_a_supervisor_starts_the_job_again(model):
    write_version(model, 7, gpu=True, fails="CUDA_ERROR_NO_DEVICE")
    write_version(model, 8, broken="no detector")
    with pytest.raises(DeviceFailedError, match="7: fails on a blank image: CUDA_ERROR_NO_DEVICE"):
        load_detector(ModelConfig(path=str(model)), FAST)


@pytest.mark.parametrize("to", [{"resize": "none"}, {"input_hw": (300, 400)}], ids=["any size", "larger"])
def test_a_swap_to_another_kind_of_input_loses_no_image_and_mixes_none_up(to):
    """Also if that version takes images of any size, one at a time, while chunks of several are collected or under way."""

    def grey(pixels):
        means = pixels.mean((1, 2, 3)).astype(np.float32)[:, None]
        return {"boxes": np.tile(np.float32([0, 0, 1, 1]), (len(pixels), 1, 1)), "scores": means / 255}

    how = dataclasses.replace(ONE, batch_sizes=(1, 2, 4))
    old, new = loaded("7", grey, how), loaded("8", grey, ONE if "resize" in to else how)
    new = dataclasses.replace(new, metadata=dataclasses.replace(new.metadata, **to))
    greys = [90 + 10 * n for n in range(12)]
    images = [png(f"{n}.png", np.full((40 + n, 60, 3), each, np.uint8)) for n, each in enumerate(greys)]
    before = feeders()
    with contextlib.closing(Detector(old, ONE)) as detector:
        detector.detect(images[:4])
        processes = feeders() - before

        def given():
            """All images; the swap comes while a chunk is fed and two images of the next one are collected."""
            for n, each in enumerate(images):
                if n == 4:
                    for process in processes:
                        process.suspend()
                if n == 10:
                    detector.in_use.swap(new)
                    for process in processes:
                        process.resume()
                yield each

        results = [*detect_images(given(), detector)]
    assert {type(each) for each in results} == {DetectedImage} and {each.model_version for each in results[4:]} == {"8"}
    assert [round(float(each.detections.confidences[0]) * 255) for each in results] == greys


OLD = DetectorMetadata("m", HW, "stretch", ("cat", "dog"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"input_hw": (64, 64), "signature": "other", "resize": "letterbox", "nms": "pipeline"}, None),
        ({"class_names": ("cat", "dog", "cow")}, None),
        ({"class_names": ("cat",)}, "it has 1 classes, the version in use has 2"),
        ({"class_names": ("dog", "cat")}, "its class 0 is dog, that of the version in use is cat"),
        ({"class_names": ()}, "it has 0 classes, the version in use has 2"),
        ({"name": "n"}, "its name is n, that of the version in use is m; set model.name if they are one"),
    ],
    ids=str,
)
def test_a_version_must_mean_the_same_by_its_classes(changes, problem):
    assert incompatible(dataclasses.replace(OLD, **changes), OLD) == problem


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("9", "expected version 9, found 7; check --model-version"),
        ("stable", "expected a version's number or label as --model-version, got stable; there is no labels.json there that"),
        ("gold", "got gold; labels.json there has stable"),
        ("old", "expected version 6, which labels.json calls old, found 7; check --model-version"),
        ("broken", "labels.json is no JSON"),
        ("list", 'expected labels.json to be such as {"stable": 7, "canary": 8}, got [7]'),
    ],
)
def test_a_version_that_is_not_there_is_one_clear_line(model, named, message):
    content = {"gold": '{"stable": 7}', "old": '{"old": 6}', "broken": "{", "list": "[7]"}.get(named)
    if content:
        (model / "labels.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        load_detector(ModelConfig(path=str(model), model_version=named), FAST)
    assert str(caught.value).startswith(f"model {model}: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["local", "storage"])
def test_versions_are_found_on_disk_and_on_storage(request, tmp_path, place):
    path = str(tmp_path) if place == "local" else f"gs://{request.getfixturevalue('gcs_bucket').name}/a[1]"
    for name in ("7/saved_model.pb", "7/variables/x", "010/saved_model.pb", "11/variables/x", "x/saved_model.pb", "labels.json"):
        write_file(f"{path}/{name}", b"{}")
    assert [version.name for version in resolve_versions(path)] == ["10", "7"]
    assert locate(path) == (f"{path}/010", "10")
    assert locate(f"{path}/7/") == (f"{path}/7", "7")
    first = resolve_versions(path)
    assert resolve_versions(path) == first
    write_file(f"{path}/7/variables/x", b"other")
    assert [old == new for old, new in zip(first, resolve_versions(path), strict=True)] == [True, False]
    assert is_watchable(ModelConfig(path=path)) and not is_watchable(ModelConfig(path=f"{path}/7"))
    assert not is_watchable(ModelConfig(path=path, model_poll_s=0)) and not is_watchable(ModelConfig("digits"))
    assert not is_watchable(ModelConfig(path=path, model_version="7"))


def test_a_link_to_a_version_is_a_version(tmp_path, model):
    """So renaming a link is a release."""
    (tmp_path / "links").mkdir()
    os.symlink(model / "7", tmp_path / "links" / "2")
    assert locate(str(tmp_path / "links")) == (f"{tmp_path}/links/2", "2")


SWAPS = 30
MEASURE = """
import gc, json, sys
import psutil
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_detector import load_detector
from pipeline.detect.load_model import load
from tests.detect.versioned_models import image
path, settings = sys.argv[1], DetectConfig(batch_sizes=(1, 2), concurrent_batches=2, engine=sys.argv[3])
detector, process, seen = load_detector(ModelConfig(path=path), settings), psutil.Process(), []
for _ in range(int(sys.argv[2])):
    detector.in_use.swap(load(ModelConfig(path=f"{path}/8"), settings))
    detector.detect([image(n) for n in range(20)])
    seen.append((process.num_threads(), process.memory_info().rss / 1e6))
print(json.dumps([seen, gc.get_freeze_count(), len(gc.get_objects())]))
"""


@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["tensorflow", "openvino"])
def test_swaps_again_and_again_take_no_more_threads_and_no_more_memory(tmp_path, engine):
    """In a process of its own, whose memory no other test uses; five million values, so that a version that stays shows.

    To find what a closed version leaves, no swap looks through all of TensorFlow, while no other Python thread runs.
    """
    save_version(tmp_path, 7, values=5_000_000)
    save_version(tmp_path, 8, values=5_000_000)
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(SWAPS), engine]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=580, check=True)
    seen, spared, looked_through = json.loads(done.stdout)
    threads, rss_mb = zip(*seen, strict=True)
    # a version may be closed a moment later; one that stays adds threads and at least 20 MB
    early, late = slice(2, 8), slice(-6, None)
    assert min(threads[late]) < min(threads[early]) + SWAPS / 2, threads  # the detector's own come when they are needed
    assert min(rss_mb[late]) < min(rss_mb[early]) + 20 * SWAPS / 3, rss_mb
    assert looked_through < spared / 5
