"""What people type who come from other tools, or mistype: one line each that says what to do."""

import os
import re

import pytest

from pipeline import __main__ as command_line
from pipeline import compact, reconcile, run
from pipeline.config import settings
from pipeline.config.mistakes import _FLAGS
from tests.conftest import write_bright_image

JOB = ["--input", "a.jpg", "--output", "out"]


def said(capsys, *argv):
    """The error line of a command that ends with 2."""
    assert run.main([*map(str, argv)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    return err.strip()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param(["--conf", "0.4"], "unknown flag --conf; use --score-threshold", id="conf"),
        pytest.param(["--conf-thres=0.4"], "unknown flag --conf-thres; use --score-threshold", id="YOLOv5's conf"),
        pytest.param(["--box-format", "yxyx"], "unknown flag --box-format; it is a key of the file in --description", id="key"),
        pytest.param(["--imgsz", "640"], "unknown flag --imgsz; use --input-hw, for models of any input size", id="imgsz"),
        pytest.param(["--csv"], "unknown flag --csv; use --export csv, or the Parquet files in detections/", id="csv"),
        pytest.param(["--weights", "m.pt"], "unknown flag --weights; use --model", id="weights"),
        pytest.param(["--save-crop"], "unknown flag --save-crop; another command, after the run: detect-o", id="crops"),
        pytest.param(["source=photos/"], "unexpected argument 'source=photos/'; use --input", id="source="),
        pytest.param(["output=o"], "unexpected argument 'output=o'; did you mean --output?", id="a flag of ours with ="),
        pytest.param(["--max_detections", "3"], "unknown flag --max_detections; did you mean --max-detections?", id="_ for -"),
        pytest.param(["--dry-runn"], "unknown flag --dry-runn; did you mean --dry-run?", id="a flag that is no setting"),
        pytest.param(["--xyzzy"], "unknown flag --xyzzy; see --help", id="nothing near"),
    ],
)
def test_a_flag_of_another_tool_is_said_in_the_words_of_this_one(argv, expected, capsys):
    assert expected in said(capsys, *JOB, *argv)


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["run", *JOB], id="run"),
        pytest.param(["run", *JOB, "--config", "batch_local_direct"], id="run with a config of this project"),
        pytest.param(["run", *JOB, "--dry-run"], id="a dry run"),
        pytest.param(["replay", "--output", "out", "--allow-uri-prefix", "gs://b/"], id="replay"),
        pytest.param(["tune", "--input", "a.jpg"], id="tune"),
    ],
)
def test_a_command_that_runs_a_model_must_name_it(argv, tmp_path, monkeypatch, capsys):
    """The bundled detector of digits instead would write its rows beside those of the model that was meant."""
    write_bright_image(tmp_path / "a.jpg", (64, 48), (10, 10, 30, 30))
    monkeypatch.chdir(tmp_path)
    assert command_line.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: no model: expected --model ") and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.jpg"]


def test_what_the_table_of_other_tools_names_is_there():
    """And no name in it is that of a flag here, which it would hide."""
    flags = {setting.flag for setting in settings()}
    assert {flag for text in _FLAGS.values() for flag in re.findall(r"--[a-z-]+", text)} <= {*flags, "--verbose"}
    assert not {*_FLAGS} & {flag.removeprefix("--") for flag in flags}


@pytest.mark.parametrize(
    "write", [lambda path: f"file://{path}", lambda path: f"~/{path.name}", lambda path: f"file://localhost{path}"]
)
def test_a_home_folder_and_a_file_uri_are_paths_wherever_one_is_given(write, tmp_path, monkeypatch, capsys, bright_model):
    """Input, output, model, config, and manifests that a flag names."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    os.symlink(bright_model, tmp_path / "model")
    write_bright_image(tmp_path / "photos" / "a b.png", (64, 48), (10, 10, 30, 30))
    (tmp_path / "job.yaml").write_text(f"model: {{path: '{write(tmp_path / 'model')}'}}")
    places = [
        "--config",
        write(tmp_path / "job.yaml"),
        "--input",
        write(tmp_path / "photos"),
        "--output",
        write(tmp_path / "out"),
    ]
    assert run.main(places) == 0, capsys.readouterr().err
    assert f" in {tmp_path}/out: " in capsys.readouterr().out
    assert compact.main(["--output", write(tmp_path / "out")]) == 0
    assert reconcile.main([*places, "--write-missing", write(tmp_path / "missing.jsonl")]) == 0
    assert sorted(os.listdir(tmp_path)) == ["job.yaml", "missing.jsonl", "model", "out", "photos"]


@pytest.mark.parametrize("flag", ["--input", "--model", "--output", "--archive"])
def test_a_file_uri_of_another_machine_is_refused(flag, capsys):
    assert f"{flag}: expected file:/// and an absolute path, got " in said(capsys, *JOB, flag, "file://there/a.jpg")


def test_an_empty_path_means_nothing_rather_than_the_root(capsys):
    assert "--input: expected a path, got " in said(capsys, *JOB, "--input", "")


def test_the_versions_are_shown(capsys):
    assert run.main(["--version"]) == 0
    assert re.fullmatch(r"detect-objects [\d.]+, Beam [\d.]+, TensorFlow [\d.]+, Python 3[\d.]+\n", capsys.readouterr().out)
