"""Contender: Ray Data. Files are read by its tasks; an actor for each core decodes and detects, with one TensorFlow thread.

The fastest of three plans that were tried on two cores (decode tasks with one actor of two threads, and `read_images`, were
slower). Actors ask for half a core, so that the reading tasks can be scheduled beside them.
https://docs.ray.io/en/latest/data/batch_inference.html

`--skip-bad` sets `max_errored_blocks`: Ray Data leaves out whole blocks.
https://docs.ray.io/en/latest/data/api/doc/ray.data.DataContext.html
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import psutil
import ray

from tests.benchmarks import work


class Detect:
    """An actor: decodes and detects a batch of files."""

    def __init__(self, model: str):
        with work.loading(since=psutil.Process().create_time()):
            import cv2

            cv2.setNumThreads(1)
            self._cv2, self._detect = cv2, work.load(model, threads=1)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        images = [self._cv2.imdecode(np.frombuffer(b, np.uint8), self._cv2.IMREAD_COLOR_RGB) for b in batch["bytes"]]
        answer = self._detect(np.stack([self._cv2.resize(image, (work.SIDE, work.SIDE)) for image in images]))
        rows = [
            work.row(str(path), image.shape[1], image.shape[0], answer, index)
            for index, (path, image) in enumerate(zip(batch["path"], images, strict=True))
        ]
        return {"row": np.array(rows, dtype=object)}


def main() -> None:
    """Runs it."""
    args = work.parser(__doc__).parse_args()
    os.environ |= {"RAY_DATA_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": os.getcwd()}  # its processes inherit them
    ray.init(include_dashboard=False, logging_level="warning", log_to_driver=False)
    if args.skip_bad:
        ray.data.DataContext.get_current().max_errored_blocks = -1
    files = [str(file.resolve()) for file in sorted(args.images.iterdir())]
    model = args.model if args.model == work.FREE else os.path.abspath(args.model)
    actors = {"concurrency": work.CORES, "num_cpus": 0.5, "fn_constructor_args": (model,)}
    with work.measured(), (args.output / "rows.jsonl").open("w") as sink:
        detected = ray.data.read_binary_files(files, include_paths=True).map_batches(Detect, batch_size=work.BATCH, **actors)
        for batch in detected.iter_batches(batch_size=None):
            sink.writelines(line + "\n" for line in batch["row"])
            sink.flush()
    ray.shutdown()


if __name__ == "__main__":
    main()
