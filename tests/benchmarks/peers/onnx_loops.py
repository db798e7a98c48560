"""Contenders: OpenVINO's and ONNX Runtime's own loops, over the same network in ONNX, with OpenCV beside them.

OpenVINO: `AsyncInferQueue` with as many requests as the `THROUGHPUT` hint wants, images of batch 1, and threads that decode:
https://docs.openvino.ai/2026/openvino-workflow/running-inference/optimize-inference/optimizing-throughput.html
https://docs.openvino.ai/2026/notebooks/async-api-with-output.html

ONNX Runtime: one thread for each core decodes a batch of 8 and calls `session.run`, with one intra-op thread each.
https://onnxruntime.ai/docs/performance/tune-performance/threading.html

Both networks end before suppression, which OpenCV does (`NMSBoxesBatched`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from tests.benchmarks import work

_BATCH = 8
_LEAST_SCORE, _MOST_IOU, _MOST_BOXES = 0.25, 0.45, 100  # those of the SavedModel's suppression

Write = Callable[[str], None]


def main() -> None:
    """Runs one of them; `--model` is the ONNX file."""
    flags = work.parser(__doc__)
    flags.add_argument("--engine", choices=["openvino", "onnxruntime"], required=True)
    args = flags.parse_args()
    cv2.setNumThreads(1)
    run = (_openvino if args.engine == "openvino" else _onnxruntime)(args.model)
    lock = threading.Lock()
    with work.measured(), (args.output / "rows.jsonl").open("w", buffering=1) as sink:

        def write(row: str) -> None:
            with lock:
                sink.write(row + "\n")

        run(sorted(args.images.iterdir()), write)


def _openvino(model: str) -> Callable[[Sequence[Path], Write], None]:
    import openvino

    core = openvino.Core()
    network = core.read_model(model)
    network.reshape([1, work.SIDE, work.SIDE, 3])
    # https://docs.openvino.ai/2026/openvino-workflow/running-inference/optimize-inference/optimize-preprocessing.html
    steps = openvino.preprocess.PrePostProcessor(network)
    steps.input().tensor().set_element_type(openvino.Type.u8)
    steps.input().preprocess().convert_element_type(openvino.Type.f32).scale(255.0)
    hint = {"PERFORMANCE_HINT": "THROUGHPUT", "INFERENCE_PRECISION_HINT": "f32"}
    queue = openvino.AsyncInferQueue(core.compile_model(steps.build(), "CPU", hint))
    for _ in range(len(queue)):
        queue.start_async({0: np.zeros((1, work.SIDE, work.SIDE, 3), np.uint8)})
    queue.wait_all()

    def run(files: Sequence[Path], write: Write) -> None:
        def keep(request: Any, image: tuple[Path, int, int]) -> None:
            write(_row(*image, request.get_tensor("boxes").data[0], request.get_tensor("scores").data[0]))

        queue.set_callback(keep)
        with ThreadPoolExecutor(work.CORES) as pool:
            for pixels, *image in pool.map(_decode, files):
                queue.start_async({0: pixels[None]}, tuple(image))
        queue.wait_all()

    return run


def _onnxruntime(model: str) -> Callable[[Sequence[Path], Write], None]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    for _ in range(2):
        session.run(["boxes", "scores"], {"images": np.zeros((_BATCH, work.SIDE, work.SIDE, 3), np.float32)})

    def detect(files: Sequence[Path], write: Write) -> None:
        decoded = [_decode(file) for file in files]
        pixels = np.stack([pixels for pixels, *_ in decoded]).astype(np.float32) * np.float32(1 / 255.0)
        boxes, scores = session.run(["boxes", "scores"], {"images": pixels})
        for (_, *image), its_boxes, its_scores in zip(decoded, boxes, scores, strict=True):
            write(_row(*image, its_boxes, its_scores))

    def run(files: Sequence[Path], write: Write) -> None:
        batches = [files[start : start + _BATCH] for start in range(0, len(files), _BATCH)]
        with ThreadPoolExecutor(work.CORES) as pool:
            for _ in pool.map(lambda batch: detect(batch, write), batches):
                pass

    return run


def _decode(file: Path) -> tuple[np.ndarray, Path, int, int]:
    """A file -> pixels uint8 (416, 416, 3), and its path, width and height."""
    image = cv2.imread(str(file), cv2.IMREAD_COLOR_RGB)
    return cv2.resize(image, (work.SIDE, work.SIDE)), file, image.shape[1], image.shape[0]


def _row(file: Path, width: int, height: int, boxes: np.ndarray, scores: np.ndarray) -> str:
    """Boxes (N, 4) yxyx in 0..1 and scores (N, 80) before suppression -> the image's row."""
    places, classes = np.nonzero(scores > _LEAST_SCORE)
    found, confidences = boxes[places], scores[places, classes]
    corner_and_size = np.concatenate([found[:, :2], found[:, 2:] - found[:, :2]], 1)
    suppress = cv2.dnn.NMSBoxesBatched
    kept = np.asarray(suppress(corner_and_size.tolist(), confidences.tolist(), classes.tolist(), _LEAST_SCORE, _MOST_IOU), int)
    kept = kept[np.argsort(-confidences[kept], kind="stable")][:_MOST_BOXES]
    answer = {"num": [len(kept)], "boxes": found[None, kept].clip(0, 1), "scores": confidences[None, kept]}
    return work.row(str(file), width, height, answer | {"classes": classes[None, kept]}, 0)


if __name__ == "__main__":
    main()
