"""Every private function of TensorFlow that this project calls, each with the public way that is missing.

Checked with TensorFlow 2.20 and 2.21. `tests/detect/test_tensorflow_internals.py` has a test for each function, which fails by
its name after an upgrade that changes what it needs. docs/design.md has a table of them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any


def process_config() -> Any:
    """The `ConfigProto` that `tf.config` has set for this process; a copy.

    Missing in public: `tf.config` sets threads, devices and memory, but a session of `tf.compat.v1` does not read them.
    """
    from tensorflow.python.eager import context

    return context.context().config


def trace(run: Callable[..., Any], signature: Sequence[Any]) -> Any:
    """Traces a function without its gradients.

    Missing in public: `tf.function` also prepares gradients and serialises the definition twice for that. Each time copies all
    weights and blocks every other Python thread, for 2.4 s in all where the weights have 258 MB.

    Args:
      run: Takes tensors and returns some.
      signature: Their `TensorSpec`s.
    """
    from tensorflow.python.eager.polymorphic_function import atomic_function
    from tensorflow.python.framework import func_graph

    graph = func_graph.func_graph_from_py_func("model", run, signature, {})
    return atomic_function.from_func_graph(f"model_{uuid.uuid4().hex}", graph, {})


def add_function(graph: Any, function: Any) -> None:
    """Adds a traced function, with those that it calls, to a graph, so that an operation there may name it.

    Missing in public: only calling a `tf.function` adds it, and `trace` makes none.
    """
    graph._add_function_recursive(function)


def forget_functions(graph: Any) -> None:
    """Drops a graph's own copies of its functions. Call it once the graph's session has run something.

    Missing in public: a graph keeps each function, with all weights, for as long as it lives, beside the session's own copy.
    Without this a model of 258 MB took 4.7 instead of 2.9 GB, and its first call took twice as long.
    """
    for function in [*graph._functions.values()]:
        graph._remove_function(function.name)


def freeze(function: Any) -> Any:
    """A `ConcreteFunction` whose variables are constants; only constants can be folded.

    Missing in public: `tf.lite` and `tf.compat.v1.graph_util` convert other things, or need a session with variables.
    """
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    return convert_variables_to_constants_v2(function, lower_control_flow=False)


def meta_graph(frozen: Any) -> Any:
    """The `MetaGraphDef` of a frozen function, which fetches its outputs.

    Missing in public: `tf.compat.v1.train.export_meta_graph` refuses to run eagerly.
    """
    from tensorflow.python.training.saver import export_meta_graph

    graph = export_meta_graph(graph_def=frozen.graph.as_graph_def(), graph=frozen.graph)
    for tensor in frozen.outputs:
        graph.collection_def["train_op"].node_list.value.append(tensor.name)
    return graph


def optimise(config: Any, graph: Any) -> Any:
    """The `GraphDef` of a `MetaGraphDef` after Grappler's rewrites.

    Missing in public: TensorFlow optimises at the first call of a graph, copying all constants thirty times; nothing returns the
    result, which is to be made once and called at every batch size.

    Args:
      config: A `ConfigProto` with the rewrites.
      graph: The `MetaGraphDef`.
    """
    from tensorflow.python.grappler import tf_optimizer

    return tf_optimizer.OptimizeGraph(config, graph)
