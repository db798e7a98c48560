"""Serves the bundled detector's candidates on NVIDIA's Triton, through PyTriton. Runs in an environment that has it.

<python> tests/triton_server.py <SavedModel> <grpc port> <http port>
"""

import sys

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from tests.without_keras import tf


def main(model: str, grpc_port: str, http_port: str) -> None:
    """Serves until it is ended."""
    loaded = tf.saved_model.load(model)
    candidates = loaded.signatures["candidates"]

    @batch
    def infer(images: np.ndarray) -> dict[str, np.ndarray]:
        return {name: found.numpy() for name, found in candidates(images=tf.constant(images)).items()}

    places = TritonConfig(grpc_port=int(grpc_port), http_port=int(http_port), allow_metrics=False)
    with Triton(config=places) as triton:
        triton.bind(
            "toy",
            infer_func=infer,
            inputs=[Tensor(name="images", dtype=np.uint8, shape=(320, 320, 3))],
            outputs=[
                Tensor(name="boxes", dtype=np.float32, shape=(-1, 4)),
                Tensor(name="scores", dtype=np.float32, shape=(-1, 10)),
            ],
            config=ModelConfig(max_batch_size=16, batcher=DynamicBatcher(max_queue_delay_microseconds=1000)),
        )
        triton.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
