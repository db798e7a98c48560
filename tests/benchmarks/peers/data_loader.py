"""Contender: PyTorch's DataLoader, whose workers, one for each core, read, decode and resize, before the model in TensorFlow.

https://docs.pytorch.org/docs/stable/data.html, with a map-style dataset, its own batches, and the default of two batches ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from torch.utils.data import DataLoader, Dataset

from tests.benchmarks import work


class Images(Dataset):
    """Places of files, their pixels `(416, 416, 3) uint8`, and their widths and heights."""

    def __init__(self, files: Sequence[Path]):
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, place: int) -> tuple[int, np.ndarray, int, int]:
        image = cv2.imread(str(self._files[place]), cv2.IMREAD_COLOR_RGB)
        return place, cv2.resize(image, (work.SIDE, work.SIDE)), image.shape[1], image.shape[0]


def main() -> None:
    """Runs it."""
    args = work.parser(__doc__).parse_args()
    cv2.setNumThreads(1)
    detect, files = work.load(args.model), sorted(args.images.iterdir())
    with work.measured(), (args.output / "rows.jsonl").open("w") as sink:
        for places, pixels, *sizes in DataLoader(Images(files), batch_size=work.BATCH, num_workers=work.CORES):
            answer = detect(pixels.numpy())
            for index, (place, width, height) in enumerate(zip(places.tolist(), *(size.tolist() for size in sizes), strict=True)):
                sink.write(work.row(str(files[place]), width, height, answer, index) + "\n")
            sink.flush()


if __name__ == "__main__":
    main()
