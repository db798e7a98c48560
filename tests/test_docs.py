"""What README, CONTRIBUTING and docs/ show and name works and exists as it stands there."""

import builtins
import contextlib
import functools
import importlib.util
import io
import re
import runpy
import shlex
import sys
from collections.abc import Sequence

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from pipeline import run
from pipeline.__main__ import VERBS
from pipeline.__main__ import main as detect_objects
from pipeline.config import load_config
from pipeline.launch import options
from tests.fixtures import REPO
from tests.forked_jobs import run_forked
from tests.write_docs import pages

PAGES = {
    str(path.relative_to(REPO)): path.read_text(encoding="utf-8")
    for path in [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
}
HEADS = sorted((REPO / "configs").glob("*.yaml"))
FOLDERS = ["pipeline", "models", "tests", "configs", "deploy", "docs"]
COMMAND = re.compile(r"(?:detect-objects ([a-z]+)|python -m pipeline\.([a-z_]+))([^`\n]*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
OF_OTHERS = {  # inline in prose: flags of Flink's own options
    "--checkpointing_interval", "--finish_bundle_before_checkpointing", "--max_bundle_time_mills", "--resume",
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Runs a script, in a process that was forked from one that has the libraries."""
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


@pytest.mark.slow
def test_the_examples_of_the_python_interface_run_as_they_stand(tmp_path):
    """One after the other, in one program: an array, paths and bytes, a pipeline over the scenes, and a source of one's own."""
    script = tmp_path / "examples.py"
    script.write_text("".join(re.findall(r"```python\n(.*?)```", PAGES["docs/api.md"], re.DOTALL)))
    printed, errors = tmp_path / "printed", tmp_path / "errors"
    assert run_forked([script], printed, module="tests.test_docs", errors=errors) == 0, errors.read_text()
    lines = printed.read_text().splitlines()
    counts = sorted(line for line in lines[5:] if line.endswith(" digits"))
    assert [line.split(":")[0] for line in counts] == sorted(str(path) for path in (REPO / "models/digits/samples").glob("*.jpg"))
    assert sum(int(line.split()[-2]) for line in counts) >= 50
    assert all(re.fullmatch(r"[69] \[.*\]", line) for line in lines[:2])
    found = "846x804, 2 digits"
    assert lines[2:5] == [f"models/digits/samples/scene_001.jpg: {found}", "absent.jpg: read/not_found", f"images[2]: {found}"]
    assert {*lines[-2:]} == {"models/digits/samples/scene_001.jpg 6", "upload-17 6"}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_every_path_in_code_quotes_leads_to_what_is_there(page):
    """A moved file or a renamed heading shows."""
    for target, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", PAGES[page])):
        if "://" in target:
            continue
        path = (REPO / page).parent / target if target else REPO / page
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}
    quoted = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)(?:::?[\w.:]+)?`", PAGES[page])
    assert [path for path in quoted if not (REPO / path).exists()] == []


@functools.cache
def flags_of(verb: str) -> set[str]:
    """The flags of a verb, as its help shows them; `run` passes others on to Beam."""
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        detect_objects([verb, "--help-all" if verb in ("run", "replay") else "--help"])
    of_beam = {f"--{name}" for name in PipelineOptions([]).get_all_options()} if verb in ("run", "replay") else set()
    return {*FLAG.findall(shown.getvalue())} | of_beam


def flags_in(text: str, pattern: re.Pattern[str]) -> set[str]:
    return {re.sub("^--no-", "--", flag) for flag in pattern.findall(text)} - OF_OTHERS


@pytest.mark.parametrize("page", PAGES)
def test_every_command_has_flags_of_its_verb_and_every_flag_in_the_text_is_one_of_some_verb(page):
    """A flag that was renamed, removed, or shown with another verb shows; so does a verb that is not there."""
    verbs = {verb.module.removeprefix("pipeline."): name for name, verb in reversed(VERBS.items())}
    for verb, module, rest in COMMAND.findall(PAGES[page].replace("\\\n", " ")):
        name = verb or verbs.get(module, "")
        if not name and importlib.util.find_spec(f"pipeline.{module}"):
            assert not FLAG.findall(rest), "a module that is no verb takes no flags"
            continue
        assert name in VERBS, verb or module
        assert flags_in(rest, FLAG) - flags_of(name) == set(), f"detect-objects {name}{rest}"
    assert "detect-objects run" not in PAGES[page] or page in ("README.md", "docs/operations.md"), (
        "jobs have one name: python -m pipeline.run"
    )
    assert flags_in(PAGES[page], re.compile(r"`(--[a-z][\w-]*)")) - set().union(*map(flags_of, VERBS)) == set()


def promised(text: str) -> set[str]:
    """The tests that a part of the page of guarantees names, as pytest does."""
    return set(re.findall(r"`(tests/[^`]+\.py(?:::\w+)+)`", text))


def test_make_test_runs_the_test_of_every_promise(request):
    """But for the last table of docs/guarantees.md. A test that is renamed, dropped or, seen by `make test`, put aside shows."""
    shown, _, elsewhere = map(promised, PAGES["docs/guarantees.md"].partition("## Shown by `make test-matrix`"))
    assert len(shown) >= 20 and elsewhere
    for file, *_, name in (test.split("::") for test in shown | elsewhere):
        assert re.search(rf"(def|class) {name}\b", (REPO / file).read_text(encoding="utf-8")), name
    given = request.config
    if (given.option.markexpr, given.option.keyword, given.args) == ("not matrix", "", given.getini("testpaths")):
        assert shown - {item.nodeid.partition("[")[0] for item in request.session.items} == set()


@pytest.mark.parametrize("path", HEADS, ids=lambda path: path.name)
def test_the_command_in_the_head_of_a_config_has_what_its_runner_needs(path, monkeypatch):
    """Its keys are known. No config names a model: where `--model` is forgotten, the job must say so."""
    text = re.sub(r" \\\n#?", "", path.read_text(encoding="utf-8"))
    ((command, name),) = re.findall(r"python -m pipeline\.run (--config configs/(\w+\.yaml) .*--model .*)", text)
    assert load_config([f"{REPO}/configs/{name}"], {}).model.path == "" and path.name == name
    given, of_beam = run.make_parser().parse_known_args(shlex.split(command))
    monkeypatch.setattr(options, "_check_reachable", lambda endpoint: None)
    of_beam += [f"--prism_location={sys.executable}"] if "prism" in name else []
    options.checked_job(load_config(given.config, run._overrides(given)), of_beam, command, 0.0)


@pytest.mark.parametrize("page", pages())
def test_what_is_made_of_the_code_is_as_the_code(page):
    """`python -m tests.write_docs` was run after the last change of a setting or of a dead letter's reason."""
    assert PAGES[page] == pages()[page]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/api.md", "docs/glossary.md", "docs/streaming.md"])
def test_every_class_that_a_page_names_is_one_of_the_code(page):
    """Other pages name classes of other libraries, too."""
    sources = [path for folder in ("pipeline", "models", "tests") for path in (REPO / folder).rglob("*.py")]
    classes = {name for path in sources for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)}
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)(?:\([^`]*\))?`", PAGES[page]))
    assert named - classes - {*dir(builtins)} == set()


def test_the_changelog_begins_with_the_version_of_the_package():
    """A release has its heading, with the day."""
    (version,) = re.findall(r'^version = "([^"]+)"', (REPO / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    headings = re.findall(r"^## (?!Unreleased)(.*)$", (REPO / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", headings[0])


def test_the_private_functions_that_the_design_names_are_there():
    """Each upgrade of Beam, TensorFlow or a client goes through this list."""
    named = re.findall(r"^\| `(\w+)` \|", PAGES["docs/design.md"].partition("## Private functions")[2], re.MULTILINE)
    sources = [path.read_text(encoding="utf-8") for path in (REPO / "pipeline").rglob("*_internals.py")]
    assert len(named) >= 5
    assert [name for name in named if not any(f"def {name}(" in text for text in sources)] == []
    defined = [name for text in sources for name in re.findall(r"^def ([a-z]\w+)", text, re.MULTILINE)]
    assert sorted(named) == sorted(defined)
