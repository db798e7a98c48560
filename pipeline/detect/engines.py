"""The engines that `--engine` names. Another one is a module with a function `open_model`, and a row here.

`--engine package.module:function` takes such a function from anywhere; `pipeline.detect.engine` has its interface.
"""

from __future__ import annotations

import importlib

from pipeline.detect.engine import OpenModel
from pipeline.errors import ModelError

ENGINES = {
    "tensorflow": "pipeline.detect.tensorflow_engine:open_model",
    "openvino": "pipeline.detect.openvino_engine:open_model",
    "onnxruntime": "pipeline.detect.onnxruntime_engine:open_model",
    "triton": "pipeline.detect.remote_model:open_model",
    "tf-serving": "pipeline.detect.remote_model:open_model",
}


def opener_of(engine: str) -> OpenModel:
    """The function that opens a model for an engine.

    Raises:
      ModelError: There is no such function.
    """
    module, _, name = ENGINES.get(engine, engine).partition(":")
    try:
        found: OpenModel = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as err:
        raise ModelError(f"engine {engine}: expected {', '.join(ENGINES)} or package.module:function, but: {err}") from err
    return found
