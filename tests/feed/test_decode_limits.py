"""What is refused, and why: by pixels and memory, by what is damaged, and on the header alone."""

import re
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image

from pipeline.failures import ImageError
from pipeline.feed.decode import decode_image
from tests import hostile_images
from tests.decoding_process import DecodingProcess
from tests.feed.test_decode import NOISE, REASONS, SMOOTH, encoded, refusal
from tests.hostile_images import png_chunk


def declared_wh(content):
    """The size for which an image is refused where no pixel is allowed; None where it is refused for something else."""
    with pytest.raises(ImageError) as caught:
        decode_image(content, 0)
    found = re.search(r"got (\d+) x (\d+) pixels", str(caught.value))
    return (int(found[1]), int(found[2])) if caught.value.reason == "too_large" and found else None


def blank_png(width, height, *, texts=b""):
    """A black 1-bit PNG, tiny however large the picture."""
    deflate = zlib.compressobj(9)
    pixels = b"".join(deflate.compress(bytes(1 + (width + 7) // 8)) for _ in range(height)) + deflate.flush()
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + texts + png_chunk(b"IDAT", pixels) + png_chunk(b"IEND", b"")


TEXT_BOMB = 2 * png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2 << 20)))  # Pillow refuses the whole file for it


class TestLimits:
    """The limit counts the pixels that decoding would hold, and is checked on the header."""

    SQUARE = cv2.resize(NOISE, (800, 800))

    @pytest.mark.parametrize(
        ("content", "needed", "max_pixels", "reason"),
        [
            pytest.param(encoded(SQUARE), None, 640_000, None, id="just not too large"),
            pytest.param(encoded(SQUARE), None, 639_999, "too_large", id="one pixel too many"),
            pytest.param(encoded(SQUARE, "JPEG"), (50, 50), 10_000, None, id="jpeg counts after scaling"),
            pytest.param(encoded(SQUARE, "JPEG"), (50, 50), 9_999, "too_large", id="but it does count"),
            pytest.param(encoded(SQUARE, "JPEG"), None, 10_000, "too_large", id="jpeg at full scale"),
            pytest.param(
                encoded(SQUARE, "JPEG", progressive=True),
                (50, 50),
                639_999,
                "too_large",
                id="progressive jpeg holds all coefficients",
            ),
            pytest.param(
                encoded(SQUARE, "JPEG", progressive=True), (50, 50), 640_000, None, id="progressive jpeg within the limit"
            ),
            pytest.param(blank_png(800, 800, texts=TEXT_BOMB), None, 639_999, "too_large", id="png that only opencv reads"),
            pytest.param(blank_png(800, 800, texts=TEXT_BOMB), None, 640_000, None, id="png that only opencv reads, within"),
        ],
    )
    def test_the_limit_is_exact(self, content, needed, max_pixels, reason):
        if reason:
            with pytest.raises(ImageError, match="max_megapixels") as caught:
                decode_image(content, max_pixels, needed and (lambda _: needed))
            assert caught.value.reason == reason
        else:
            decode_image(content, max_pixels, needed and (lambda _: needed))

    def test_bombs_are_refused_before_they_take_memory(self):
        radiance = b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n-Y 14000 +X 14000\n"
        row = b"\x02\x02" + struct.pack(">H", 14000) + 4 * (b"\xff\x00" * (14000 // 127) + bytes([128 + 14000 % 127, 0]))
        os2_header = struct.pack("<IIIIiiHHIIIIII", 1078, 0, 1078, 41, 30000, 30000, 1, 8, 1, 0, 0, 0, 0, 0)
        bombs = [
            blank_png(16000, 16000),
            blank_png(16000, 16000, texts=TEXT_BOMB),
            radiance + row * 14000,
            b"BM" + os2_header + bytes(1100),
            b"GIF89a" + struct.pack("<HH", 65535, 65535) + encoded(SMOOTH, "GIF")[10:],
            encoded(Image.new("1", (12000, 12000)), "TIFF", compression="packbits"),
            encoded(Image.new("L", (6000, 6000)), "JPEG", progressive=True),
        ]
        with DecodingProcess(max_pixels=25e6) as process:
            outcomes = [process.decode(bomb) for bomb in bombs]
        assert [outcome.end for outcome in outcomes] == len(bombs) * ["too_large"]
        assert max(outcome.megabytes for outcome in outcomes) < 60  # the smallest of the bombs would take 108

    @pytest.mark.parametrize(
        ("content", "wh"),
        [
            pytest.param(encoded(NOISE), (60, 40), id="png"),
            pytest.param(encoded(NOISE, "BMP"), (60, 40), id="bmp"),
            pytest.param(b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 60, 40, 1, 24), (60, 40), id="bmp of OS/2"),
            pytest.param(hostile_images.bmp((60, -40)), (60, 40), id="bmp from the top"),
            pytest.param(cv2.imencode(".hdr", NOISE.astype(np.float32))[1].tobytes(), (60, 40), id="radiance"),
            pytest.param(b"#?RGBE\n\n+X 60 -Y 40\n", None, id="radiance in columns, which OpenCV does not read"),
            pytest.param(encoded(NOISE, "TIFF"), (60, 40), id="tiff"),
            pytest.param(encoded(NOISE, "JPEG2000"), (60, 40), id="jpeg 2000"),
            pytest.param(b"", None, id="empty"),
            pytest.param(b"\x89PNG", None, id="cut png"),
            pytest.param(b"II*\0\xff\xff\xff\xff", None, id="cut tiff"),
            pytest.param(b"#?RADIANCE\n\n", None, id="cut radiance"),
            pytest.param(b"text", None, id="text"),
        ],
    )
    def test_the_declared_size_is_read_without_decoding(self, content, wh):
        assert declared_wh(content) == wh


class TestDamage:
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
        ],
    )
    def test_the_reason_is_named(self, content, reason):
        assert refusal(content) == reason

    @pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "AVIF"])
    def test_files_with_random_damage_never_raise_anything_else(self, file_format):
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
                assert err.reason in REASONS

    def test_pixels_that_contradict_the_header_are_refused(self):
        """A JPEG 2000 file whose box says 60 x 40 and whose codestream holds 120 x 80."""
        content = encoded(cv2.resize(NOISE, (120, 80)), "JPEG2000")
        box = content.index(b"ihdr") + 4
        assert refusal(content[:box] + struct.pack(">II", 40, 60) + content[box + 8 :]) == "corrupt"
