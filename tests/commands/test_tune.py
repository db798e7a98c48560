"""The tuner measures each candidate beside the start, and writes only settings that are faster beyond doubt."""

import contextlib
import glob
import os
import signal
import subprocess
import sys

import cv2
import numpy as np
import psutil
import pytest

from pipeline.commands import tune
from pipeline.commands.tune import Result, better, candidates, decide, main, race
from pipeline.config import Config, DetectConfig, ModelConfig, load_config
from pipeline.detect.detect_objects import detect_images
from pipeline.detect.detector import Detector
from pipeline.detect.trial import rate
from pipeline.limits import available_cpus, machine
from pipeline.records import ImageRef
from tests.conftest import REPO
from tests.detect.versioned_models import loaded
from tests.processes import has_ended, running, wait_until

SCENES = sorted(map(str, (REPO / "models" / "digits" / "samples").glob("*.jpg")))[:4]
DIGITS = Config(model=ModelConfig("digits"))


# an engine of a user's own, which needs no TensorFlow; it notes the GPU of its process
TELLS = """
import os
import numpy as np
from models.metadata import DetectorMetadata
from pipeline.detect.engine import FunctionEngine, OpenedModel

def open_model(local, folder, model, detect):
    with open(os.environ["TOLD"], "a") as file:
        print(os.environ.get("CUDA_VISIBLE_DEVICES"), file=file)
    def find(pixels):
        return {"boxes": np.full((len(pixels), 1, 4), (0.2, 0.2, 0.6, 0.6)), "scores": np.full((len(pixels), 1), 0.9)}
    return OpenedModel(FunctionEngine(find, detect), DetectorMetadata("toy", (96, 128), "stretch", ("a",)))
"""


