"""A model can be loaded and closed again and again in one process: threads and memory are given back."""

import json
import subprocess
import sys

import pytest

from tests.conftest import REPO

LOADS = 5
MEASURE = """
import json, sys
import numpy as np, psutil
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_model import load
process, seen = psutil.Process(), []
for _ in range(int(sys.argv[2])):
    model = load(ModelConfig(path=sys.argv[1]), DetectConfig(batch_sizes=(1, 2), concurrent_batches=2))
    model.engine.run(np.zeros((5, *model.metadata.input_hw, 3), np.uint8))
    in_use = process.num_threads()
    model.engine.close()
    seen.append((in_use, process.num_threads(), process.memory_info().rss / 1e6))
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def large_model(tmp_path_factory):
    """Forty megabytes of weights, so that one that stays shows."""
    import numpy as np
    import tensorflow as tf

    from tests.tiny_models import bright_box, save_model

    weights = tf.constant(np.random.default_rng(1).normal(size=(2500, 4000)).astype(np.float32))

    def predict(images):
        n = tf.shape(images)[0]
        mixed = tf.matmul(tf.ones([n, 2500]), weights)
        return {"boxes": bright_box(images)[:, None], "scores": tf.sigmoid(mixed[:, :1])}

    spec = tf.TensorSpec((None, 96, 128, 3), tf.uint8, "images")
    return save_model(tmp_path_factory.mktemp("models") / "large", predict, spec)


def test_a_model_that_is_closed_gives_back_its_threads_and_its_memory(large_model):
    """In a process of its own, whose memory no other test uses."""
    command = [sys.executable, "-c", MEASURE, large_model, str(LOADS)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=580, check=True)
    in_use, closed, rss_mb = zip(*json.loads(done.stdout), strict=True)
    # a thread may end a moment later, and the allocator keeps some memory
    assert min(in_use[1:]) <= in_use[0]
    assert min(closed[1:]) <= closed[0] < in_use[0]
    assert rss_mb[-1] < rss_mb[1] + 200, rss_mb  # kept for good, the weights of the loads after the second would add at least 360
