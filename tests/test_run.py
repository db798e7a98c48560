"""The command line: every setting is a flag, and every mistake is one line and exit code 2, before TensorFlow is imported."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import Config, load_config, settings
from pipeline.run import _overrides, main, make_parser
from tests.fixtures import REPO


def leaves(config):
    """Dotted key to value."""
    return {setting.key: functools.reduce(dict.__getitem__, setting.key.split("."), config.as_dict()) for setting in settings()}


def changed(*argv):
    """The settings that a command line changes, and to what."""
    defaults = leaves(Config())
    now = leaves(load_config([], _overrides(make_parser().parse_known_args(argv)[0])))
    return {key: value for key, value in now.items() if value != defaults[key]}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param([], {}, id="nothing"),
        pytest.param(["--input", "a,b.jpg", "c.jpg"], {"input": ["a,b.jpg", "c.jpg"]}, id="file names may hold commas"),
        pytest.param(["--classes", "a,b", "c"], {"detect.classes": ["a", "b", "c"]}, id="lists"),
        pytest.param(["--classes", "1,on"], {"detect.classes": ["1", "on"]}, id="names that look like numbers"),
        pytest.param(["--score-threshold", "1e-3"], {"detect.score_threshold": 0.001}, id="exponent"),
        pytest.param(["--input", "a", "--input", "b", "c"], {"input": ["a", "b", "c"]}, id="a list's flag twice adds up"),
        pytest.param(["--classes", "a,", " b "], {"detect.classes": ["a", "b"]}, id="commas and spaces at the ends"),
        pytest.param(["--input", "x", "--input", "\udcff.jpg"], {"input": ["x", "\udcff.jpg"]}, id="file name that is no UTF-8"),
        pytest.param(["--export", "csv,yolo", "voc"], {"write.export": ["csv", "yolo", "voc"]}, id="choices"),
        pytest.param(["--again", "--no-scaled-decode"], {"again": True, "detect.scaled_decode": False}, id="switches"),
        pytest.param(["--output", "5"], {"output": "5"}, id="text that looks like a number"),
        pytest.param(["--precision", "bfloat16"], {"detect.precision": "bfloat16"}, id="choice"),
    ],
)
def test_flags_are_read_as_their_settings_need(argv, expected):
    assert changed(*argv) == expected


def test_the_help_is_one_screen_of_what_people_use_and_all_on_request(capsys, monkeypatch):
    """What it leaves out is a flag all the same; each has its help in `--help-all`."""
    monkeypatch.setenv("COLUMNS", "130")
    flags = {setting.flag: setting for setting in settings() if setting.flag}
    assert main(["--help-all"]) == 0
    every, few = capsys.readouterr().out, make_parser().format_help()
    assert set(re.findall(r"^  (--[\w-]+)", every, re.MULTILINE)) >= {*flags}
    assert all(" ".join(each.help.split()) in " ".join(every.split()) for each in flags.values())
    assert len(few.splitlines()) <= 48
    of_program = {"--config", "--dry-run", "--dry", "--help", "--help-all", "--verbose", "--version", "--region", "--log-level"}
    assert set(re.findall(r"(?<!\S)(--[a-z-]+)", few)) <= {*flags} | of_program


@pytest.mark.parametrize(("flags", "seconds"), [([], 10 * 365 * 86_400), (["--job_server_timeout=7"], 7)])
def test_beams_timeout_does_not_end_a_portable_job(flags, seconds):
    """It bounds the streams that a client follows its job by: with Beam's default a job on Prism fails after 300 s."""
    from apache_beam.options.pipeline_options import PortableOptions

    from pipeline.launch.options import beam_options

    options = beam_options(Config(input=("a.jpg",), output="out", runner="PrismRunner"), flags)
    assert options.view_as(PortableOptions).job_server_timeout == seconds


IN_ONE_PROCESS = """
import contextlib, io, json, os, sys
from pipeline.run import main

results = []
for argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as end:
            code = end.code
    results.append((code, out.getvalue(), err.getvalue(), "tensorflow" in sys.modules, "apache_beam" in sys.modules))
json.dump(results, sys.stdout)
"""

JOB = ["--input", "a.jpg", "--output", "out"]
WRONG_SETTINGS = {
    "no output": (["--input", "a.jpg"], "no output: expected --output"),
    "missing config": (["--config", "absent.yaml"], "config absent.yaml: cannot be read"),
    "config of junk": (["--config", "junk.yaml"], "config junk.yaml: is no YAML"),
    "unparsable": ([*JOB, "--score-threshold", "["], "--score-threshold: expected number, got"),
    "no number": ([*JOB, "--batch-timeout-ms", "nan"], "--batch-timeout-ms: expected a finite number, got 'nan'"),
    "flag without its value": ([*JOB, "--classes"], "argument --classes: expected at least one argument; see --help"),
    "switch with a value": ([*JOB, "--again=1"], "argument --again/--no-again: ignored explicit argument '1'; see --help"),
}
WRONG_PLACES = {
    "no input": (["--output", "out"], "no input: expected --input"),
    "missing input": (["--input", "absent/*.jpg", "--output", "out"], "input absent/*.jpg: no file matches"),
    "stray argument": (["a.jpg", "--output", "out", "--input", "a.jpg"], "unexpected argument 'a.jpg'"),
    "unwritable output": (["--input", "a.jpg", "--output", "a.jpg/out", "--model", "digits"], "output a.jpg/out: "),
    "missing model": ([*JOB, "--model", "absent"], "model absent: expected a SavedModel"),
}
MISTAKES = WRONG_SETTINGS | WRONG_PLACES


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What help and all mistakes answer: (exit code, stdout, stderr, whether TensorFlow was imported, whether Beam was)."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "a.jpg").touch()
    (folder / "junk.yaml").write_text("a: [\n")
    commands = {"help": ["--help"], **{name: argv for name, (argv, _) in MISTAKES.items()}}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(REPO)!r})\n{IN_ONE_PROCESS}"],
        input=json.dumps(list(commands.values())),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=580,
        check=True,
    )
    left = sorted(path.name for path in Path(folder).iterdir())
    return dict(zip(commands, json.loads(done.stdout), strict=True)), left


def test_help_answers_without_tensorflow_and_beam(answers):
    code, out, err, tensorflow, beam = answers[0]["help"]
    assert (code, err, tensorflow, beam) == (0, "", False, False)
    assert "--score-threshold" in out


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2_without_tensorflow(answers, name):
    code, out, err, tensorflow, beam = answers[0][name]
    assert MISTAKES[name][1] in err
    assert (code, out, tensorflow) == (2, "", False)
    assert not beam or name in WRONG_PLACES
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_no_mistake_leaves_staging_files_behind(answers):
    assert [name for name in answers[1] if name not in ("a.jpg", "junk.yaml", "out")] == []


def test_what_a_job_waits_for_is_seen_without_verbose():
    """Beam's own warnings are not; of the pipeline's there are few, each about something that is waited for."""
    names = "['pipeline.read', 'apache_beam']"
    seen = f"import logging; print([logging.getLogger(name).isEnabledFor(logging.WARNING) for name in {names}])"
    lines = "log_lines(**{name: getattr(MonitoringConfig(), name) for name in ('log_format', 'log_level')})"
    program = f"from pipeline.config import MonitoringConfig; from pipeline.log_lines import log_lines\nwith {lines}: {seen}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPO, check=True)
    assert done.stdout == "[True, False]\n"
