"""Contender: Daft. Its own download, decode and resize expressions, and the model in a class UDF of batches of 8."""

from __future__ import annotations

import os
import time
from typing import Any

os.environ |= {"DAFT_PROGRESS_BAR": "0", "DO_NOT_TRACK": "true"}  # read when it is imported
import daft
import numpy as np
import tensorflow as tf
from daft import DataType, col

from tests.benchmarks import work

_BATCH = 8
_MODEL = "BENCH_MODEL"  # environment variable: the UDF may be made in another process


@daft.udf(return_dtype=DataType.string(), batch_size=_BATCH, concurrency=1)
class Detect:
    """The UDF: columns of paths, pixels and sizes to a column of rows."""

    def __init__(self) -> None:
        started_at = time.time()
        self._model = tf.saved_model.load(os.environ[_MODEL])
        for _ in range(2):
            self._infer(tf.zeros((_BATCH, work.SIDE, work.SIDE, 3)))
        work.note_load(started_at)

    def __call__(self, path: Any, image: Any, width: Any, height: Any) -> list[str]:
        pixels = np.stack([np.asarray(one) for one in image.to_pylist()]).astype(np.float32) / 255.0
        answer = self._infer(tf.constant(pixels))
        sizes = zip(path.to_pylist(), width.to_pylist(), height.to_pylist(), strict=True)
        return [work.row(uri, wide, high, answer, index) for index, (uri, wide, high) in enumerate(sizes)]

    def _infer(self, images: Any) -> dict[str, Any]:
        return {name: value.numpy() for name, value in self._model.signatures["serving_default"](images=images).items()}


def main() -> None:
    """Runs it."""
    args = work.parser(__doc__).parse_args()
    os.environ[_MODEL] = args.model
    with work.Work(), (args.output / "rows.jsonl").open("w") as sink:
        images = daft.from_glob_path(f"{args.images}/*.jpg")
        images = images.with_column("image", col("path").download().decode_image(mode="RGB"))
        images = images.with_column("width", col("image").image_width()).with_column("height", col("image").image_height())
        images = images.with_column("image", col("image").resize(work.SIDE, work.SIDE))
        rows = images.with_column("row", Detect(col("path"), col("image"), col("width"), col("height"))).select("row")
        sink.writelines(row["row"] + "\n" for row in rows.iter_rows())


if __name__ == "__main__":
    main()
