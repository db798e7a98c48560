"""The command line: every setting is a flag, and every mistake is one line and exit code 2, before TensorFlow is imported."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.config import Config, settings
from pipeline.run import _overrides, make_parser
from tests.fixtures import REPO


def overrides(*argv):
    return _overrides(make_parser().parse_known_args(argv)[0])


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param([], {}, id="nothing"),
        pytest.param(["--input", "a,b.jpg", "c.jpg"], {"input": ["a,b.jpg", "c.jpg"]}, id="file names may hold commas"),
        pytest.param(["--classes", "a,b", "c"], {"detect.classes": ["a", "b", "c"]}, id="lists"),
        pytest.param(["--classes", "1,on"], {"detect.classes": ["1", "on"]}, id="names that look like numbers"),
        pytest.param(["--batch-sizes", "1,2", "4"], {"detect.batch_sizes": [1, 2, 4]}, id="numbers"),
        pytest.param(["--value-range", "-1", "1"], {"model.value_range": [-1, 1]}, id="negative numbers"),
        pytest.param(["--value-range=-1,1"], {"model.value_range": [-1, 1]}, id="negative numbers with a comma"),
        pytest.param(["--model", "/m", "--name", "7"], {"model.path": "/m", "model.name": "7"}, id="texts stay texts"),
        pytest.param(["--score-threshold", "0.4"], {"detect.score_threshold": 0.4}, id="number"),
        pytest.param(["--xla", "--no-scaled-decode"], {"detect.xla": True, "detect.scaled_decode": False}, id="switches"),
        pytest.param(["--output", "5"], {"output": "5"}, id="text that looks like a number"),
        pytest.param(["--score-threshold", "["], {"detect.score_threshold": "["}, id="no yaml is left to the config"),
        pytest.param(["--precision", "bfloat16"], {"detect.precision": "bfloat16"}, id="choice"),
    ],
)
def test_flags_are_read_as_yaml_would_read_them(argv, expected):
    assert overrides(*argv) == expected


@pytest.mark.parametrize(("flags", "seconds"), [([], 10 * 365 * 86_400), (["--job_server_timeout=7"], 7)])
def test_beams_timeout_does_not_end_a_portable_job(flags, seconds):
    """It bounds the streams that a client follows its job by: with Beam's default a job on Prism fails after 300 s."""
    from apache_beam.options.pipeline_options import PortableOptions

    from pipeline.launch.options import beam_options

    options = beam_options(Config(input=("a.jpg",), output="out", runner="PrismRunner"), flags)
    assert options.view_as(PortableOptions).job_server_timeout == seconds


def test_local_workers_do_not_wait_long_at_the_end_of_a_bundle():
    import inspect

    from apache_beam.runners.worker.statesampler import StateSampler
    from apache_beam.utils.counters import CounterFactory

    from pipeline.launch.options import end_bundles_promptly

    end_bundles_promptly()
    assert StateSampler("a bundle", CounterFactory()).sampling_period_ms == 20
    defaults = {name: p.default for name, p in inspect.signature(StateSampler.__init__).parameters.items()}
    assert {name for name, default in defaults.items() if default is not inspect.Parameter.empty} == {"sampling_period_ms"}


def test_help_names_every_setting_with_its_default():
    text = " ".join(make_parser().format_help().split())
    for key, field, _ in settings():
        name = key.rpartition(".")[2]
        if name == "beam_options":
            continue
        flag = "--model" if key == "model.path" else "--" + name.replace("_", "-")
        assert re.search(rf"(?<!\S){flag}(?!-)", text), flag
        assert " ".join(field.metadata["help"].split()) in text, flag


