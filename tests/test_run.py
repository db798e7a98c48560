"""The command line: every setting is a flag, and every mistake is one line and exit code 2, before TensorFlow is imported."""

import functools
import importlib
import json
import logging
import os
import re
import subprocess
import sys

import pytest

from pipeline.__main__ import VERBS
from pipeline.__main__ import main as command
from pipeline.commands import compact, reconcile
from pipeline.config import Config, MonitoringConfig, load_config, settings
from pipeline.config.mistakes import _FLAGS
from pipeline.log_lines import log_lines
from pipeline.run import _overrides, main, make_parser
from tests.conftest import REPO, write_bright_image
from tests.shard_rows import detected, write_rows


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
        pytest.param(["--input", "a,b.jpg", "c.jpg"], {"input": ["a,b.jpg", "c.jpg"]}, id="file names may hold commas"),
        pytest.param(["--classes", "a,b", "c"], {"detect.classes": ["a", "b", "c"]}, id="lists"),
        pytest.param(["--classes", "1,on"], {"detect.classes": ["1", "on"]}, id="names that look like numbers"),
        pytest.param(["--input", "a", "--input", "b", "c"], {"input": ["a", "b", "c"]}, id="a list's flag twice adds up"),
        pytest.param(["--classes", "a,", " b "], {"detect.classes": ["a", "b"]}, id="commas and spaces at the ends"),
        pytest.param(["--input", "x", "--input", "\udcff.jpg"], {"input": ["x", "\udcff.jpg"]}, id="file name that is no UTF-8"),
        pytest.param(["--export", "csv,yolo", "voc"], {"write.export": ["csv", "yolo", "voc"]}, id="choices"),
        pytest.param(["--again", "--no-scaled-decode"], {"again": True, "detect.scaled_decode": False}, id="switches"),
        pytest.param(["--output", "5"], {"output": "5"}, id="text that looks like a number"),
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
    assert all("".join(each.help.split()) in "".join(every.split()) for each in flags.values())  # a line may end at a hyphen
    assert len(few.splitlines()) <= 48
    of_program = {"--config", "--dry-run", "--dry", "--help", "--help-all", "--verbose", "--version", "--region", "--log-level"}
    of_program |= {"--wait", "--no-wait", "--attach"}
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
from pipeline.__main__ import main

results = []
for argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as end:
            code = end.code
    heavy = ("pipeline.run", "pipeline.commands.compact", "pipeline.commands.evaluate", "tensorflow", "apache_beam")
    imported = [name for name in heavy if name in sys.modules]
    results.append((code, out.getvalue(), err.getvalue(), imported))
