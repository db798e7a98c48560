"""What README, CONTRIBUTING and docs/ show and name works and exists as it stands there."""

import os
import re
import subprocess
import sys

import pytest

from pipeline.config import load_config, settings
from tests.fixtures import REPO
from tests.write_docs import pages

PAGES = {
    str(path.relative_to(REPO)): path.read_text(encoding="utf-8")
    for path in [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
}
FOLDERS = ["pipeline", "models", "tests", "configs", "deploy", "docs"]
OTHER_FLAGS = {  # of other commands of this project, of the launcher, and of other tools
    "--calibration", "--max-ap-loss", "--budget-s",
    "--cfg", "--weights", "--names", "--input-size", "--detections", "--ground-truth", "--until", "--keep", "--write-missing",
    "--out", "--resume", "--config", "--help", "--help-all", "--dry-run", "--verbose", "--model",
    "--images", "--images-per-second", "--machines", "--machine-hour", "--class-a", "--class-b", "--hours",
    "--startup-minutes", "--page", "--multi-label", "--reference", "--resamples", "--threshold",
    "--match", "--json", "--full", "--export", "--converter", "--image",
    "--coco-ground-truth", "--run", "--since", "--to", "--sort", "--format",
    "--annotate", "--crops", "--margin", "--min-confidence", "--class", "--table", "--dead-letters-table",
}  # fmt: skip


@pytest.mark.slow
def test_the_snippet_for_a_pipeline_of_your_own_runs_as_it_stands(tmp_path):
    """It detects in every sample scene."""
    snippet = next(re.finditer(r"```python\n(.*?)```", PAGES["docs/batch.md"], re.DOTALL)).group(1)
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, script], cwd=REPO, capture_output=True, text=True, timeout=580, check=False, env=env)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.endswith(" digits"))
    scenes = sorted(str(path) for path in (REPO / "models/digits/samples").glob("*.jpg"))
    assert [line.split(":")[0] for line in lines] == scenes
    assert sum(int(line.split()[-2]) for line in lines) >= 50


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_its_heading(page):
    """A moved file or a renamed heading shows."""
    for target, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", PAGES[page])):
        if "://" in target:
            continue
        path = (REPO / page).parent / target if target else REPO / page
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_path_in_code_quotes_exists(page):
    """A page that sends a reader to a file sends them to one that is there."""
    quoted = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)(?:::?[\w.:]+)?`", PAGES[page])
    assert [path for path in quoted if not (REPO / path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_is_a_setting_or_a_flag_of_another_command(page):
    """Renamed settings show."""
    known = {setting.flag for setting in settings()} | OTHER_FLAGS
    shown = {flag.replace("--no-", "--") for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+(?![\w-])", PAGES[page])}
    assert shown - known == set()


def test_every_promise_has_its_test():
    """A test that is renamed or dropped takes its promise with it."""
    promised = re.findall(r"`(tests/[^`]+\.py)(?:::(\w+))?::(\w+)`", PAGES["docs/guarantees.md"])
    assert len(promised) >= 20
    missing = []
    for file, group, test in promised:
        text = (REPO / file).read_text(encoding="utf-8") if (REPO / file).exists() else ""
        missing += [name for name in (f"class {group}:" if group else "", f"def {test}(") if name not in text]
    assert missing == []


def test_every_config_loads():
    """The example configs hold known keys and values of the right type, and name the command that runs them."""
    configs = sorted((REPO / "configs").glob("*.yaml"))
    assert len(configs) >= 3
    for path in configs:
        load_config([str(path)], {})
        assert f"--config configs/{path.name}" in path.read_text()


@pytest.mark.parametrize("page", pages())
def test_what_is_made_of_the_code_is_as_the_code(page):
    """`python -m tests.write_docs` was run after the last change of a setting or of a dead letter's reason."""
    assert PAGES[page] == pages()[page]


def test_the_readme_is_one_page():
    """A screen and a half: what it is, two commands, a real model, an example for each use, where to read on."""
    assert len(PAGES["README.md"].splitlines()) <= 100
