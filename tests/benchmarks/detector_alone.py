"""Contender: the pipeline's detector without Beam and without rows, over files. What is slower than it pays for Beam and rows.

python -m tests.benchmarks.detector_alone --images .bench/images --model .bench/model --output .bench/out/alone
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.config import load_config
from pipeline.detect.detect_objects import detect_images
from pipeline.detect.load_detector import load_detector
from pipeline.records import EncodedImage, ImageRef
from tests.benchmarks import work

_CONFIG = "tests/benchmarks/ours.yaml"


def main() -> None:
    """Runs it."""
    flags = work.parser(__doc__)
    flags.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    args = flags.parse_args()
    config = load_config([_CONFIG], {"model.path": args.model, "detect.precision": args.precision})
    detector = load_detector(config.model, config.detect)
    with work.Work():
        found = sum(1 for _ in detect_images(_read(work.files(args.images)), detector, config.detect))
    (args.output / "detections.jsonl").write_text("{}\n" * found)  # as many rows as images
    detector.close()


def _read(files: list[Path]) -> Iterator[EncodedImage]:
    for file in files:
        yield EncodedImage(ImageRef(str(file)), file.read_bytes())


if __name__ == "__main__":
    main()