json.dump(results, sys.stdout)
"""

JOB = ["--input", "a.jpg", "--output", "out"]
NO_MODEL, OTHER_MACHINE = "no model: expected --model ", "expected file:/// and an absolute path, got 'file://there/a.jpg'"
SETTINGS = {
    "unknown verb": (["evalute", "--output", "out"], "unknown verb 'evalute'; did you mean evaluate?"),
    "no verb near": (["xyzzy"], f"unknown verb 'xyzzy'; expected one of {', '.join(VERBS)}"),
    "nothing": (
        ["run"],
        "no input and no model and no output: expected --input, --model, --output; such as --input photos/ --model",
    ),
    "no output": (["--input", "a.jpg", "--model", "digits"], "no output: expected --output"),
    "no model and no output": (["--input", "a.jpg"], "no model and no output: expected --model, --output; such as "),
    "folder instead of flags": (
        ["run", "photos/"],
        "unexpected argument 'photos/': expected flags; --input photos/ names images",
    ),
    "tab": (["--config", "tab.yaml"], "config tab.yaml: line 2 has a tab where YAML takes spaces only; indent it with spaces"),
    "missing config": (["--config", "absent.yaml"], "config absent.yaml: cannot be read"),
    "config of junk": (["--config", "junk.yaml"], "config junk.yaml: is no YAML"),
    "unparsable": ([*JOB, "--score-threshold", "["], "--score-threshold: expected number, got"),
    "no number": ([*JOB, "--batch-timeout-ms", "nan"], "--batch-timeout-ms: expected a finite number, got 'nan'"),
    "flag without its value": ([*JOB, "--classes"], "argument --classes: expected at least one argument; see --help"),
    "switch with a value": ([*JOB, "--again=1"], "argument --again/--no-again: ignored explicit argument '1'; see --help"),
    "empty path": ([*JOB, "--input", ""], "--input: expected a path, got "),
    **{flag: ([*JOB, flag, "file://there/a.jpg"], f"{flag}: {OTHER_MACHINE}") for flag in ("--input", "--model", "--archive")},
}
PLACES_AND_FLAGS = {
    "no input": (["--output", "out", "--model", "digits"], "no input: expected --input"),
    "workers": ([*JOB, "--workers", "4"], "unknown flag --workers; use --feeder-processes"),
    "missing input": (["--input", "absent/*.jpg", "--output", "out"], "input absent/*.jpg: no file matches"),
    "stray argument": ([*JOB, "--verbose", "a.jpg"], "unexpected argument 'a.jpg'"),
    "unwritable output": (["--input", "a.jpg", "--output", "a.jpg/out", "--model", "digits"], "output a.jpg/out: "),
    "missing model": ([*JOB, "--model", "absent"], "model absent: expected a SavedModel"),
    "no model": (["run", *JOB], NO_MODEL),
    "no model in a config of this project": (["run", *JOB, "--config", "batch_local_direct"], NO_MODEL),
    "no model for a dry run": (["run", *JOB, "--dry-run"], NO_MODEL),
    "no model for a replay": (["replay", "--output", "earlier", "--allow-uri-prefix", "gs://b/"], NO_MODEL),
    "no model to tune": (["tune", "--input", "a.jpg"], NO_MODEL),
    "conf": ([*JOB, "--conf", "0.4"], "unknown flag --conf; use --score-threshold"),
    "YOLOv5's conf": ([*JOB, "--conf-thres=0.4"], "unknown flag --conf-thres; use --score-threshold"),
    "key of a model": ([*JOB, "--box-format", "yxyx"], "unknown flag --box-format; it is a key of the file in --description"),
    "imgsz": ([*JOB, "--imgsz", "640"], "unknown flag --imgsz; use --input-hw, for models of any input size"),
    "csv": ([*JOB, "--csv"], "unknown flag --csv; use --export csv, or the Parquet files in detections/"),
    "crops": ([*JOB, "--save-crop"], "unknown flag --save-crop; another command, after the run: detect-o"),
    "source=": ([*JOB, "source=photos/"], "unexpected argument 'source=photos/'; use --input"),
    "a flag of ours with =": ([*JOB, "output=o"], "unexpected argument 'output=o'; did you mean --output?"),
    "_ for -": ([*JOB, "--max_detections", "3"], "unknown flag --max_detections; did you mean --max-detections?"),
    "a flag that is no setting": ([*JOB, "--dry-runn"], "unknown flag --dry-runn; did you mean --dry-run?"),
    "again in a stream": ([*JOB, "--mode", "streaming", "--again"], "again: expected --mode batch"),
    "export in a stream": (
        [*JOB, "--mode", "streaming", "--export", "csv"],
        "write.export: expected --mode batch, since a stream",
    ),
    "archive in a batch job": ([*JOB, "--archive", "rows"], "stream.archive: expected --mode streaming, since a batch job"),
    "0.1.0's views": ([*JOB, "--no-view"], "unknown flag --no-view; files of rows are Parquet alone; detect-objects rows prints"),
    "nothing near": ([*JOB, "--xyzzy"], "unknown flag --xyzzy; see --help"),
}
MISTAKES = SETTINGS | PLACES_AND_FLAGS


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What help and all mistakes answer: exit code, stdout, stderr, what was imported; then the names in the folder."""
    folder = tmp_path_factory.mktemp("run")
    write_bright_image(folder / "a.jpg", (64, 48), (10, 10, 30, 30))
    (folder / "junk.yaml").write_text("a: [\n")
    (folder / "tab.yaml").write_text("detect:\n\tscore_threshold: 0.5\n")
    write_rows(f"{folder}/earlier", [detected("gs://b/a.jpg")])
    commands = {"help": ["--help"], "doctor": ["doctor"], "typo": ["evalute"], "help of a run": ["run", "--help"]}
    commands |= {"versions": ["--version"]} | {name: argv for name, (argv, _) in MISTAKES.items()}
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(REPO)!r})\n{IN_ONE_PROCESS}"]
    given = json.dumps([*commands.values()])
    done = subprocess.run(command, input=given, cwd=folder, capture_output=True, text=True, check=True)
    return dict(zip(commands, json.loads(done.stdout), strict=True)), sorted(os.listdir(folder))


