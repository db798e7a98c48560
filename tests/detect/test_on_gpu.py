"""The script that tries a GPU, on a machine without one."""

import importlib.util
import re
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
    skipped = [name for name in ("torch", "tensorrt") if not importlib.util.find_spec(name)]
    assert printed.count("skipped") == 3 + len(skipped)  # two GPUs, and the engines of servers
    (row,) = (line.split(" | ") for line in printed.splitlines() if "| openvino | cpu | float32 |" in line)
    rate, fed, engine, share = map(float, row[4:8])
    assert min(rate, fed, engine) > 0
    assert share == pytest.approx(rate / min(fed, engine), abs=0.05), "the feed alone and the engine alone bound a job"
    assert "| (1, 2) |" in printed
    (boxes,) = re.findall(r"\| boxes of digits, openvino, bfloat16 \| .* \| (\d+) of (\d+) and", printed)
    assert 0 < int(boxes[0]) <= int(boxes[1])
    assert "| YOLOv4 at 608 | tensorflow | cpu | bfloat16 |" in printed


def test_steps_that_begin_too_late_are_named():
    command = [sys.executable, "-m", "tests.benchmarks.on_gpu", "--dry-run", "--minutes", "0"]
    printed = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, text=True, check=True).stdout
    for step in ("toy | onnxruntime | cpu | float32", "digits | tensorflow | cpu | bfloat16", "--device auto | CPU"):
        assert f"| {step} | not run: the time was over |" in printed
