"""ONNX Runtime on a frozen TensorFlow network, in its own environment: converts it, runs a batch for each line on stdin."""

import subprocess
import sys

import numpy as np
import onnxruntime

graph, batch, side, threads = sys.argv[1], *map(int, sys.argv[2:])
convert = [sys.executable, "-m", "tf2onnx.convert", "--graphdef", graph, "--inputs", "images:0", "--outputs", "boxes:0,scores:0"]
subprocess.run([*convert, "--opset", "17", "--output", graph + ".onnx"], check=True, capture_output=True)
options = onnxruntime.SessionOptions()
options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
options.add_session_config_entry("session.force_spinning_stop", "1")  # its threads must not take the cores while others are timed
session = onnxruntime.InferenceSession(graph + ".onnx", options, providers=["CPUExecutionProvider"])
images = np.random.default_rng(0).random((batch, side, side, 3), dtype=np.float32)
for _ in sys.stdin:
    session.run(None, {"images:0": images})
    print("done", flush=True)
