"""The tuner measures each candidate beside the start, and writes only settings that are faster beyond doubt."""

import signal
import subprocess
import sys

import psutil
import pytest

from pipeline.config import Config, DetectConfig, ModelConfig, load_config
from pipeline.detect.load_detector import load_detector
from pipeline.limits import machine
from pipeline.tune import candidates, main
from pipeline.tuning.search import FINAL_ROUNDS, Search, is_faster
from tests.conftest import REPO
from tests.processes import has_ended, running, wait_until

SCENES = sorted(map(str, (REPO / "models" / "digits" / "samples").glob("*.jpg")))[:4]


@pytest.mark.slow
def test_each_candidate_is_measured_beside_the_start_and_an_impossible_one_ends_nothing(bright_model):
    search = Search([], {"model.path": bright_model}, SCENES, min_agreement=0.9, seconds=580, turn_s=0.2)
    changes = [{"detect.batch_sizes": [1]}, {"detect.batch_sizes": [2, 1]}, {"detect.score_threshold": 1.0}]
    start, smaller, impossible, other = search.results([changes])
    assert (start.settings, start.speed, start.refused, smaller.settings, smaller.refused) == ({}, 1, "", changes[0], "")
    for measured in (start, smaller):
        assert measured.ratios and measured.speed > 0 and measured.rate > 0 and measured.memory_mb > 0 and measured.agreement == 1
    assert start.alone_ms > 0 and start.half_load_ms > 0
    assert "ascending sizes" in impossible.refused and impossible.speed == 0
    assert other.refused.startswith("it finds other objects: agreement 0.000") and other.speed == 0


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
def test_a_stopped_command_ends_its_trials_and_writes_nothing(tmp_path):
    command = [sys.executable, "-m", "pipeline", "tune", "--input", *SCENES, "--output", str(tmp_path / "tuned.yaml")]
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
        pytest.param([1.5] * (FINAL_ROUNDS - 1) + [0.99], False, id="once slower: a noisy machine"),
        pytest.param([1.01] * FINAL_ROUNDS, False, id="by too little"),
        pytest.param([1.5], False, id="too few rounds"),
        pytest.param([], False, id="nothing was better than the start"),
    ],
)
def test_only_what_wins_every_round_by_enough_is_faster(ratios, faster):
    assert is_faster(ratios) is faster


def test_the_settings_of_the_start_are_no_candidate():
    first, *_ = candidates(Config())
    assert {"detect.engine": "tensorflow", "detect.precision": "float32"} not in first
    assert {"detect.engine": "tensorflow", "detect.precision": "bfloat16"} in first


@pytest.mark.parametrize(("tuned_on", "lines"), [("a machine with 96 cores", 1), (machine(), 0), ("", 0)])
def test_another_machine_is_told_of(bright_model, capfd, tuned_on, lines):
    load_detector(ModelConfig(path=bright_model), DetectConfig(batch_sizes=(1,), tuned_on=tuned_on)).close()
    err = capfd.readouterr().err
    assert err.count(f"the settings were tuned on {tuned_on}; this is {machine()}") == lines
