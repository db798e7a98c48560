"""What is refused, and why: by pixels, on the header alone, and by what is damaged."""

import struct
import zlib

import cv2
import numpy as np
import pytest

from pipeline.failures import REASONS, ImageError
from pipeline.feed.decode import decode_image
from tests import hostile_images
from tests.feed.test_decode import NOISE, SMOOTH, encoded, refusal
from tests.hostile_images import png_chunk

TEXT_BOMB = 2 * png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2 << 20)))  # Pillow refuses the whole file for it
SQUARE = cv2.resize(NOISE, (800, 800))
JPEG, PROGRESSIVE = (encoded(SQUARE, "JPEG", progressive=progressive) for progressive in (False, True))
OF_OPENCV = hostile_images.png((800, 800), 1, 0, zlib.compress(bytes(101 * 800)), before=TEXT_BOMB)


@pytest.mark.parametrize(
    ("content", "needed", "least_pixels"),
    [
        pytest.param(encoded(SQUARE), None, 640_000, id="png"),
        pytest.param(JPEG, (50, 50), 10_000, id="jpeg counts after scaling"),
        pytest.param(JPEG, None, 640_000, id="jpeg at full scale"),
        pytest.param(PROGRESSIVE, (50, 50), 640_000, id="progressive jpeg holds all coefficients"),
        pytest.param(OF_OPENCV, None, 640_000, id="png that only opencv reads"),
    ],
)
def test_the_limit_is_exact_and_counts_the_pixels_that_decoding_holds(content, needed, least_pixels):
    needed_wh = needed and (lambda _: needed)
    decode_image(content, least_pixels, needed_wh)
    with pytest.raises(ImageError, match="max_megapixels") as caught:
        decode_image(content, least_pixels - 1, needed_wh)
    assert caught.value.reason == "too_large"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(encoded(NOISE), id="png"),
        pytest.param(encoded(NOISE, "BMP"), id="bmp"),
        pytest.param(b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 60, 40, 1, 24), id="bmp of OS/2"),
        pytest.param(hostile_images.bmp((60, -40)), id="bmp from the top"),
        pytest.param(cv2.imencode(".hdr", NOISE.astype(np.float32))[1].tobytes(), id="radiance"),
        pytest.param(encoded(NOISE, "TIFF"), id="tiff"),
        pytest.param(encoded(NOISE, "JPEG2000"), id="jpeg 2000"),
    ],
)
def test_the_declared_size_is_read_without_decoding(content):
    with pytest.raises(ImageError, match="got 60 x 40 pixels"):
        decode_image(content, 0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"", "empty", id="zero bytes"),
        pytest.param(b"this is text", "not_an_image", id="text"),
        pytest.param(b"%PDF-1.7\n" + bytes(500), "not_an_image", id="pdf"),
        pytest.param(bytes(5000), "not_an_image", id="zeros"),
        pytest.param(encoded(NOISE, "JPEG")[:-300], "truncated", id="truncated jpeg"),
        pytest.param(encoded(NOISE)[:-300], "truncated", id="truncated png"),
        pytest.param(encoded(NOISE, "JPEG")[:3], "not_an_image", id="jpeg marker only"),
        pytest.param(encoded(NOISE)[:20], "corrupt", id="cut within the header"),
        pytest.param(b"II*\0\xff\xff\xff\xff", "corrupt", id="cut tiff"),
        pytest.param(b"#?RADIANCE\n\n", "corrupt", id="cut radiance"),
        pytest.param(b"#?RGBE\n\n+X 60 -Y 40\n", "corrupt", id="radiance in columns, which OpenCV does not read"),
    ],
)
def test_what_is_damaged_has_its_reason(content, reason):
    assert refusal(content) == reason


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "AVIF"])
def test_files_with_random_damage_never_raise_anything_else(file_format):
    content = encoded(SMOOTH, file_format)
    random = np.random.default_rng(1)
    for _ in range(60):
        damaged = bytearray(content)
        for at in random.integers(0, len(content), 4):
            damaged[at] = random.integers(256)
        try:
            decoded = decode_image(bytes(damaged), 1e6)
            assert decoded.pixels.shape[1::-1] == decoded.image_wh
        except ImageError as err:
            assert err.reason in REASONS["decode"]


def test_pixels_that_contradict_the_header_are_refused():
    """A JPEG 2000 file whose box says 60 x 40 and whose codestream holds 120 x 80."""
    content = encoded(cv2.resize(NOISE, (120, 80)), "JPEG2000")
    box = content.index(b"ihdr") + 4
    assert refusal(content[:box] + struct.pack(">II", 40, 60) + content[box + 8 :]) == "corrupt"