@pytest.mark.slow
def test_each_candidate_is_measured_beside_the_start_and_an_impossible_one_ends_nothing(tmp_path, monkeypatch):
    """Of each candidate there are figures, or the reason why not."""
    (tmp_path / "tells.py").write_text(TELLS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    given = {"model.name": "toy", "detect.engine": "tells:open_model", "detect.batch_sizes": [1]}
    with race([], given, SCENES, min_agreement=0.9, turn_s=0.01) as measure:
        feeders = measure({"detect.feeder_processes": 1})
        assert len(feeders.ratios) == len(feeders.rates) == 3 and feeders.speed > 0 and feeders.refused == ""
        impossible = measure({"detect.batch_sizes": [2, 1]})
        assert "ascending sizes" in impossible.refused and impossible.speed == 0
        blind = measure({"detect.score_threshold": 1.0})
        assert blind.refused.startswith("it finds other objects: agreement 0.000") and blind.speed == 0
        failing = measure({"detect.max_megapixels": 0.01})
        assert failing.refused.startswith("the outputs have no image in common") and failing.speed == 0


class Watched(Detector):
    """A detector that counts the chunks that are started before the first one's results are taken."""

    ahead = 0

    def start(self, images):
        chunk = super().start(images)
        if not self.taken:
            self.ahead += 1
        chunk.result = lambda result=chunk.result: self.taken.append(True) or result()
        return chunk


@pytest.mark.slow
def test_a_turn_has_as_many_images_under_way_as_a_job():
    """So many that all feeder processes have work, which is more than the engine alone can use."""
    photos, ahead = [ImageRef(scene) for scene in SCENES], []
    for detect in (lambda detector: [*detect_images(photos * 50, detector)], lambda detector: rate(detector, photos, 0.0)):
        model = loaded("7", lambda pixels: {"boxes": np.zeros((len(pixels), 1, 4)), "scores": np.zeros((len(pixels), 1))})
        detector = Watched(model, DetectConfig(feeder_processes=3))
        detector.taken = []
        detect(detector)
        ahead.append(detector.ahead)
        detector.close()
    assert ahead[0] == ahead[1] > model.batcher.images_in_flight + 1


ON_TWO_GPUS = """
import sys
from pipeline.commands import tune

if __name__ == "__main__":
    tune.nvidia_gpus = lambda: 2
    tune.STAGES = ("batch_sizes",)
    tune.candidates = lambda *_: [{"detect.batch_sizes": [1]}]
    sys.exit(tune.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_on_several_gpus_all_trials_run_on_one_that_nobody_else_uses(tmp_path, monkeypatch):
    """Else the start and a candidate, two processes, would each take another one."""
    for name, code in {"tells.py": TELLS, "on_two_gpus.py": ON_TWO_GPUS}.items():
        (tmp_path / name).write_text(code)
    for name, value in {"PYTHONPATH": f"{tmp_path}:{REPO}", "TMPDIR": str(tmp_path), "TOLD": str(tmp_path / "told")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    other = "import sys; from pipeline.detect.gpus import take_gpu; print(take_gpu(2), flush=True); sys.stdin.read()"
    with running([sys.executable, "-c", other], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"0\n"
        (tmp_path / "job.yaml").write_text("model: {name: toy}\ndetect: {engine: 'tells:open_model'}\n")
        command = [sys.executable, "on_two_gpus.py", "--config", "job.yaml", "--input", SCENES[0]]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    told = (tmp_path / "told").read_text().split()
    assert len(told) >= 2 and set(told) == {"1"}, told


@pytest.mark.matrix
def test_a_candidate_that_hangs_ends_and_one_that_comes_too_late_is_named(tmp_path, bright_model, monkeypatch, capsys):
    """The first one reads class names from a pipe to which nobody writes."""
    os.mkfifo(tmp_path / "pipe.txt")
    monkeypatch.setattr(tune, "STAGES", ["engine"])
    monkeypatch.setattr(tune, "candidates", lambda *_: [{"model.class_names": str(tmp_path / "pipe.txt")}])
    monkeypatch.setattr(tune, "_ANSWERS_S", 1.0)
    monkeypatch.setattr(tune, "_TIMES_START", 0.0)
    output = tmp_path / "tuned.yaml"
    flags = ["--input", SCENES[0], "--model", bright_model, "--output", str(output)]
    assert main(flags) == 0
    hanging, verdict = capsys.readouterr().err.splitlines()
    assert hanging == f"class_names {tmp_path}/pipe.txt: did not answer for 1 s"
    assert verdict == "Nothing is faster than the settings of the start."
    assert trials_of(os.getpid()) == []
    assert "Nothing is faster than the settings of the start." in output.read_text()
    assert load_config([str(output)], {}) == Config()
    assert main([*flags, "--budget-s", "0"]) == 0, "it may write this file again"
    late, _ = capsys.readouterr().err.splitlines()
    assert late.endswith("pipe.txt: not tried: the time was over")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        pytest.param({"input": "none/*.jpg"}, 2, "none/*.jpg: no file matches", id="no images"),
        pytest.param({"model": "none"}, 1, "model none: expected a SavedModel", id="no model"),
        pytest.param({"input": "*.??g"}, 2, "input: no object in 1 image that can be decoded, of 2 files", id="no object"),
        pytest.param({"output": "a.jpg"}, 2, "a.jpg: is a file that this command did not write", id="a file of somebody else"),
        pytest.param({"output": "pipe"}, 2, "--output pipe: expected a file or a free name", id="a pipe"),
    ],
)
def test_a_command_that_can_find_nothing_is_one_line_and_writes_nothing(
    tmp_path, monkeypatch, capsys, bright_model, given, code, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jpg").write_text("no image")
    cv2.imwrite("b.png", np.zeros((40, 40, 3), np.uint8))
    os.mkfifo("pipe")
    flags = {"input": SCENES[0], "model": bright_model, **given}
    assert main([word for name, value in flags.items() for word in (f"--{name}", value)]) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
    assert sorted(os.listdir()) == ["a.jpg", "b.png", "pipe"] and (tmp_path / "a.jpg").read_text() == "no image"


def trials_of(pid):
    """Processes of trials."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(pid).children() if "pipeline.detect.trial" in " ".join(child.cmdline())]


@pytest.mark.slow
def test_a_stopped_command_ends_its_trials_and_writes_nothing(tmp_path):
    output = str(tmp_path / "tuned.yaml")
    command = [sys.executable, "-m", "pipeline", "tune", "--input", *SCENES, "--model", "digits", "--output", output]
    with running(command, cwd=REPO, stderr=subprocess.PIPE) as process:
        children = wait_until(lambda: trials_of(process.pid), process=process)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 130
        said = process.stderr.read().decode()  # a trial that was just being started may say something, too
        assert "stopped; nothing is written" in said.splitlines(), said
    for child in children:
        wait_until(lambda pid=child.pid: has_ended(pid))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ratios", "faster"),
    [
        pytest.param([1.5] * 7, True, id="always"),
        pytest.param([1.35, 1.2, 1.13, 1.13, 1.1, 1.05, 0.98], True, id="once slower by a little"),
        pytest.param([1.5, 1.4, 1.3, 1.2, 1.0, 0.9, 0.8], False, id="a noisy machine"),
        pytest.param([1.01] * 7, False, id="by too little"),
        pytest.param([], False, id="the candidate ended"),
    ],
)
def test_only_what_wins_the_last_race_beyond_doubt_and_by_enough_is_faster(ratios, faster):
    settings = {"detect.feeder_processes": 1}
    last = Result(settings, ratios=ratios, refused="" if ratios else "it ended")
    won, verdict = decide(Result(settings, ratios=[1.5] * 3), lambda *_: last)
    assert won == (settings if faster else {})
    assert ("in 7 rounds" if ratios else "it ended") in verdict and verdict.startswith("Cannot tell") is not faster
    assert decide(Result({}), lambda *_: last) == ({}, "Nothing is faster than the settings of the start.")


