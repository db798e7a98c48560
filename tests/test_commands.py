"""One command with a verb for each purpose, whose flags a shell completes."""

import contextlib
import signal
import subprocess
import sys

import pytest

from pipeline.__main__ import VERBS, main
from pipeline.errors import run_command
from pipeline.launch.finalize import stopped_by_signals
from tests.fixtures import REPO


def test_help_names_each_verb_with_its_purpose_and_without_a_verb_it_is_shown(capsys):
    for argv in (["--help"], ["-h"], []):
        assert main(argv) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert all(f"{name} {verb.purpose.split()[0]}" in out for name, verb in VERBS.items())


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_teaches_itself_under_its_own_name(verb, capsys):
    """`replay` is a run with a flag."""
    try:
        assert main([verb, "--help"]) == 0
    except SystemExit as err:
        assert err.code == 0
    named = "run" if verb == "replay" else verb
    assert capsys.readouterr().out.startswith(f"usage: detect-objects {named} ")


@pytest.mark.parametrize("verb", VERBS)
def test_a_wrong_flag_is_one_line(verb, capsys):
    try:
        code = main([verb, "--no-such-flag"])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n"), err[:7]) == (2, "", 1, "error: ")


def test_only_the_module_of_the_verb_is_imported():
    """Help and mistakes answer at once, and `doctor` imports neither TensorFlow nor Beam."""
    program = """\
import sys
from pipeline.__main__ import main
for argv in (["--help"], ["evalute"], ["doctor"]):
    main(argv)
heavy = ("pipeline.run", "pipeline.compact", "pipeline.evaluate", "tensorflow", "apache_beam")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_ends_early_gets_no_traceback():
    """As in `detect-objects doctor | head -1`."""
    command = [sys.executable, "-u", "-m", "pipeline", "doctor"]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as doctor:
        assert doctor.stdout and doctor.stderr
        doctor.stdout.close()
        assert doctor.stderr.read() == ""
    assert doctor.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("is_job", [False, True])
def test_a_command_is_stopped_by_a_signal_also_where_a_module_in_c_makes_another_error_of_it(number, is_job, capsys):
    """The import of pandas does: "partially initialized module 'pandas' has no attribute 'core'"."""
    outer = signal.getsignal(signal.SIGINT)  # ignored where the tests are a shell's background job

    def work():
        with stopped_by_signals() if is_job else contextlib.nullcontext():
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt:
                raise AttributeError("of pandas") from None
        return 0

    before = [signal.getsignal(signal.SIGTERM), signal.default_int_handler]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run_command(work, "the export failed") == 128 + signal.SIGINT
        assert capsys.readouterr().err == "stopped\n"
        assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
    finally:
        signal.signal(signal.SIGINT, outer)
