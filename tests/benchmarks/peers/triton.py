"""Contender: NVIDIA's Triton server over its Python interface, PyTriton, which brings the server's program. On a CPU.

The server batches requests of one image each (dynamic batching, 5 ms), decodes and detects with TensorFlow; 16 threads of
another process, as a client elsewhere would, send bytes and wait for answers. Server and client share the cores.

https://triton-inference-server.github.io/pytriton/latest/binding_models/ and .../clients/
A request that fails raises in its client, which goes on; an image that cannot be decoded fails all requests of its batch.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
    (_send if args.url else _serve)(args)


def _serve(args: Any) -> None:
    from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig

    http, grpc, metrics = _free_ports(3)
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics}
    batching = ModelConfig(max_batch_size=_MOST_IN_BATCH, batcher=DynamicBatcher(max_queue_delay_microseconds=_DELAY_US))
    outputs = [("boxes", np.float32, (100, 4)), ("scores", np.float32, (100,)), ("classes", np.float32, (100,))]
    outputs += [("num", np.int32, (1,)), ("wh", np.int32, (2,))]
    with Triton(config=TritonConfig(http_address="127.0.0.1", grpc_address="127.0.0.1", **ports)) as triton:
        triton.bind(
            _NAME,
            infer_func=_inference(args.model),
            inputs=[Tensor(name="image_bytes", dtype=bytes, shape=(1,))],
            outputs=[Tensor(name=name, dtype=dtype, shape=shape) for name, dtype, shape in outputs],
            config=batching,
        )
        triton.run()
        client = [sys.executable, "-m", "tests.benchmarks.peers.triton", *sys.argv[1:], "--url", f"grpc://127.0.0.1:{grpc}"]
        subprocess.run(client, check=True)


def _inference(model: str) -> Any:
    from pytriton.decorators import batch

    cv2.setNumThreads(1)
    detect, decoders = work.load(model), ThreadPoolExecutor(work.CORES)

    def decode(content: bytes) -> tuple[np.ndarray, tuple[int, int]]:
        image = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)
        return cv2.resize(image, (work.SIDE, work.SIDE)), (image.shape[1], image.shape[0])

    @batch
    def infer(image_bytes: np.ndarray) -> dict[str, Any]:
        decoded = list(decoders.map(decode, image_bytes[:, 0]))
        answer = detect(np.stack([one for one, _ in decoded]))
        return {**answer, "num": answer["num"][:, None], "wh": np.array([wh for _, wh in decoded], np.int32)}

    return infer


def _send(args: Any) -> None:
    from pytriton.client import ModelClient
    from pytriton.client.exceptions import PyTritonClientError

    clients = threading.local()

    def connect() -> None:
        clients.own = ModelClient(args.url, _NAME, init_timeout_s=60, inference_timeout_s=120)
        clients.own.__enter__()

    def ask(file: Path) -> str:
        with contextlib.suppress(PyTritonClientError):
            answer = clients.own.infer_sample(np.array([file.read_bytes()], dtype=object))
            one = {name: value[None] for name, value in answer.items()} | {"num": answer["num"]}
            return work.row(str(file), *answer["wh"].tolist(), one, 0) + "\n"
        return ""

    files = sorted(args.images.iterdir())
    with ThreadPoolExecutor(_CLIENTS, initializer=connect) as pool:
        list(pool.map(lambda _: ask(files[0]), range(2 * _CLIENTS)))  # connects
        with work.measured(), (args.output / "rows.jsonl").open("w", buffering=1) as sink:
            for row in pool.map(ask, files):
                sink.write(row)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


if __name__ == "__main__":
    main()