@pytest.mark.parametrize(
    ("best", "other", "wins"),
    [
        pytest.param([], [1.05, 1.1, 1.03], True, id="the start is beaten"),
        pytest.param([], [1.05, 1.1, 0.99], False, id="once slower than the start"),
        pytest.param([], [1.01, 1.01, 1.01], False, id="by too little"),
        pytest.param([1.2, 1.2, 1.2], [1.3, 1.3, 1.25], True, id="the best is beaten"),
        pytest.param([1.2, 1.2, 1.2], [1.3, 1.3, 1.1], False, id="once slower than the best"),
    ],
)
def test_the_best_is_what_was_faster_in_each_turn(best, other, wins):
    former, newcomer = Result({}, ratios=best), Result({"detect.feeder_processes": 1}, ratios=other)
    assert better(former, newcomer) is (newcomer if wins else former)
    newcomer.refused = "it ended"
    assert better(former, newcomer) is former


def test_on_a_gpu_compiled_engines_are_tried_at_the_sizes_that_are_compiled_by_default(monkeypatch):
    """Each other one takes XLA 6 to 18 s of the time of tune."""
    real = glob.glob
    monkeypatch.setattr(glob, "glob", lambda path, **more: ["/dev/nvidia0"] if "nvidia" in path else real(path, **more))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def sizes(**settings):
        config = load_config([], {"model.path": "digits", **{f"detect.{name}": value for name, value in settings.items()}})
        return [one["detect.batch_sizes"] for one in candidates("batch_sizes", config)]

    compiled = [[1], [1, 8], [1, 8, 32]]
    assert sizes(engine="tensorflow") == sizes(engine="tensorrt") == compiled
    assert [1, 2, 4, 8] in sizes(engine="tensorflow", compiled="no") and [1, 2, 4, 8] in sizes(engine="onnxruntime")


def test_stages_try_what_changes_something(monkeypatch):
    engines = candidates("engine", DIGITS)
    assert {"detect.engine": "tensorflow", "detect.precision": "float32"} not in engines
    assert {"detect.engine": "tensorflow", "detect.precision": "bfloat16"} in engines
    served = load_config([], {"model.path": "grpc://localhost:1/m", "detect.engine": "triton"})
    assert candidates("engine", served) == candidates("intra_op_threads", served) == []
    assert candidates("batch_sizes", load_config([], {"model.path": "digits", "detect.engine": "openvino"})) == []
    assert [1, 2, 4, 8] in [one["detect.batch_sizes"] for one in candidates("batch_sizes", DIGITS)]
    for stage in tune.STAGES[1:]:
        for change in candidates(stage, DIGITS):
            assert change not in candidates(stage, load_config([], {"model.path": "digits", **change})), (
                "the best of an earlier stage"
            )
    monkeypatch.setattr(tune, "nvidia_gpus", lambda: 1)
    wanted = {"detect.engine": "tensorflow", "detect.precision": "float16", "detect.compiled": "no"}
    assert wanted in candidates("engine", DIGITS) and wanted not in engines, "only on a GPU XLA compiles"
    in_flight, at_server = candidates("concurrent_batches", DIGITS), candidates("concurrent_batches", served)
    assert [one["detect.concurrent_batches"] for one in in_flight] == [1, 2, 4, 6], "a GPU needs a few batches"
    assert {"detect.concurrent_batches": 2 * available_cpus()} in at_server, "a server has nothing to do with this GPU"


def test_what_wins_is_a_config_to_include_that_names_its_machine(tmp_path):
    (tmp_path / "tuned.yaml").write_text(
        tune._config_text({"detect.batch_sizes": [1, 2], "detect.precision": "bfloat16"}, "Won.")
    )
    config = load_config([str(tmp_path / "tuned.yaml")], {})
    assert config == Config(detect=DetectConfig(batch_sizes=(1, 2), precision="bfloat16"))
    assert machine() in (tmp_path / "tuned.yaml").read_text()
