"""The bundled detector in the user's cache: whole for everyone, however many ask at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from models.digits import cache
from pipeline.detect.saved_model import locate
from pipeline.errors import ModelError
from tests.conftest import REPO

ASK = """
import sys
from models.digits import cache

ready = cache._export
def when_told(output):
    ready(output)
    print("exported", flush=True)
    sys.stdin.readline()

cache._export = when_told
print(cache.cached_digits(), flush=True)
"""


def files_of(folder: str) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.slow
def test_processes_that_ask_at_once_get_one_whole_model(tmp_path):
    """Each has exported before any gives its export the name; the first keeps it, and nobody's leftovers stay."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", ASK]
    asking = [
        subprocess.Popen(command, cwd=REPO, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [process.stdout.readline() for process in asking] == ["exported\n"] * 2
    folders = [process.communicate("go\n", timeout=580)[0].strip() for process in asking]
    assert [process.returncode for process in asking] == [0, 0]
    assert folders[0] == folders[1]
    assert folders[0].startswith(str(tmp_path))
    assert "1/saved_model.pb" in files_of(folders[0])
    assert os.listdir(folders[0]) == ["1"]


@pytest.mark.slow
def test_it_is_exported_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache.cached_digits()
    before = {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*")}
    assert locate("digits") == (f"{folder}/1", "1")
    assert {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*")} == before


def test_what_is_not_absolute_is_no_cache(monkeypatch, tmp_path):
    """The specification has it ignored; the current folder must not fill with models."""
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache._cache_folder() == str(tmp_path / ".cache")


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"^model digits: expected a cache that can be written, but: .*; set XDG_CACHE_HOME"):
        locate("digits")
