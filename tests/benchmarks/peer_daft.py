"""Contender: Daft. Its own download, decode and resize expressions, and the model in a class UDF of batches of 8.

https://docs.daft.ai/en/stable/custom-code/cls/ and https://docs.daft.ai/en/stable/modalities/images/

`--skip-bad` sets `on_error="null"`, which is what it has against bad images: they come as nulls, and are noted.
"""

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


@daft.cls(max_concurrency=1)
class Detect:
    """The UDF: columns of paths, pixels and sizes to a column of rows."""

    def __init__(self, model: str) -> None:
        started_at = time.time()
        self._model = tf.saved_model.load(model)
        for _ in range(2):
            self._infer(tf.zeros((_BATCH, work.SIDE, work.SIDE, 3)))
        work.note_load(started_at)

    @daft.method.batch(return_dtype=DataType.string(), batch_size=_BATCH)
    def rows(self, path: Any, image: Any, width: Any, height: Any) -> list[str | None]:
        columns = zip(*(column.to_pylist() for column in (path, image, width, height)), strict=True)
        found: list[str | None] = [None] * len(path)
        good = [(index, *values) for index, values in enumerate(columns) if values[1] is not None]
        if good:
            pixels = np.stack([np.asarray(image) for _, _, image, _, _ in good]).astype(np.float32) / 255.0
            answer = self._infer(tf.constant(pixels))
            for place, (index, uri, _, wide, high) in enumerate(good):
                found[index] = work.row(uri, wide, high, answer, place)
        return found

    def _infer(self, images: Any) -> dict[str, Any]:
        return {name: value.numpy() for name, value in self._model.signatures["serving_default"](images=images).items()}


def main() -> None:
    """Runs it."""
    flags = work.parser(__doc__)
    flags.add_argument("--skip-bad", action="store_true")
    args = flags.parse_args()
    on_error = "null" if args.skip_bad else "raise"
    detect = Detect(args.model)
    with work.Work(), (args.output / "rows.jsonl").open("w") as sink:
        images = daft.from_glob_path(f"{args.images}/*")
        encoded = col("path").download(on_error=on_error)
        images = images.with_column("image", encoded.decode_image(mode="RGB", on_error=on_error))
        images = images.with_column("width", col("image").image_width()).with_column("height", col("image").image_height())
        images = images.with_column("image", col("image").resize(work.SIDE, work.SIDE))
        rows = images.with_column("row", detect.rows(col("path"), col("image"), col("width"), col("height")))
        for row in rows.select("path", "row").iter_rows():
            if row["row"] is None:
                work.note_failures(args.output, [row["path"]])
            else:
                sink.write(row["row"] + "\n")


if __name__ == "__main__":
    main()
