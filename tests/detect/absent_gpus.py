"""Loads a model beside two GPUs that are not there, and prints what TensorFlow is told of them."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_model import load
from tests.without_keras import tf


def main(arguments: Sequence[str]) -> int:
    """Takes the path of a model, and settings of the detector as JSON."""
    model, detect = arguments
    told: dict[str, object] = {}
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU") for number in range(2)]
    tf.config.list_physical_devices = lambda kind=None: gpus
    tf.config.set_visible_devices = lambda devices, kind: told.update(visible=[gpus.index(one) for one in devices])
    tf.config.set_logical_device_configuration = lambda gpu, parts: told.update(memory_mb=parts[0].memory_limit)
    tf.config.optimizer.set_experimental_options = lambda options: told.update(rewrites=options)
    tf.config.experimental.set_memory_growth = lambda gpu, grows: told.update(grows=grows)
    tempfile.tempdir = None  # of the process that this one was forked from
    load(ModelConfig(path=model), DetectConfig(**json.loads(detect))).batcher.close()
    threading = tf.config.threading
    told["threads"] = [threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads()]
    told["taken"] = sorted(path.name for path in Path(tempfile.gettempdir()).glob("detection-gpus-*/*"))
    print(json.dumps(told))
    return 0
