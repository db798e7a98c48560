"""A version is prepared in a process of its own, which stands back behind the job's."""

import os
from pathlib import Path

import pytest

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_in_subprocess import Preparation
from pipeline.errors import ModelError
from tests.detect.versioned_models import save_version

THREADS = {"intra_op_threads": 4, "concurrent_batches": 4}  # of the job; the process takes one of each


def test_it_is_of_low_priority_from_its_first_moment_on_and_of_few_threads(tmp_path):
    folder = save_version(tmp_path, 7)
    preparation = Preparation(str(folder), "7", ModelConfig(path=str(tmp_path)), DetectConfig(**THREADS), gpu=False)
    pid = preparation._process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)
    assert preparation.result().version == "7"
    assert not Path(f"/proc/{pid}").exists()


def test_one_that_is_stopped_is_an_error_and_leaves_no_process(tmp_path):
    folder = save_version(tmp_path, 7)
    preparation = Preparation(str(folder), "7", ModelConfig(path=str(tmp_path)), DetectConfig(), gpu=False)
    preparation.stop()
    with pytest.raises(ModelError, match=f"model {folder}: the process that loads it ended with -9"):
        preparation.result()
    assert not Path(f"/proc/{preparation._process.pid}").exists()


def test_it_takes_this_programs_packages_in_a_folder_that_has_some_of_the_same_names(tmp_path, monkeypatch):
    """Such as a clone of YOLOv5."""
    folder = save_version(tmp_path, 7)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    preparation = Preparation(str(folder), "7", ModelConfig(path=str(tmp_path)), DetectConfig(**THREADS), gpu=False)
    assert preparation.result().version == "7"
