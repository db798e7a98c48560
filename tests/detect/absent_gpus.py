"""Loads a model beside two GPUs that are not there, and prints what TensorFlow is told of them."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_model import load
from pipeline.detect.tensorflow_engine import described_signature
from pipeline.detect.versions import locate
from tests.without_keras import tf


def main(arguments: Sequence[str]) -> int:
    """Takes the path of a model, and settings of the detector as JSON."""
    model, detect = arguments
    told: dict[str, Any] = {}
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU") for number in range(2)]
    tf.config.list_physical_devices = lambda kind=None: gpus
    tf.config.set_visible_devices = lambda devices, kind: told.update(visible=[gpus.index(one) for one in devices])
    tf.config.get_visible_devices = lambda kind=None: [gpus[number] for number in told.get("visible", [])]
    tf.config.experimental.get_memory_info = lambda device: {"peak": 0}
    tf.config.set_logical_device_configuration = lambda gpu, parts: told.update(memory_mb=parts[0].memory_limit)
    tf.config.optimizer.set_experimental_options = lambda options: told.update(rewrites=options)
    tf.config.experimental.set_memory_growth = lambda gpu, grows: told.update(grows=grows)
    tempfile.tempdir = None  # of the process that this one was forked from
    settings = DetectConfig(**json.loads(detect))
    loaded = load(ModelConfig(path=model), settings)
    loaded.batcher.close()
    folder, _version = locate(model)
    told["sizes"] = loaded.batcher.batch_sizes
    told["signature"] = described_signature(folder, folder, ModelConfig(path=model), settings)[-1].signature
    threading = tf.config.threading
    told["threads"] = [threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads()]
    told["taken"] = sorted(path.name for path in Path(tempfile.gettempdir()).glob("detection-gpus-*/*"))
    print(json.dumps(told))
    return 0
