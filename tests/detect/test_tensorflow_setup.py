"""What was asked is what TensorFlow has, also where no model is prepared yet: in a container, and on each worker of Dataflow."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import REPO

# two GPUs that are not there: what TensorFlow is told of them is written down
GPUS = """
import json, os, sys, tempfile
from pathlib import Path
import tensorflow as tf

told = {}
gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU") for n in range(2)]
tf.config.list_physical_devices = lambda kind=None: gpus
tf.config.set_visible_devices = lambda devices, kind: told.update(visible=[gpus.index(one) for one in devices])
tf.config.set_logical_device_configuration = lambda gpu, parts: told.update(memory_mb=parts[0].memory_limit)
tf.config.experimental.set_memory_growth = lambda gpu, grows: told.update(grows=grows)

from pipeline.config import DetectConfig, ModelConfig
model, detect = ModelConfig(path=sys.argv[1]), DetectConfig(**json.loads(sys.argv[2]))
"""
START = """
from pipeline.detect.load_model import load
load(model, detect).engine.close()
"""
TELL = """
told["threads"] = [tf.config.threading.get_intra_op_parallelism_threads(), tf.config.threading.get_inter_op_parallelism_threads()]
told["taken"] = sorted(path.name for path in Path(tempfile.gettempdir()).glob("detection-gpus-*/*"))
print(json.dumps(told), flush=True)
os._exit(0)
"""


@pytest.fixture
def told(tmp_path):
    """What TensorFlow is told in a process without any cache."""

    def run(script: str, model: str, **detect: object) -> dict[str, object]:
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-c", GPUS + script + TELL, model, json.dumps(detect)]
        done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=580, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


THREADS = {"intra_op_threads": 7, "concurrent_batches": 5}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bright", pytest.param("digits", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("settings", "of_gpus"),
    [
        pytest.param({"device": "cpu", "gpu_memory_mb": 1000}, {"visible": [], "taken": []}, id="cpu"),
        pytest.param(
            {"device": "gpu:1", "gpu_memory_mb": 1000}, {"visible": [1], "memory_mb": 1000, "taken": []}, id="one by its number"
        ),
        pytest.param({"device": "auto"}, {"visible": [0], "grows": True, "taken": ["0-0"]}, id="any, which is taken once"),
    ],
)
def test_a_model_that_nobody_prepared_runs_as_asked(told, bright_model, model, settings, of_gpus):
    """On a GPU TensorFlow chooses how many operations run at once."""
    expected = {**of_gpus, "threads": [7, 0 if of_gpus["visible"] else 5]}
    assert told(START, bright_model if model == "bright" else model, **settings, **THREADS) == expected