@pytest.mark.slow
def test_help_and_versions_are_shown_at_once_and_only_the_module_of_the_verb_is_imported(answers):
    """`doctor`, too, imports neither TensorFlow nor Beam."""
    assert [answers[0][name][-1] for name in ("help", "doctor", "typo")] == [[], [], []]
    code, out, err, imported = answers[0]["help of a run"]
    assert (code, err, imported) == (0, "", ["pipeline.run"]) and "--score-threshold" in out
    code, out, err, imported = answers[0]["versions"]
    assert (code, err, imported) == (0, "", ["pipeline.run"])
    assert re.fullmatch(r"detect-objects [\d.]+, Beam [\d.]+, TensorFlow [\d.]+, Python 3[\d.]+\n", out)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2_without_tensorflow(answers, name):
    """Those in settings without Beam, too."""
    code, out, err, imported = answers[0][name]
    assert err.startswith(f"error: {MISTAKES[name][1]}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert {*imported} <= {"pipeline.run", *(["apache_beam"] if name in PLACES_AND_FLAGS else [])}


def test_no_mistake_leaves_files_behind(answers):
    assert answers[1] == ["a.jpg", "earlier", "junk.yaml", "tab.yaml"]


def test_what_the_table_of_other_tools_names_is_there():
    """And no name in it is that of a flag here, which it would hide."""
    flags = {setting.flag for setting in settings()}
    assert {flag for text in _FLAGS.values() for flag in re.findall(r"--[a-z-]+", text)} <= {*flags, "--verbose"}
    assert not {*_FLAGS} & {flag.removeprefix("--") for flag in flags}


@pytest.mark.slow
@pytest.mark.parametrize("write", [lambda path: f"~/{path.name}", lambda path: f"file://localhost{path}"], ids=["home", "URI"])
def test_a_home_folder_and_a_file_uri_are_paths_wherever_one_is_given(write, tmp_path, monkeypatch, capsys, bright_model):
    """Input, output, model, config, and manifests that a flag names."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    os.symlink(bright_model, tmp_path / "model")
    write_bright_image(tmp_path / "photos" / "a b.png", (64, 48), (10, 10, 30, 30))
    (tmp_path / "job.yaml").write_text(f"model: {{path: '{write(tmp_path / 'model')}'}}")
    given = {flag: write(tmp_path / name) for flag, name in (("config", "job.yaml"), ("input", "photos"), ("output", "out"))}
    places = [text for flag, place in given.items() for text in (f"--{flag}", place)]
    assert main(places) == 0, capsys.readouterr().err
    assert f" in {tmp_path}/out: " in capsys.readouterr().out
    assert compact.main(["--output", given["output"]]) == 0
    assert reconcile.main([*places, "--write-missing", write(tmp_path / "missing.jsonl")]) == 0
    assert sorted(os.listdir(tmp_path)) == ["job.yaml", "missing.jsonl", "model", "out", "photos"]


def test_what_a_job_waits_for_is_seen_without_verbose():
    """Beam's own warnings are not; of the pipeline's there are few, each about something that is waited for."""
    defaults = MonitoringConfig()
    with log_lines(log_format=defaults.log_format, log_level=defaults.log_level):
        assert logging.getLogger("pipeline.listing").isEnabledFor(logging.WARNING)
        assert not logging.getLogger("apache_beam").isEnabledFor(logging.WARNING)


def test_help_names_each_verb_with_its_purpose_and_without_a_verb_it_is_shown(capsys):
    for argv in (["--help"], ["-h"], []):
        assert command(argv) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert all(f"{name} {verb.purpose.split()[0]}" in out for name, verb in VERBS.items())


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_teaches_itself_under_its_own_name_and_a_wrong_flag_is_one_line(verb, capsys):
    """`replay` is a run with a flag."""

    def ended(flag):
        try:
            code = command([verb, flag])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    code, out, _ = ended("--help")
    usage = "python -m pipeline.run" if verb in ("run", "replay") else f"detect-objects {verb}"
    assert code == 0 and out.startswith(f"usage: {usage} ")
    code, out, err = ended("--no-such-flag")
    assert (code, out, err.count("\n"), err[:7]) == (2, "", 1, "error: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "verb"),
    [
        (["-m", "pipeline.compact"], "compact"),
        (["-Xdev", "-mpipeline.load_bigquery"], "load"),
        (["-m", "pipeline.detect.write_golden"], "golden"),
    ],
)
def test_the_modules_that_ran_as_commands_in_the_first_release_still_do_their_work(old, verb):
    done = subprocess.run([sys.executable, *old, "--no-such-flag", "x y"], check=False, capture_output=True, text=True, cwd=REPO)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and f"see detect-objects {verb} --help" in done.stderr
    shown = subprocess.run([sys.executable, *old, "--help"], check=False, capture_output=True, text=True, cwd=REPO)
    assert (shown.returncode, shown.stdout.split()[1:3]) == (0, ["detect-objects", verb])


def test_a_reader_that_ends_early_gets_no_traceback():
    """As in `detect-objects doctor | head -1`."""
    arguments, pipes = [sys.executable, "-u", "-m", "pipeline", "doctor"], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(arguments, cwd=REPO, text=True, **pipes) as doctor:
        doctor.stdout.close()
        assert doctor.stderr.read() == ""
    assert doctor.returncode == 1


@pytest.mark.parametrize(
    ("command", "shell", "ends"),
    [
        pytest.param("pipeline help", ">&-", (0, "", ""), id="output"),
        pytest.param("pipeline.run --input x", "<&- >&- 2>&-", (2, "", ""), id="all"),
        pytest.param("pipeline rows no-folder", "<&- 2>&-", (2, "", ""), id="errors"),
    ],
)
def test_a_standard_stream_that_is_closed_is_one_to_nowhere(command, shell, ends):
    """Its number would else go to the first file that is opened, into which libraries then write their messages."""
    line = f"exec {sys.executable} -m {command} {shell}"
    done = subprocess.run(["sh", "-c", line], cwd=REPO, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == ends


STOPPED = """
import _thread, contextlib, functools, signal, threading, time, types
from pipeline.errors import run_command
from pipeline.launch.signals import stopped_by_signals

def work():
    with guarded():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise AttributeError("of pandas") from None
    return 0

def locking():
    condition, arrives = threading.Condition(), functools.partial(_thread.interrupt_main, number)
    condition._lock = types.SimpleNamespace(__enter__=arrives, __exit__=lambda *_: print("unlocked"))
    with guarded(), condition:
        time.sleep(600)

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests are a shell's background job
for number in (signal.SIGTERM, signal.SIGINT):
    for guarded in (stopped_by_signals, contextlib.nullcontext):
        before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
        print(run_command(work, "the export failed"))
        print(run_command(locking, "the export failed"))
        assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
"""


@pytest.mark.slow
def test_a_command_is_stopped_by_a_signal_also_amid_a_lock_and_where_a_module_in_c_makes_another_error_of_it():
    """The import of pandas does: "partially initialized module 'pandas' has no attribute 'core'"."""
    done = subprocess.run([sys.executable, "-c", STOPPED], cwd=REPO, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr.count("stopped\n")) == ("130\nunlocked\n130\n" * 4, 8)


def test_ctrl_c_while_the_module_of_a_verb_is_imported_is_one_line(monkeypatch, capsys):
    def interrupted(_name):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert (command(["doctor"]), capsys.readouterr().err) == (130, "stopped\n")
