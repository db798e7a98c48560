"""Images of 100 megapixels in tiles: a job finds what they show within the memory that it may use, or says what they need."""

import contextlib
import io
import struct
import subprocess
import sys
import zlib

import cv2
import numpy as np
import psutil
import pytest
from PIL import Image

from tests.launch.jobs import rows_of

SIDE, TILE, MEMORY_MB = 10_000, 500, 2000
BOX = (4060, 7060, 4400, 7300)  # in one tile of 640 pixels, and in no other


def tiled_tiff(pixels: np.ndarray) -> bytes:
    """A TIFF in tiles, which Pillow and OpenCV do not write; of these RGB pixels, whose sides are multiples of the tile's."""
    (height, width, _), side = pixels.shape, range(0, len(pixels), TILE)
    parts = [zlib.compress(pixels[y : y + TILE, x : x + TILE].tobytes(), 1) for y in side for x in side]
    sizes = [*map(len, parts)]
    directory = 8, 8 + 2 + 12 * 11 + 4  # where it begins and ends; then come the values that do not fit into it
    at = [directory[1], directory[1] + 6, directory[1] + 6 + 4 * len(parts)]
    starts = (at[2] + 4 * len(parts) + np.cumsum([0, *sizes[:-1]])).tolist()
    # width, height, bits, deflated, RGB, three samples, side by side, width and height of a tile, where each is, how long
    entries = [(256, 1, width), (257, 1, height), (258, 3, at[0]), (259, 1, 8), (262, 1, 2), (277, 1, 3), (284, 1, 1)]
    entries += [(322, 1, TILE), (323, 1, TILE), (324, len(parts), at[1]), (325, len(parts), at[2])]
    kinds = {324: 4, 325: 4}
    packed = b"".join(struct.pack("<HHII", tag, kinds.get(tag, 3), count, value) for tag, count, value in entries)
    values = struct.pack("<3H", 8, 8, 8) + struct.pack(f"<{2 * len(parts)}I", *starts, *sizes)
    return struct.pack("<2sHIH", b"II", 42, directory[0], len(entries)) + packed + struct.pack("<I", 0) + values + b"".join(parts)


def header_of_jpeg2000() -> bytes:
    """A JPEG 2000 that says it has as many pixels; nobody decodes them."""
    file = io.BytesIO()
    Image.new("RGB", (200, 100)).save(file, "JPEG2000")
    return file.getvalue().replace(struct.pack(">II", 100, 200), struct.pack(">II", SIDE, SIDE), 1)


def peak_mb(command: list[str]) -> float:
    """Runs a command; the most memory of its processes together, pages that they share counted once."""
    peak = 0.0
    with subprocess.Popen(command) as process:
        root = psutil.Process(process.pid)
        while process.poll() is None:
            held = 0.0
            for each in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):  # it has ended
                    held += each.memory_full_info().pss / 1e6
            peak = max(peak, held)
    return peak


@pytest.mark.matrix
def test_100_megapixels_fit_into_2000_mb_and_what_does_not_says_so(tmp_path, bright_model):
    """A JPEG, and a TIFF in tiles. JPEG 2000 takes more; the message says how much."""
    pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
    pixels[BOX[1] : BOX[3], BOX[0] : BOX[2]] = 255
    (tmp_path / "in").mkdir()
    cv2.imwrite(str(tmp_path / "in" / "a.jpg"), pixels)
    (tmp_path / "in" / "b.tif").write_bytes(tiled_tiff(pixels))
    (tmp_path / "in" / "c.jp2").write_bytes(header_of_jpeg2000())
    del pixels
    flags = ["--input", f"{tmp_path}/in", "--output", f"{tmp_path}/out", "--model", bright_model, "--tiles", "640"]
    flags += ["--tile-overlap", "0", "--memory-mb", str(MEMORY_MB), "--max-megapixels", "200"]
    assert peak_mb([sys.executable, "-m", "pipeline.run", *flags]) < MEMORY_MB
    for row in rows_of(tmp_path / "out"):
        (found,) = row["detections"]
        assert (row["image"]["width"], row["image"]["height"]) == (SIDE, SIDE)
        assert np.abs(np.subtract(found["box_xyxy"], BOX)).max() < 640 / 96
    assert len(rows_of(tmp_path / "out")) == 2
    (dead,) = rows_of(tmp_path / "out", "dead_letters")
    assert dead["reason"] == "no_room" and "got 10000 x 10000 pixels that take 2050 MB to decode" in dead["message"]
