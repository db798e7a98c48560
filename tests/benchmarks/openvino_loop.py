"""OpenVINO's own throughput loop beside the pipeline at each precision, and TensorFlow, alternated in one run.

    python -m tests.benchmarks.openvino_loop --count 512 --rounds 3 [--cfg yolov4-tiny.cfg]

The model is the bundled detector, or that of a Darknet cfg, whose weights lie beside it or are random. Its int8 version is made
from the benchmarks' images, without a bound on its agreement: random weights measure time, and nothing else.

The loop is `AsyncInferQueue` with its `THROUGHPUT` hint, and threads that decode beside it. It has no suppression, no rows and no
handling of bad images: a bound. The pipeline runs as a command, with its start and its end; images a second are taken from its
own summary, and those of the loop from its first decoded image to its last output. Start to first row is the start-up of the
summary and the median latency. The loop's memory is that of OpenVINO and its images.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from models.darknet.network import parse_network
from models.import_darknet import import_darknet
from tests.benchmarks.images import SMALL, link_images, make_images
from tests.models.darknet_cases import random_values, write_weights

_LOOP = "openvino's loop"
_CALIBRATION = 16  # photos; more take minutes, and do not change the speed
_HINTS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32"}
_RUNS = [
    ("tensorflow", "float32"),
    *[(name, each) for each in _HINTS for name in (_LOOP, "openvino")],
    ("tensorflow", "bfloat16"),
]


def main() -> None:
    """Runs the rounds, or within them one loop; prints a table of medians."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--count", type=int, default=512, help="images")
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--loop", type=Path, help="internal: run the loop over this folder")
    flags.add_argument("--precision", choices=_HINTS, default="float32")
    flags.add_argument("--cfg", type=Path, help="a Darknet network instead of the bundled detector")
    flags.add_argument("--score-threshold", type=float, default=0.25, help="random weights need about 0.9 for a few objects")
    flags.add_argument("--model", default="", help="internal: of the loop")
    args = flags.parse_args()
    if args.loop:
        print(json.dumps(_loop(sorted(args.loop.glob("*.jpg")), args.model, args.precision)))
        return
    with tempfile.TemporaryDirectory(dir=make_images(SMALL).parent) as scratch:
        images = Path(scratch, "images")
        link_images(make_images(SMALL), images, args.count)
        model = _model(args.cfg, Path(scratch))
        found: dict[str, list[dict[str, float]]] = {}
        for number in range(args.rounds + 1):  # the first one fills caches
            for name, precision in _RUNS:
                if name == _LOOP:
                    run = _run_loop(images, model, precision)
                else:
                    run = _job(images, Path(scratch), model, name, precision, args.score_threshold)
                if number:
                    found.setdefault(f"{name}, {precision}", []).append(run)
                    print(number, name, precision, run, flush=True)
        _print_table(found)


def _model(cfg: Path | None, scratch: Path) -> str:
    """A folder with an int8 version."""
    model, source = scratch / "model", "digits"
    if cfg:
        source, weights, names = str(model / "1"), cfg.with_suffix(".weights"), scratch / "names"
        if not weights.exists():
            weights = scratch / "random.weights"
            write_weights(weights, random_values(cfg.read_text(), spread=0.7))
        names.write_text("".join(f"class {n}\n" for n in range(parse_network(cfg.read_text()).classes)))
        import_darknet(str(cfg), str(weights), str(names), source)
    photos = [str(path) for path in sorted(make_images(SMALL).glob("*.jpg"))[:_CALIBRATION]]
    quantize = ["--calibration", *photos, "--min-agreement=-1", "--output", str(model / "2")]
    subprocess.run([sys.executable, "-m", "pipeline.quantize", "--model", source, *quantize], check=True)
    return str(model)


def _loop(files: list[Path], path: str, precision: str) -> dict[str, float]:
    import openvino

    from pipeline.config import DetectConfig, ModelConfig
    from pipeline.detect.load_model import converted_model

    cv2.setNumThreads(1)
    cores = len(os.sched_getaffinity(0))
    prepared = converted_model(ModelConfig(path=path), DetectConfig(engine="openvino", precision=precision))
    graph, (height, width) = prepared.optimised, prepared.metadata.input_hw
    core = openvino.Core()
    hint = {"PERFORMANCE_HINT": "THROUGHPUT", "INFERENCE_PRECISION_HINT": _HINTS[precision]}
    model = core.read_model(graph.xml.tobytes(), openvino.Tensor(graph.weights))
    requests = openvino.AsyncInferQueue(core.compile_model(model, "CPU", {**hint, "INFERENCE_NUM_THREADS": cores}))
    kept: list[Any] = []
    requests.set_callback(lambda request, _: kept.append(request.get_output_tensor(0).data.copy()))
    requests.start_async({0: np.zeros((1, height, width, 3), np.uint8)})
    requests.wait_all()

    def decoded(file: Path) -> np.ndarray:
        pixels = cv2.imdecode(np.frombuffer(file.read_bytes(), np.uint8), cv2.IMREAD_COLOR_RGB)
        return cv2.resize(pixels, (width, height))[None]

    began, cpu = time.monotonic(), time.process_time()
    with ThreadPoolExecutor(cores) as pool:
        for pixels in pool.map(decoded, files):
            requests.start_async({0: pixels})
    requests.wait_all()
    seconds = time.monotonic() - began
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"rate": len(files) / seconds, "cpu_ms": (time.process_time() - cpu) * 1e3 / len(files), "peak_mb": peak_mb}


def _run_loop(images: Path, model: str, precision: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.openvino_loop", "--loop", str(images), "--precision", precision]
    command += ["--model", model]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _job(images: Path, scratch: Path, model: str, engine: str, precision: str, threshold: float) -> dict[str, float]:
    """One job; its CPU time is that of the whole process, with its start."""
    output = tempfile.mkdtemp(dir=scratch)
    settings = ["--engine", engine, "--precision", precision, "--runner", "DirectRunner", "--model", model]
    settings += ["--score-threshold", str(threshold)]
    command = [sys.executable, "-m", "pipeline.run", "--input", str(images), "--output", output, *settings]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, code, used = os.wait4(process.pid, 0)
    process.returncode = code
    summary = json.loads(Path(output, "summary.json").read_text())
    rate = summary["images_per_second"]
    images_done = summary["images"]["detected"]
    first_row_s = summary["startup_seconds"] + summary["latency_ms"]["p50"] / 1e3
    cpu_ms = (used.ru_utime + used.ru_stime) * 1e3 / images_done
    objects = summary["detections"] / images_done
    return {"rate": rate, "cpu_ms": cpu_ms, "peak_mb": used.ru_maxrss / 1e3, "first_row_s": first_row_s, "objects": objects}


def _print_table(found: dict[str, list[dict[str, float]]]) -> None:
    for name, runs in found.items():
        of_loop, of_tensorflow = (
            statistics.median(run["rate"] / other["rate"] for run, other in zip(runs, found[reference], strict=True))
            for reference in (f"{_LOOP}, {name.rpartition(', ')[2]}", "tensorflow, float32")
        )
        medians = {key: round(statistics.median(run[key] for run in runs), 1) for key in runs[0]}
        print(f"{name:24} {of_loop:5.2f} of the loop {of_tensorflow:5.2f} of tensorflow float32  {medians}")


if __name__ == "__main__":
    main()
