"""Contender: Ray Data. Files are read by its tasks; two actors decode and detect, each with one TensorFlow thread.

The fastest of three plans that were tried on two cores (decode tasks with one actor of two threads, and `read_images`, were
slower). Actors ask for half a core, so that the reading tasks can be scheduled beside them.
https://docs.ray.io/en/latest/data/batch_inference.html

`--skip-bad` sets `max_errored_blocks`, which is what it has against bad images: it leaves out whole blocks.
https://docs.ray.io/en/latest/data/api/doc/ray.data.DataContext.html
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ray

from tests.benchmarks import work

_BATCH = 8


class Detect:
    """An actor: decodes and detects a batch of files."""

    def __init__(self, model: str):
        started_at = work.process_started_at()  # its start belongs to the actor's
        import cv2
        import tensorflow as tf

        cv2.setNumThreads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)
        self._cv2, self._tf = cv2, tf
        self._model = tf.saved_model.load(model)
        for _ in range(2):
            self._infer(tf.zeros((_BATCH, work.SIDE, work.SIDE, 3)))
        work.note_load(started_at)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        images = [self._cv2.imdecode(np.frombuffer(b, np.uint8), self._cv2.IMREAD_COLOR_RGB) for b in batch["bytes"]]
        pixels = np.stack([self._cv2.resize(image, (work.SIDE, work.SIDE)) for image in images])
        answer = self._infer(self._tf.constant(pixels.astype(np.float32) / 255.0))
        rows = [
            work.row(str(path), image.shape[1], image.shape[0], answer, index)
            for index, (path, image) in enumerate(zip(batch["path"], images, strict=True))
        ]
        return {"row": np.array(rows, dtype=object)}

    def _infer(self, images: Any) -> dict[str, Any]:
        return {name: value.numpy() for name, value in self._model.signatures["serving_default"](images=images).items()}


def main() -> None:
    """Runs it."""
    flags = work.parser(__doc__)
    flags.add_argument("--skip-bad", action="store_true")
    args = flags.parse_args()
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    measured = work.Work()
    variables = {**measured.environment, "PYTHONPATH": os.getcwd(), "TF_CPP_MIN_LOG_LEVEL": "3"}
    ray.init(include_dashboard=False, logging_level="warning", log_to_driver=False, runtime_env={"env_vars": variables})
    if args.skip_bad:
        ray.data.DataContext.get_current().max_errored_blocks = -1
    files = [str(file.resolve()) for file in work.files(args.images)]
    actors = {"concurrency": 2, "num_cpus": 0.5, "fn_constructor_args": (os.path.abspath(args.model),)}
    with measured, (args.output / "rows.jsonl").open("w") as sink:
        detected = ray.data.read_binary_files(files, include_paths=True).map_batches(Detect, batch_size=_BATCH, **actors)
        for batch in detected.iter_batches(batch_size=None):
            sink.writelines(line + "\n" for line in batch["row"])
    ray.shutdown()


if __name__ == "__main__":
    main()
