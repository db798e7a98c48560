"""What CI makes of tests that fail: once more, and the last line names those that pass then."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.fixtures import REPO

FLAKY = """
import os
def test_passes_the_second_time():
    if not os.path.exists("began"):
        open("began", "w").close()
        raise AssertionError
def test_good():
    assert True
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_test_that_fails_is_tried_again_and_the_last_line_names_it_and_the_seed(tmp_path, fails):
    """With a `make` whose only tests are these."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(REPO / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "test_it.py").write_text(FLAKY + ("def test_bad():\n    assert False\n" if fails else ""))
    tests = f'[ "$1" != test ] || exec {sys.executable} -m pytest --rootdir . test_it.py\n'
    for name, script in {"make": tests, "promtool": "", "chromium": "", "apt-get": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SEED": "7"}
    done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    last = done.stdout.splitlines()[-1]
    if fails:
        assert done.returncode == 1 and last == "CI: failed after 0 minutes, seed 7", done.stdout
    else:
        named = '"test_it.py::test_passes_the_second_time"'
        assert done.returncode == 0, done.stdout
        assert last.strip() == f"CI: passed after 0 minutes, seed 7; FLAKY, passed the second time: {named}"
    assert "Using --randomly-seed=7" in done.stdout
