"""Contender: Daft. Its own download, decode and resize expressions, and the model in a class UDF.

https://docs.daft.ai/en/stable/custom-code/cls/ and https://docs.daft.ai/en/stable/modalities/images/

`--skip-bad` sets `on_error="null"`: bad images come as nulls.
"""

from __future__ import annotations

import os
from typing import Any

os.environ |= {"DAFT_PROGRESS_BAR": "0", "DO_NOT_TRACK": "true"}  # read when it is imported
import daft
import numpy as np
from daft import DataType, col

from tests.benchmarks import work


@daft.cls(max_concurrency=1)
class Detect:
    """The UDF: columns of paths, pixels and sizes to a column of rows."""

    def __init__(self, model: str) -> None:
        with work.loading():
            self._detect = work.load(model)

    @daft.method.batch(return_dtype=DataType.string(), batch_size=work.BATCH)
    def rows(self, path: Any, image: Any, width: Any, height: Any) -> list[str | None]:
        columns = zip(*(column.to_pylist() for column in (path, image, width, height)), strict=True)
        found: list[str | None] = [None] * len(path)
        good = [(index, *values) for index, values in enumerate(columns) if values[1] is not None]
        if good:
            answer = self._detect(np.stack([np.asarray(image) for _, _, image, _, _ in good]))
            for place, (index, uri, _, wide, high) in enumerate(good):
                found[index] = work.row(uri, wide, high, answer, place)
        return found


def main() -> None:
    """Runs it."""
    args = work.parser(__doc__).parse_args()
    import tensorflow  # noqa: F401  Daft imports it where it is installed; that is start-up, not work

    on_error = "null" if args.skip_bad else "raise"
    detect = Detect(args.model)
    with work.measured(), (args.output / "rows.jsonl").open("w", buffering=1) as sink:
        images = daft.from_glob_path(f"{args.images}/*")
        encoded = col("path").download(on_error=on_error)
        images = images.with_column("image", encoded.decode_image(mode="RGB", on_error=on_error))
        images = images.with_column("width", col("image").image_width()).with_column("height", col("image").image_height())
        images = images.with_column("image", col("image").resize(work.SIDE, work.SIDE))
        rows = images.with_column("row", detect.rows(col("path"), col("image"), col("width"), col("height")))
        for row in rows.select("row").iter_rows():
            if row["row"] is not None:
                sink.write(row["row"] + "\n")


if __name__ == "__main__":
    main()