def test_every_flag_reaches_its_setting():
    """Each with a value that differs from its default."""
    other = {"bool": True, "int": 7, "float": 0.5, "str": "x"}
    for key, _, hint in settings():
        name = key.rpartition(".")[2]
        if name == "beam_options":
            continue
        flag = "--model" if key == "model.path" else "--" + name.replace("_", "-")
        kind = next((kind for kind in other if kind in str(hint)), "str")
        argv = [flag] if "bool" in str(hint) else [flag, str(other[kind])]
        assert list(overrides(*argv)) == [key]


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_example_configs_are_valid(path):
    from pipeline.config import load_config

    assert load_config(str(path), {}) != Config()
    assert yaml.safe_load(path.read_text(encoding="utf-8"))


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
    results.append((code, out.getvalue(), err.getvalue(), "tensorflow" in sys.modules))
json.dump(results, sys.stdout)
"""

MISTAKES = {
    "no input": (["--output", "out"], "no input: expected --input"),
    "no output": (["--input", "a.jpg"], "no output: expected --output"),
    "missing input": (["--input", "absent/*.jpg", "--output", "out"], "input absent/*.jpg: no file matches"),
    "missing config": (["--config", "absent.yaml"], "config absent.yaml: cannot be read"),
    "config of junk": (["--config", "junk.yaml"], "config junk.yaml: is no YAML"),
    "unknown key": (["--config", "typo.yaml"], "unknown key 'detect.score_treshold'; did you mean 'detect.score_threshold'?"),
    "wrong type": (
        ["--input", "a.jpg", "--output", "out", "--max-detections", "many"],
        "--max-detections: expected a whole number",
    ),
    "out of range": (
        ["--input", "a.jpg", "--output", "out", "--score-threshold", "2"],
        "--score-threshold: expected a number between",
    ),
    "unparsable": (
        ["--input", "a.jpg", "--output", "out", "--score-threshold", "["],
        "--score-threshold: expected a number, got",
    ),
    "unknown choice": (
        ["--input", "a.jpg", "--output", "out", "--precision", "int8"],
        "--precision: expected 'float32' or 'bfloat16'",
    ),
    "unknown flag": (["--input", "a.jpg", "--output", "out", "--score-treshold", "1"], "did you mean --score-threshold?"),
    "stray argument": (["a.jpg", "--output", "out", "--input", "a.jpg"], "unexpected argument 'a.jpg'"),
    "unknown runner": (["--input", "a.jpg", "--output", "out", "--runner", "NoRunner"], "runner NoRunner: expected DirectRunner"),
    "no job server": (
        ["--input", "a.jpg", "--output", "out", "--runner", "FlinkRunner", "--job_endpoint=localhost:1"],
        "job_endpoint localhost:1: expected <host>:<port> where a job server listens",
    ),
    "unwritable output": (["--input", "a.jpg", "--output", "a.jpg/out"], "output a.jpg/out: "),
    "missing model": (["--input", "a.jpg", "--output", "out", "--model", "absent"], "model absent: expected a SavedModel"),
    "missing model, dry": (["--input", "a.jpg", "--output", "out", "--model", "absent", "--dry-run"], "model absent: expected"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What help and all mistakes answer: (exit code, stdout, stderr, whether TensorFlow was imported)."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "a.jpg").touch()
    (folder / "junk.yaml").write_text("a: [\n")
    (folder / "typo.yaml").write_text("detect: {score_treshold: 1}\n")
    commands = {"help": ["--help"], **{name: argv for name, (argv, _) in MISTAKES.items()}}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(REPO)!r})\n{IN_ONE_PROCESS}"],
        input=json.dumps(list(commands.values())),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    left = sorted(path.name for path in Path(folder).iterdir())
    return dict(zip(commands, json.loads(done.stdout), strict=True)), left


def test_help_answers_without_tensorflow(answers):
    code, out, err, tensorflow = answers[0]["help"]
    assert (code, err, tensorflow) == (0, "", False)
    assert "--score-threshold" in out


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2_without_tensorflow(answers, name):
    code, out, err, tensorflow = answers[0][name]
    assert MISTAKES[name][1] in err
    assert (code, out, tensorflow) == (2, "", False)
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_no_mistake_leaves_staging_files_behind(answers):
    assert [name for name in answers[1] if name not in ("a.jpg", "junk.yaml", "typo.yaml", "out")] == []
