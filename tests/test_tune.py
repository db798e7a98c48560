"""The tuner measures each candidate beside the start, and writes only settings that are faster beyond doubt."""

import os
import signal
import subprocess
import sys

import cv2
import numpy as np
import psutil
import pytest

import pipeline.tuning.search as search_module
from pipeline import tune
from pipeline.config import Config, DetectConfig, ModelConfig, load_config
from pipeline.detect.load_detector import load_detector
from pipeline.errors import ModelError
from pipeline.limits import machine
from pipeline.tune import main
from pipeline.tuning.search import FINAL_ROUNDS, Search, Trial, is_faster
from tests.conftest import REPO
from tests.processes import has_ended, running, wait_until

SCENES = sorted(map(str, (REPO / "models" / "digits" / "samples").glob("*.jpg")))[:4]
DIGITS = Config(model=ModelConfig("digits"))


@pytest.mark.matrix
def test_each_candidate_is_measured_beside_the_start_and_an_impossible_one_ends_nothing(bright_model):
    """The faster half of a stage gets further turns; of each candidate there are figures, or the reason why not."""
    search = Search([], {"model.path": bright_model}, SCENES, min_agreement=0.9, seconds=580, turn_s=0.1)
    possible = [{"detect.decode_threads": number} for number in (1, 2, 4)]
    start, *others = search.results(
        [[*possible[:2], {"detect.batch_sizes": [2, 1]}, {"detect.score_threshold": 1.0}], possible[2:]]
    )
    assert (start.settings, start.speed, start.refused) == ({}, 1, "") and start.alone_ms > 0 and start.half_load_ms > 0
    impossible = next(one for one in others if one.settings == {"detect.batch_sizes": [2, 1]})
    blind = next(one for one in others if one.settings == {"detect.score_threshold": 1.0})
    measured = [one for one in others if one not in (impossible, blind)]
    assert "ascending sizes" in impossible.refused and impossible.speed == 0
    assert blind.refused.startswith("it finds other objects: agreement 0.000") and blind.speed == 0
    assert {one.settings["detect.decode_threads"] for one in measured} == {1, 2, 4}
    for one in measured:
        assert one.speed > 0 and one.rate > 0 and one.memory_mb > 0 and one.agreement == 1 and one.refused == ""


# Speaks a trial's protocol: always the same row, and the rate that its settings say
TRIAL = """
import json, sys
overrides = json.loads(sys.stdin.readline())["overrides"]
faster = {2: 2.0, 3: 1.5, 4: 1.45, 5: 1.1, 6: 0.9}
rate = 100 * faster.get(overrides.get("detect.concurrent_batches"), 1) * faster.get(overrides.get("detect.decode_threads"), 1)
found = {"class_id": 0, "class_name": "rectangle", "confidence": 1.0, "box_xyxy": [0, 0, 9, 9]}
row = {"image": {"uri": "a.jpg", "width": 64, "height": 64}, "detections": [found]}
figures = {"throughput": rate, "latency": [1 / rate], "memory": 1.0}
print(json.dumps({"rows": [row]}), flush=True)
for line in sys.stdin:
    print(json.dumps({name: figures[name] for name in [json.loads(line)["measure"]]}), flush=True)
"""


def test_the_best_of_a_stage_is_measured_again_beside_the_candidates_of_the_next(monkeypatch):
    """The faster half of a stage, but two at least, get all turns unless they are far behind the first."""
    monkeypatch.setattr(search_module, "command_of", lambda _: [sys.executable, "-S", "-c", TRIAL])
    search = Search([], {}, SCENES, min_agreement=0.9, seconds=580)
    stages = [[{"detect.concurrent_batches": 2}], [{"detect.decode_threads": number} for number in (3, 4, 5, 6)]]
    results = list(search.results(stages))
    best = {"detect.concurrent_batches": 2}
    assert [(one.settings, one.speed) for one in results[:2]] == [({}, 1.0), (best, 2.0)]
    of_stage = {one.settings.get("detect.decode_threads"): one for one in results[2:]}
    assert all(
        one.settings == {**best, **({"detect.decode_threads": number} if number else {})} for number, one in of_stage.items()
    )
    assert {number: (round(one.speed, 6), len(one.ratios)) for number, one in of_stage.items()} == {
        None: (2.0, 1),
        3: (3.0, 4),
        4: (2.9, 4),
        5: (2.2, 1),
        6: (1.8, 1),
    }
    assert search.best is of_stage[3]
    final = search.final(search.best.settings)
    assert (final.ratios, final.refused) == ([3.0] * FINAL_ROUNDS, "")


