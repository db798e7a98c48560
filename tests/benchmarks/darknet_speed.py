"""How fast imported Darknet models are on CPU, beside OpenCV's `dnn` module and ONNX Runtime. float32, two threads each.

    python -m tests.benchmarks.darknet_speed [--onnx-python .bench/envs/onnxruntime/bin/python] CFG ...

A cfg's weights lie beside it, or are random. Each round times every engine once, in turn, so that a noisy machine hurts all
alike; ratios are medians over rounds of the same round's times. OpenCV and ONNX Runtime do no suppression; ours does.
ONNX Runtime needs an environment of its own, since the converter wants other versions:

    python -m tests.benchmarks.environments onnxruntime
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from models.darknet.network import Network, parse_network
from models.darknet.weights import read_weights
from tests.models.darknet_cases import random_values, write_weights

THREADS = 2
BATCH = 8


def main() -> int:
    """Measure each cfg and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cfgs", nargs="+", type=Path, metavar="CFG")
    parser.add_argument("--input-size", type=int, default=416, help="pixels (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default: %(default)s)")
    parser.add_argument("--onnx-python", metavar="FILE", help="Python of an environment with onnxruntime and tf2onnx")
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    cv2.setNumThreads(THREADS)
    for cfg in args.cfgs:
        with tempfile.TemporaryDirectory() as scratch:
            engines = prepare(cfg, args.input_size, args.onnx_python, Path(scratch))
            report(cfg.stem, args.input_size, measure(engines, args.rounds))
    return 0


def prepare(cfg: Path, side: int, onnx_python: str | None, scratch: Path) -> dict[str, Callable[[], Any]]:
    """What to time, by name: one call is one batch."""
    network = parse_network(cfg.read_text(), (side, side))
    weights = cfg.with_suffix(".weights")
    if not weights.exists():
        weights = scratch / "random.weights"
        write_weights(weights, random_values(cfg.read_text(), spread=0.7))
    images = np.random.default_rng(0).integers(0, 256, (BATCH, side, side, 3), np.uint8)
    engines = tensorflow_engines(network, weights, images, scratch)
    engines["OpenCV"] = opencv_engine(cfg, weights, images)
    if onnx_python:
        engines["ONNX Runtime"] = onnx_engine(onnx_python, scratch / "network.pb", side)
    return engines


def tensorflow_engines(network: Network, weights: Path, images: np.ndarray, scratch: Path) -> dict[str, Callable[[], Any]]:
    """The imported model, frozen as the pipeline runs it: batches of 8, 1 and 10. Its network alone goes to `network.pb`."""
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    from models.darknet.detector import DarknetDetector
    from models.export import IOU_THRESHOLD, MAX_DETECTIONS, SCORE_THRESHOLD, suppress

    detector = DarknetDetector(network, read_weights(str(weights), network))

    def detect(batch: tf.Tensor) -> Any:
        boxes, scores = detector(tf.cast(batch, tf.float32) * (1 / 255))
        return suppress(boxes, scores, *map(tf.constant, (SCORE_THRESHOLD, IOU_THRESHOLD, MAX_DETECTIONS)))

    def answer(batch: tf.Tensor) -> Any:
        boxes, scores = detector(batch)
        return tf.identity(boxes, name="boxes"), tf.identity(scores, name="scores")

    def freeze(function: Callable[[tf.Tensor], Any], dtype: tf.DType) -> Any:
        spec = tf.TensorSpec((None, *network.input_hw, 3), dtype, name="images")
        concrete = tf.function(function, input_signature=[spec], autograph=False).get_concrete_function()
        return convert_variables_to_constants_v2(concrete)

    (scratch / "network.pb").write_bytes(freeze(answer, tf.float32).graph.as_graph_def().SerializeToString())
    frozen = freeze(detect, tf.uint8)
    one, eight, ten = images[:1], images, np.concatenate([images, images[:2]])
    return {
        "ours": lambda: [output.numpy() for output in frozen(tf.constant(eight))],
        "ours, batch of 1": lambda: [output.numpy() for output in frozen(tf.constant(one))],
        "ours, batch of 10": lambda: [output.numpy() for output in frozen(tf.constant(ten))],
    }


def opencv_engine(cfg: Path, weights: Path, images: np.ndarray) -> Callable[[], Any]:
    """OpenCV's importer and forward pass."""
    network = cv2.dnn.readNetFromDarknet(str(cfg), str(weights))
    outputs = network.getUnconnectedOutLayersNames()

    def forward() -> Any:
        network.setInput(cv2.dnn.blobFromImages(list(images), 1 / 255))
        return network.forward(outputs)

    return forward


def onnx_engine(python: str, graph: Path, side: int) -> Callable[[], Any]:
    """ONNX Runtime in a process of its own that runs a batch for each line it gets."""
    command = [python, str(Path(__file__).with_name("peer_onnxruntime.py")), str(graph), str(BATCH), str(side), str(THREADS)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def forward() -> None:
        assert process.stdin and process.stdout
        process.stdin.write("run\n")
        if process.stdout.readline() != "done\n":
            raise RuntimeError(f"ONNX Runtime's process ended with {process.wait()}: {' '.join(command)}")

    return forward


def measure(engines: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each engine in each round, after two unmeasured ones."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 2):
        for name, run in engines.items():
            start = time.perf_counter()
            run()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def report(model: str, side: int, seconds: dict[str, list[float]]) -> None:
    """Print images per second, and how many times as fast as the others ours is."""

    def ratio(slower: str, faster: str = "ours") -> float:
        return statistics.median(s / f for s, f in zip(seconds[slower], seconds[faster], strict=True))

    print(f"{model} at {side}, batch of {BATCH}: {BATCH / statistics.median(seconds['ours']):.1f} images/s")
    for other in ("OpenCV", "ONNX Runtime"):
        if other in seconds:
            print(f"  {ratio(other):.2f} times as fast as {other} ({BATCH / statistics.median(seconds[other]):.1f} images/s)")
    print(f"  images per second at batch {BATCH} over batch 1: {BATCH * ratio('ours, batch of 1'):.2f}")
    print(
        f"  time for 10 images in one call over one image: {1 / ratio('ours, batch of 1', 'ours, batch of 10'):.2f}", flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
