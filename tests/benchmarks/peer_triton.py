"""Contender: NVIDIA's Triton server over its Python interface, PyTriton, which brings the server's program. On a CPU.

The server batches requests of one image each (dynamic batching, 5 ms), decodes and detects with TensorFlow; 16 threads of
another process, as a client elsewhere would, send bytes and wait for answers. Server and client share the cores.

https://triton-inference-server.github.io/pytriton/latest/binding_models/ and .../clients/
A request that fails raises in its client; an image that cannot be decoded fails all requests of its batch. The client notes them.
"""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cv2
import numpy as np

from tests.benchmarks import work

_CLIENTS, _MOST_IN_BATCH, _DELAY_US = 16, 32, 5000
_NAME = "detector"


def main() -> None:
    """Runs the server, and the client in a process of its own; or, with `--url`, the client."""
    flags = work.parser(__doc__)
    flags.add_argument("--url", default="", help="internal: be the client of this server")
    args = flags.parse_args()
    if args.url:
        _send(args)
    else:
        _serve(args)


def _serve(args: Any) -> None:
    from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig

    http, grpc, metrics = _free_ports(3)
    places = TritonConfig(
        http_port=http, grpc_port=grpc, metrics_port=metrics, http_address="127.0.0.1", grpc_address="127.0.0.1"
    )
    batching = ModelConfig(max_batch_size=_MOST_IN_BATCH, batcher=DynamicBatcher(max_queue_delay_microseconds=_DELAY_US))
    outputs = [("boxes", np.float32, (100, 4)), ("scores", np.float32, (100,)), ("classes", np.float32, (100,))]
    outputs += [("num", np.int32, (1,)), ("wh", np.int32, (2,))]
    with Triton(config=places) as triton:
        triton.bind(
            _NAME,
            infer_func=_inference(args.model),
            inputs=[Tensor(name="image_bytes", dtype=bytes, shape=(1,))],
            outputs=[Tensor(name=name, dtype=dtype, shape=shape) for name, dtype, shape in outputs],
            config=batching,
        )
        triton.run()
        subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.peer_triton", *sys.argv[1:], "--url", f"grpc://127.0.0.1:{grpc}"], check=True
        )


def _inference(model: str) -> Any:
    import tensorflow as tf
    from pytriton.decorators import batch

    cv2.setNumThreads(1)
    loaded = tf.saved_model.load(model)
    signature = loaded.signatures["serving_default"]
    decoders = ThreadPoolExecutor(2)

    def decode(content: bytes) -> tuple[np.ndarray, tuple[int, int]]:
        image = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)
        return cv2.resize(image, (work.SIDE, work.SIDE)), (image.shape[1], image.shape[0])

    @batch
    def infer(image_bytes: np.ndarray) -> dict[str, np.ndarray]:
        decoded = list(decoders.map(decode, image_bytes[:, 0]))
        pixels = np.stack([one for one, _ in decoded]).astype(np.float32) / 255.0
        answer = {name: value.numpy() for name, value in signature(images=tf.constant(pixels)).items()}
        return answer | {"num": answer["num"][:, None], "wh": np.array([wh for _, wh in decoded], np.int32)}

    infer.model = loaded  # it owns the variables
    for size in (1, 8, _MOST_IN_BATCH):
        signature(images=tf.zeros((size, work.SIDE, work.SIDE, 3)))
    return infer


def _send(args: Any) -> None:
    from pytriton.client import ModelClient
    from pytriton.client.exceptions import PyTritonClientError

    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for file in work.files(args.images):
        waiting.put(file)
    rows: list[str] = []
    failed: list[str] = []
    ready = threading.Barrier(_CLIENTS + 1)

    def ask() -> None:
        with ModelClient(args.url, _NAME, init_timeout_s=60, inference_timeout_s=120) as client:
            ready.wait()
            while True:
                try:
                    file = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    answer = client.infer_sample(np.array([file.read_bytes()], dtype=object))
                except PyTritonClientError:
                    failed.append(str(file))
                    continue
                width, height = answer["wh"].tolist()
                one = {name: value[None] for name, value in answer.items()} | {"num": answer["num"]}
                rows.append(work.row(str(file), width, height, one, 0))

    threads = [threading.Thread(target=ask) for _ in range(_CLIENTS)]
    measured = work.Work()
    for thread in threads:
        thread.start()
    ready.wait()
    with measured:
        for thread in threads:
            thread.join()
        (args.output / "rows.jsonl").write_text("".join(row + "\n" for row in rows))
        work.note_failures(args.output, failed)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    main()
