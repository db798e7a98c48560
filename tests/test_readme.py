"""What the README shows works as it stands."""

import os
import re
import subprocess
import sys

from pipeline.config import load_config, settings
from tests.conftest import REPO

README = (REPO / "README.md").read_text()


def test_the_snippet_runs_as_it_stands(tmp_path):
    """The pipeline of one's own detects in every sample scene."""
    snippet = next(re.finditer(r"```python\n(.*?)```", README, re.DOTALL)).group(1)
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    done = subprocess.run(
        [sys.executable, script], cwd=REPO, capture_output=True, text=True, timeout=240, check=False, env=_env()
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.endswith(" digits"))
    scenes = sorted(str(path.relative_to(REPO)) for path in (REPO / "models/digits/samples").glob("*.jpg"))
    assert [line.split(":")[0] for line in lines] == scenes
    assert sum(int(line.split()[-2]) for line in lines) >= 50


def test_every_linked_file_exists():
    """No link of the README leads nowhere."""
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (REPO / link).exists()] == []


def test_every_flag_of_the_readme_is_a_setting():
    """Renamed settings show."""
    known = {"--" + key.rsplit(".", 1)[-1].replace("_", "-") for key, _, _ in settings()} | {
        "--model",
        "--config",
        "--help",
        "--dry-run",
    }
    of_others = {
        "--cfg",
        "--weights",
        "--names",
        "--input-size",
        "--detections",
        "--ground-truth",
        "--until",
        "--write-missing",
        "--out",
        "--resume",
        "--detach",
        "--attach",
    }
    shown = {flag.replace("--no-", "--") for flag in re.findall(r"(?<![\w-])--[a-z][a-z_-]+", README) if "_" not in flag}
    assert shown - known - of_others == set()


def test_every_promise_has_its_test():
    """A test that is renamed or dropped takes its promise with it."""
    promised = re.findall(r"`(tests/[^`]+\.py)(?:::(\w+))?::(\w+)`", README)
    assert len(promised) >= 10
    missing = []
    for file, group, test in promised:
        text = (REPO / file).read_text() if (REPO / file).exists() else ""
        missing += [name for name in (f"class {group}:" if group else "", f"def {test}(") if name not in text]
    assert missing == []


def test_every_config_loads():
    """The example configs hold known keys and values of the right type, and name the command that runs them."""
    configs = sorted((REPO / "configs").glob("*.yaml"))
    assert len(configs) >= 3
    for path in configs:
        load_config(str(path), {})
        assert f"--config configs/{path.name}" in path.read_text()


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPO)}
