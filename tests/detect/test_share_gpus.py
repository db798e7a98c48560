"""Processes of one machine and its GPUs: as many models a GPU as there must be, and no more."""

import os
import subprocess
import sys

import pytest

from tests.conftest import REPO

TAKE = """
import sys
from pipeline.detect.share_gpus import take_gpu

print(take_gpu(int(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def process(tmp_path, request, monkeypatch):
    """Starts a process that takes a GPU and keeps it; ends it where it is asked to."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def start(gpus: int) -> tuple[int, subprocess.Popen]:
        command = [sys.executable, "-c", TAKE, str(gpus)]
        started = subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        request.addfinalizer(lambda: end(started))
        return int(started.stdout.readline()), started

    return start


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


def test_each_process_has_a_gpu_of_its_own_until_all_are_taken(process):
    """Then the next ones share them evenly; one whose process was killed is free again."""
    taken = [process(3) for _ in range(5)]
    assert [number for number, _ in taken] == [0, 1, 2, 0, 1]
    end(taken[2][1])
    assert process(3)[0] == 2


@pytest.mark.parametrize("gpus", [0, 1])
def test_without_a_choice_nothing_is_locked(gpus, process, tmp_path):
    assert process(gpus)[0] == process(gpus)[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_where_no_file_can_be_locked_the_first_is_taken(process, tmp_path):
    """A file stands where the folder of locks would."""
    (tmp_path / f"detection-gpus-{os.getuid()}").write_text("a file")
    assert [process(2)[0] for _ in range(2)] == [0, 0]
