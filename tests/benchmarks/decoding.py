"""What decoding one image takes of this thread's time, by format; of the checkout that it runs in.

    cd CHECKOUT && python OTHER/tests/benchmarks/decoding.py --seconds 2

Prints milliseconds an image, the least and the median of all calls, so that two checkouts can be alternated and compared.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import time

import cv2
import numpy as np
from PIL import Image

sys.path.insert(0, os.getcwd())
from pipeline.detect.decode import decode_image

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each format and size")
    args = parser.parse_args()
    noise = np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)
    for size_wh in ((640, 480), (4000, 3000)):
        image = Image.fromarray(cv2.resize(noise, size_wh, interpolation=cv2.INTER_CUBIC))
        for name in _FORMATS:
            file = io.BytesIO()
            image.save(file, name)
            taken = _times_ms(file.getvalue(), args.seconds)
            print(f"{name:9s} {size_wh[0]}x{size_wh[1]}  least {taken[0]:8.3f} ms  median {statistics.median(taken):8.3f} ms")


def _times_ms(content: bytes, seconds: float) -> list[float]:
    decode_image(content, 1e8)
    taken, end = [], time.monotonic() + seconds
    while not taken or time.monotonic() < end:
        started = time.perf_counter()
        decode_image(content, 1e8)
        taken.append(1e3 * (time.perf_counter() - started))
    return sorted(taken)


if __name__ == "__main__":
    main()
