"""One command with a verb for each purpose, whose flags a shell completes."""

import shutil
import subprocess
import sys

import pytest

from pipeline.__main__ import VERBS, main
from tests.conftest import write_bright_image
from tests.fixtures import REPO

EXPECTED = {
    "run",
    "evaluate",
    "import",
    "compact",
    "export",
    "upgrade",
    "load",
    "quantize",
    "tune",
    "reconcile",
    "replay",
    "view",
    "pictures",
    "cost",
    "doctor",
}


def test_help_names_each_verb_with_its_purpose_and_without_a_verb_it_is_shown(capsys):
    assert {*VERBS} == EXPECTED
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


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        pytest.param("evalute", "did you mean evaluate?", id="a letter left out"),
        pytest.param("reconsile", "did you mean reconcile?", id="a wrong letter"),
        pytest.param("xyzzy", f"expected one of {', '.join(VERBS)}", id="nothing near"),
        pytest.param("", f"expected one of {', '.join(VERBS)}", id="empty"),
    ],
)
def test_an_unknown_verb_is_one_line_with_the_nearest_one(typed, hint, capsys):
    assert main([typed, "--output", "out"]) == 2
    assert capsys.readouterr().err == f"error: unknown verb {typed!r}; {hint}\n"


def test_flags_without_a_verb_are_those_of_a_run(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("detect-objects ")
    assert main(["--input", "a.jpg", "--xyzzy"]) == 2
    assert capsys.readouterr().err.startswith("error: no output")


@pytest.mark.slow
def test_a_replay_detects_in_the_images_that_failed(tmp_path, monkeypatch, capsys, bright_model):
    """The first run finds a file that is no image; it is mended, and only it is detected in."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_bright_image(tmp_path / "in" / f"{name}.png", (64, 48), (10, 10, 30, 30))
    mended = (tmp_path / "in" / "b.png").read_bytes()
    (tmp_path / "in" / "b.png").write_bytes(b"no image")
    places = ["--input", "in", "--output", "out", "--model", str(bright_model)]
    assert main(["run", *places]) == 0, capsys.readouterr().err
    (tmp_path / "in" / "b.png").write_bytes(mended)
    capsys.readouterr()
    assert main(["replay", *places]) == 0
    assert "1 images read: 1 detected" in capsys.readouterr().out


def test_only_the_module_of_the_verb_is_imported():
    """Help and mistakes answer at once, and `doctor` imports neither TensorFlow nor Beam."""
    program = """\
import sys
from pipeline.__main__ import main
main(sys.argv[1:])
heavy = ("pipeline.run", "pipeline.compact", "models.evaluate", "tensorflow", "apache_beam")
print([name for name in heavy if name in sys.modules])
"""
    for argv in (["--help"], ["evalute"], ["doctor"]):
        done = subprocess.run([sys.executable, "-c", program, *argv], cwd=REPO, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"


@pytest.fixture(scope="module")
def completion(tmp_path_factory):
    """Completes a command line in a real bash: the words that it offers."""
    script = tmp_path_factory.mktemp("completion") / "script"
    printed = [sys.executable, "-m", "pipeline", "--print-completion", "bash"]
    script.write_text(subprocess.run(printed, cwd=REPO, capture_output=True, text=True, check=True).stdout)
    asked = """\
source "$1"; shift
complete -p detect-objects >/dev/null || exit 1
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
$(complete -p detect-objects | sed -E 's/.* -F ([^ ]+) .*/\\1/') 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""

    def complete(*words: str, cwd=REPO) -> set[str]:
        command = ["bash", "--norc", "-c", asked, "bash", str(script), "detect-objects", *words]
        return {*subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout.split()}

    return complete


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        pytest.param([""], EXPECTED, id="verbs"),
        pytest.param(["re"], {"reconcile", "replay"}, id="a verb that begins so"),
        pytest.param(["run", "--score-t"], {"--score-threshold"}, id="a flag"),
        pytest.param(["replay", "--cpu-aff"], {"--cpu-affinity"}, id="a rare flag"),
        pytest.param(["run", "--mode", ""], {"batch", "streaming"}, id="the values of a setting"),
        pytest.param(
            ["run", "--export", ""], {"csv", "coco", "yolo", "voc", "cvat", "label-studio", "tfrecord"}, id="the values of a list"
        ),
        pytest.param(["evaluate", "--match", ""], {"name", "path"}, id="the values of a flag"),
        pytest.param(["import", "--res"], {"--resize"}, id="a flag of another module"),
    ],
)
def test_a_shell_completes_verbs_flags_and_values(completion, words, offered):
    assert completion(*words) == offered


def test_a_shell_completes_files(completion, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "job.yaml").touch()
    assert completion("run", "--config", "jo", cwd=tmp_path) == {"job.yaml"}
    assert completion("compact", "--output", "pho", cwd=tmp_path) == {"photos"}


def test_a_shell_that_is_not_known_is_one_line(capsys):
    assert main(["--print-completion", "fish"]) == 2
    assert capsys.readouterr().err == "error: --print-completion: expected one of bash, zsh, got 'fish'\n"


def test_the_script_for_zsh_names_each_verb_and_zsh_takes_it(capsys):
    assert main(["--print-completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#compdef detect-objects") and all(f"    {verb}:'" in script for verb in VERBS)
    if not (zsh := shutil.which("zsh")):
        pytest.skip("no zsh to read the script: install Debian's package zsh")
    program = f'autoload -U compinit; compinit -D; {script}; print "${{_comps[detect-objects]}}"'
    read = subprocess.run([zsh, "-f"], input=program, capture_output=True, text=True, check=True)
    assert (read.stdout.strip(), read.stderr) == ("_shtab_detect_objects", "")
