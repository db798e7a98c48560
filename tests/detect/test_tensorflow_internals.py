"""Each private function of TensorFlow does what this project needs of it; after an upgrade the test of one fails by its name."""

import re
import subprocess
import sys

import numpy as np
import pytest

from pipeline.detect import tensorflow_internals
from tests.fixtures import REPO


@pytest.fixture(scope="module")
def tf():
    import tensorflow

    return tensorflow


@pytest.fixture
def weights(tf):
    return tf.Variable(np.arange(20_000, dtype=np.float32))


def test_freeze_makes_constants_of_variables(tf, weights):
    """A frozen function knows its variables' values and captures none."""
    signature = [tf.TensorSpec((), tf.float32)]
    frozen = tensorflow_internals.freeze(tf.function(lambda x: tf.reduce_sum(weights) + x, signature).get_concrete_function())
    weights.assign(tf.zeros_like(weights))
    assert frozen(tf.constant(0.0))[0].numpy() == np.arange(20_000, dtype=np.float32).sum()
    assert list(frozen.graph.captures) == []


def test_no_other_module_of_the_pipeline_uses_private_parts_of_tensorflow():
    """An upgrade breaks one module."""
    private = re.compile(r"tensorflow\.python")
    users = {path.name for path in (REPO / "pipeline").rglob("*.py") if private.search(path.read_text(encoding="utf-8"))}
    assert users == {"tensorflow_internals.py"}


IMPORTED = """
import gc, sys
from pipeline.config import DetectConfig
from pipeline.detect.tensorflow_setup import configure_tensorflow
tf = configure_tensorflow(DetectConfig())
print("keras" in sys.modules, gc.isenabled())
from tensorflow.keras import layers
print(tf.keras.layers.Dense is layers.Dense, layers.Dense.__module__.partition(".")[0])
"""


@pytest.mark.slow
def test_import_without_keras():
    """A job imports no Keras; a user's own code may still do so, in both ways that TensorFlow offers."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], cwd=REPO, capture_output=True, text=True, timeout=580, check=False)
    assert done.stdout.split() == ["False", "True", "True", "keras"], done.stderr
