"""The script that tries a GPU, on a machine without one."""

import subprocess
import sys

import pytest

from tests.conftest import REPO
from tests.models.darknet_cases import SMALL

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]  # a dozen processes that import TensorFlow


def test_a_dry_run_takes_every_step(tmp_path):
    """A step that fails says so in its row."""
    cfg = tmp_path / "small.cfg"
    cfg.write_text(SMALL["plain"])
    command = [sys.executable, "-m", "tests.benchmarks.on_gpu", "--dry-run", "--cfg", str(cfg)]
    printed = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "failed" not in printed
    assert printed.count("skipped") == 4  # two GPUs, TensorRT, and the engines of servers
    assert "| (1, 2) |" in printed
    assert "| YOLOv4 at 608 | tensorflow | cpu | bfloat16 |" in printed
