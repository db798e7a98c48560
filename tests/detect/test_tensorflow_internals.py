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


def frozen_sum(tf, weights):
    signature = [tf.TensorSpec((), tf.float32)]
    return tensorflow_internals.freeze(tf.function(lambda x: tf.reduce_sum(weights) + x, signature).get_concrete_function())


def test_process_config_has_what_tf_config_was_told(tf):
    """A session gets the threads that `tf.config` has set."""
    config = tensorflow_internals.process_config()
    assert config.intra_op_parallelism_threads == tf.config.threading.get_intra_op_parallelism_threads()
    config.intra_op_parallelism_threads = 77
    assert tensorflow_internals.process_config().intra_op_parallelism_threads != 77


def test_trace_and_add_function_and_forget_functions(tf):
    """A traced function runs in a graph's session, also once the graph has forgotten it."""
    function = tensorflow_internals.trace(lambda x: [x * 2.0], [tf.TensorSpec((), tf.float32)])
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, ())
        tensorflow_internals.add_function(graph, function)
        twice = tf.raw_ops.PartitionedCall(args=[x], Tout=[tf.float32], f=function.name)
        begun = tf.no_op()
    with tf.compat.v1.Session(graph=graph) as session:
        session.run(begun)
        assert [each.signature.name for each in graph.as_graph_def().library.function] == [function.name.decode()]
        tensorflow_internals.forget_functions(graph)
        assert list(graph.as_graph_def().library.function) == []
        assert session.run(twice, {x: 21.0}) == [42.0]


def test_freeze_makes_constants_of_variables(tf, weights):
    """A frozen function knows its variables' values and captures none."""
    frozen = frozen_sum(tf, weights)
    weights.assign(tf.zeros_like(weights))
    assert frozen(tf.constant(0.0))[0].numpy() == np.arange(20_000, dtype=np.float32).sum()
    assert list(frozen.graph.captures) == []


def test_meta_graph_and_optimise_fold_constants(tf, weights):
    """The sum of the weights is computed once, here; the result still computes what the function did."""
    frozen = frozen_sum(tf, weights)
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1
    optimised = tensorflow_internals.optimise(config, tensorflow_internals.meta_graph(frozen))
    assert "Sum" in {node.op for node in frozen.graph.as_graph_def().node}
    assert "Sum" not in {node.op for node in optimised.node}
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        tf.import_graph_def(optimised, name="")
        assert session.run(frozen.outputs[0].name, {frozen.inputs[0].name: 1.0}) == pytest.approx(199_990_001, rel=1e-6)


def test_no_other_module_of_the_pipeline_uses_private_parts_of_tensorflow():
    """An upgrade breaks one module."""
    private = re.compile(r"tensorflow\.python|_add_function_recursive|_remove_function\b")
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
