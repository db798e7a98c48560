"""All private functions of TensorFlow that this project calls, each with the reason why no public one does.

Checked with TensorFlow 2.20 and 2.21. `tests/detect/test_tensorflow_setup.py` has a test for each; after an upgrade the test of
the broken one fails by name. docs/design.md has their gains.
"""

from __future__ import annotations

import importlib.util
import os
import sys
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


def freeze(function: Any) -> Any:
    """Makes constants of a `ConcreteFunction`'s variables; TensorFlow folds only constants, and OpenVINO reads only them.

    No public way: `tf.lite` converts to another format, and `tf.compat.v1.graph_util` needs a session with variables.
    """
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    return convert_variables_to_constants_v2(function, lower_control_flow=False)
