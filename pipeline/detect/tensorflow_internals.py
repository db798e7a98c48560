"""All private functions of TensorFlow that this project calls, each with the reason why no public one does.

Checked with TensorFlow 2.20 and 2.21. `tests/detect/test_tensorflow_internals.py` has a test for each; after an upgrade the test
of the broken one fails by name. docs/design.md has their gains.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any


def import_without_keras() -> Any:
    """Imports TensorFlow without Keras, which `tf.keras` and `tensorflow.keras` import at their first use.

    No public way: TensorFlow imports Keras at once, for those who load a SavedModel with an optimizer, and Keras imports
    scikit-learn and Matplotlib where it finds them.
    """
    if {"tensorflow", "keras"} & sys.modules.keys():
        import tensorflow as tf

        return tf
    keras = importlib.util.find_spec("keras")
    sys.modules["keras"] = None  # type: ignore[assignment]  # so that its import fails
    try:
        import tensorflow as tf
    finally:
        del sys.modules["keras"]
    there = [os.path.dirname(keras.origin)] if keras and keras.origin else []
    ours = [folder for folder in tf.__path__ if folder]  # TensorFlow has put None where it looked for Keras
    tf.__path__ = [f"{folder}/{part}" for folder in there for part in ("api/_v2", "_tf_keras")] + ours
    return tf


def process_config() -> Any:
    """A copy of the `ConfigProto` with the settings of `tf.config`.

    No public way: `tf.config` sets threads, devices and memory, but a session of `tf.compat.v1` ignores them.
    """
    from tensorflow.python.eager import context

    return context.context().config


def trace(run: Callable[..., Any], signature: Sequence[Any]) -> Any:
    """Traces a function without gradients.

    No public way: `tf.function` also prepares gradients, and serialises the definition twice for them. Both times copy all
    weights and block all other Python threads, in all for 2.4 s at 258 MB of weights.

    Args:
      run: Takes and returns tensors.
      signature: `TensorSpec`s of its arguments.
    """
    from tensorflow.python.eager.polymorphic_function import atomic_function
    from tensorflow.python.framework import func_graph

    graph = func_graph.func_graph_from_py_func("model", run, signature, {})
    return atomic_function.from_func_graph(f"model_{uuid.uuid4().hex}", graph, {})


def add_function(graph: Any, function: Any) -> None:
    """Adds a traced function and the functions that it calls to a graph, so that its operations may call it.

    No public way: `ConcreteFunction` has one, but `trace` makes none.
    """
    graph._add_function_recursive(function)


def forget_functions(graph: Any) -> None:
    """Drops a graph's copies of its functions. Call it after the session's first run, when the session has its own copies.

    No public way: a graph keeps each function, with all weights, as long as it lives.
    """
    for function in [*graph._functions.values()]:
        graph._remove_function(function.name)


def freeze(function: Any) -> Any:
    """Makes constants of a `ConcreteFunction`'s variables; TensorFlow folds only constants.

    No public way: `tf.lite` converts to another format, and `tf.compat.v1.graph_util` needs a session with variables.
    """
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    return convert_variables_to_constants_v2(function, lower_control_flow=False)


def meta_graph(frozen: Any) -> Any:
    """The `MetaGraphDef` of a frozen function, with its outputs as fetches.

    No public way: `tf.compat.v1.train.export_meta_graph` refuses to run in eager mode.
    """
    from tensorflow.python.training.saver import export_meta_graph

    graph = export_meta_graph(graph_def=frozen.graph.as_graph_def(), graph=frozen.graph)
    for tensor in frozen.outputs:
        graph.collection_def["train_op"].node_list.value.append(tensor.name)
    return graph


def optimise(config: Any, graph: Any) -> Any:
    """The `GraphDef` of a `MetaGraphDef` after Grappler's rewrites.

    No public way: TensorFlow optimises a graph at its first call, and returns no result that another process could make.

    Args:
      config: A `ConfigProto` with the rewrites.
      graph: The `MetaGraphDef`.
    """
    from tensorflow.python.grappler import tf_optimizer

    return tf_optimizer.OptimizeGraph(config, graph)