@pytest.mark.matrix
def test_a_candidate_that_hangs_ends_and_is_reported_in_lines_and_page(tmp_path, bright_model, monkeypatch, capsys):
    """It reads class names from a pipe to which nobody writes."""
    os.mkfifo(tmp_path / "pipe.txt")
    monkeypatch.setattr(tune, "STAGES", [lambda _: [{"model.class_names": str(tmp_path / "pipe.txt")}]])
    monkeypatch.setattr(search_module, "_ANSWERS_S", 1.0)
    monkeypatch.setattr(search_module, "_TIMES_START", 0.0)
    output, before = tmp_path / "tuned.yaml", psutil.Process().children()
    assert main(["--input", SCENES[0], "--model", bright_model, "--output", str(output)]) == 0
    _start, hanging, verdict = capsys.readouterr().err.splitlines()
    assert hanging == f"class_names {tmp_path}/pipe.txt: did not answer for 1 s"
    assert hanging.partition(": ")[2] in output.with_suffix(".html").read_text()
    assert verdict == "Nothing is faster than the settings of the start."
    assert psutil.Process().children() == before


def test_a_trial_that_hangs_ends_with_all_of_its_group(tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    hang = ["sh", "-c", f"tail -f /dev/null & echo $$ $! > {pids}; wait"]
    monkeypatch.setattr(search_module, "command_of", lambda _: hang)
    with Trial([], {}, SCENES, turn_s=0.1, answers_s=0.5) as trial:
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        with pytest.raises(ModelError, match="did not answer for 0 s"):
            trial.loaded()
        for pid in map(int, pids.read_text().split()):
            wait_until(lambda pid=pid: has_ended(pid))


@pytest.mark.slow
def test_what_the_budget_does_not_reach_is_named(bright_model):
    search = Search([], {"model.path": bright_model}, SCENES, min_agreement=0.9, seconds=0, turn_s=0.1)
    _, late = search.results([[{"detect.decode_threads": 1}]])
    assert (late.name, late.refused) == ("decode_threads 1", "not tried: the time was over")


@pytest.mark.slow
def test_without_a_faster_candidate_the_config_says_so_and_changes_nothing(tmp_path, bright_model, capsys):
    """It may write its own files again; a file of somebody else stays."""
    output = tmp_path / "tuned.yaml"
    flags = ["--input", SCENES[0], "--model", bright_model, "--output", str(output), "--budget-s", "0"]
    assert main(flags) == 0
    assert capsys.readouterr().out == f"{output}, {tmp_path}/tuned.html\n"
    assert "Nothing is faster than the settings of the start." in output.read_text()
    assert load_config([str(output)], {}) == Config()
    assert machine() in (tmp_path / "tuned.html").read_text()
    assert main([*flags, "--model", "none"]) == 1, "it may write these files again"
    output.write_text("detect: {}\n")
    assert main(flags) == 2
    assert "tuned.yaml: is a file that this command did not write" in capsys.readouterr().err
    assert output.read_text() == "detect: {}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        pytest.param(["--input", "none/*.jpg"], 2, "none/*.jpg: no file matches", id="no images"),
        pytest.param(["--input", SCENES[0], "--model", "none"], 1, "model none: expected a SavedModel", id="no model"),
        pytest.param(["--input", SCENES[0], "--config", "none.yaml"], 2, "config none.yaml: cannot be read", id="no config"),
    ],
)
def test_a_wrong_place_is_one_line(tmp_path, monkeypatch, capsys, flags, code, message):
    monkeypatch.chdir(tmp_path)
    assert main(flags) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_files_that_are_no_images_are_one_line(tmp_path, bright_model, capsys):
    (tmp_path / "a.jpg").write_bytes(b"no image")
    assert main(["--input", f"{tmp_path}/a.jpg", "--model", bright_model, "--output", str(tmp_path / "tuned.yaml")]) == 2
    assert capsys.readouterr().err == "error: input: none of the 1 files is an image that can be decoded\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.jpg"]


@pytest.mark.slow
def test_images_without_an_object_are_one_line(tmp_path, bright_model, capsys):
    """Each candidate would agree with the start on them."""
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((40, 40, 3), np.uint8))
    assert main(["--input", f"{tmp_path}/a.png", "--model", bright_model, "--output", str(tmp_path / "tuned.yaml")]) == 2
    assert (
        capsys.readouterr().err == "error: input: no object in 1 images, so nothing shows what a candidate finds; give others\n"
    )


@pytest.mark.slow
def test_a_stopped_command_ends_its_trials_and_writes_nothing(tmp_path):
    """Also where the signal comes as soon as there is a trial."""
    command = [
        sys.executable,
        "-m",
        "pipeline",
        "tune",
        "--input",
        *SCENES,
        "--model",
        "digits",
        "--output",
        str(tmp_path / "tuned.yaml"),
    ]
    with running(command, cwd=REPO, stderr=subprocess.PIPE) as process:
        children = wait_until(lambda: psutil.Process(process.pid).children(), process=process)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 130
        assert process.stderr.read().endswith(b"stopped; nothing is written\n")
    for child in children:
        wait_until(lambda pid=child.pid: has_ended(pid))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ratios", "faster"),
    [
        pytest.param([1.5] * FINAL_ROUNDS, True, id="always"),
        pytest.param([1.35, 1.2, 1.13, 1.13, 1.1, 1.05, 0.98], True, id="once slower by a little"),
        pytest.param([1.5, 1.4, 1.3, 1.2, 1.0, 0.9, 0.8], False, id="a noisy machine"),
        pytest.param([1.01] * FINAL_ROUNDS, False, id="by too little"),
        pytest.param([1.5], False, id="too few rounds"),
        pytest.param([], False, id="nothing was better than the start"),
    ],
)
def test_only_what_wins_beyond_doubt_and_by_enough_is_faster(ratios, faster):
    assert is_faster(ratios) is faster


def test_stages_try_what_changes_something():
    assert {"detect.engine": "tensorflow", "detect.precision": "float32"} not in tune.engines(DIGITS)
    assert {"detect.engine": "tensorflow", "detect.precision": "bfloat16"} in tune.engines(DIGITS)
    served = Config(detect=DetectConfig(engine="triton"))
    assert tune.engines(served) == tune.threads(served) == []
    assert tune.batch_sizes(Config(detect=DetectConfig(engine="openvino"))) == []
    assert [1, 2, 4, 8] in [one["detect.batch_sizes"] for one in tune.batch_sizes(DIGITS)]
    for stage in (tune.concurrent_batches, tune.threads, tune.decoders, tune.batch_sizes):
        for change in stage(DIGITS):
            assert change not in stage(load_config([], change)), "the best of an earlier stage"


def test_what_wins_is_a_config_to_include_that_names_its_machine(tmp_path):
    (tmp_path / "tuned.yaml").write_text(
        tune._config_text({"detect.batch_sizes": [1, 2], "detect.precision": "bfloat16"}, "Won.")
    )
    config = load_config([str(tmp_path / "tuned.yaml")], {})
    assert config == Config(detect=DetectConfig(batch_sizes=(1, 2), precision="bfloat16", tuned_on=machine()))


def test_cores_with_several_threads_are_tried_with_one_each(monkeypatch):
    monkeypatch.setattr(tune, "first_threads", lambda: [0, 2])
    assert tune.cores(DIGITS) == [{"detect.cpu_affinity": [0, 2]}]
    assert tune.cores(Config(detect=DetectConfig(cpu_affinity=(0,)))) == []
    monkeypatch.setattr(tune, "first_threads", list)
    assert tune.cores(DIGITS) == []


@pytest.mark.parametrize(("tuned_on", "lines"), [("a machine with 96 cores", 1), (machine(), 0), ("", 0)])
def test_another_machine_is_told_of(bright_model, capfd, tuned_on, lines):
    load_detector(ModelConfig(path=bright_model), DetectConfig(batch_sizes=(1,), tuned_on=tuned_on)).close()
    err = capfd.readouterr().err
    assert err.count(f"the settings were tuned on {tuned_on}; this is {machine()}") == lines
