"""What is refused: large, damaged and hostile images end as one reason, within seconds of CPU and bounded memory.

No other program runs for them.
"""

import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image

from pipeline.failures import REASONS, Failure
from pipeline.feed.decode import DecodedImage, decode_image
from tests import hostile_images as hostile
from tests.decoding_process import DecodingProcess
from tests.feed.test_decode import NOISE, SMOOTH, encoded, refusal
from tests.fixtures import fixtures_dir

LARGE_PIXELS = zlib.compress(bytes(2001 * 16000), 9)
LARGE_PNG = hostile.png((16000, 16000), 1, 0, LARGE_PIXELS)
TEXT_BOMB = 2 * hostile.png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2 << 20)))  # Pillow refuses the whole file for it
CHUNKS = hostile.png_chunk(b"tEXt", b"") * 10**6
SQUARE = cv2.resize(NOISE, (800, 800))
JPEG, PROGRESSIVE = (encoded(SQUARE, "JPEG", progressive=progressive) for progressive in (False, True))
OF_OPENCV = hostile.png((800, 800), 1, 0, zlib.compress(bytes(101 * 800)), before=TEXT_BOMB)


@pytest.mark.parametrize(
    ("content", "needed", "least_pixels"),
    [
        pytest.param(encoded(SQUARE), None, 640_000, id="png"),
        pytest.param(JPEG, (50, 50), 10_000, id="jpeg counts after scaling"),
        pytest.param(JPEG, None, 640_000, id="jpeg at full scale"),
        pytest.param(PROGRESSIVE, (50, 50), 640_000, id="progressive jpeg holds all coefficients"),
        pytest.param(OF_OPENCV, None, 640_000, id="png that only opencv reads"),
        pytest.param(encoded(SQUARE, "JPEG2000"), None, 640_000, id="jpeg 2000 in colours"),
    ],
)
def test_the_limit_is_exact_and_counts_the_pixels_that_decoding_holds(content, needed, least_pixels):
    needed_wh = needed and (lambda _: needed)
    assert isinstance(decode_image(content, least_pixels, needed_wh), DecodedImage)
    failure = decode_image(content, least_pixels - 1, needed_wh)
    assert failure.reason == "too_large" and "max_megapixels" in failure.message


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(encoded(NOISE), id="png"),
        pytest.param(encoded(NOISE, "BMP"), id="bmp"),
        pytest.param(b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 60, 40, 1, 24), id="bmp of OS/2"),
        pytest.param(hostile.bmp((60, -40)), id="bmp from the top"),
        pytest.param(cv2.imencode(".hdr", NOISE.astype(np.float32))[1].tobytes(), id="radiance"),
        pytest.param(encoded(NOISE, "TIFF"), id="tiff"),
        pytest.param(encoded(NOISE, "JPEG2000"), id="jpeg 2000"),
    ],
)
def test_the_declared_size_is_read_without_decoding(content):
    assert "got 60 x 40 pixels" in decode_image(content, 0).message


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
        decoded = decode_image(bytes(damaged), 1e6)
        if isinstance(decoded, Failure):
            assert decoded.reason in REASONS["decode"]
        else:
            assert decoded.pixels.shape[1::-1] == decoded.image_wh


def test_pixels_that_contradict_the_header_are_refused():
    """A JPEG 2000 file whose box says 60 x 40 and whose codestream holds 120 x 80."""
    content = encoded(cv2.resize(NOISE, (120, 80)), "JPEG2000")
    box = content.index(b"ihdr") + 4
    assert refusal(content[:box] + struct.pack(">II", 40, 60) + content[box + 8 :]) == "corrupt"


@pytest.fixture(scope="module")
def process():
    with DecodingProcess(max_pixels=25e6) as process:
        yield process


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(hostile.iptc(hostile.POSTSCRIPT), id="iptc around postscript"),
        pytest.param(hostile.POSTSCRIPT, id="postscript"),
        pytest.param(
            b"\xc5\xd0\xd3\xc6" + struct.pack("<II", 30, len(hostile.POSTSCRIPT)) + bytes(18) + hostile.POSTSCRIPT, id="dos eps"
        ),
        pytest.param(b"\xd7\xcd\xc6\x9a\0\0" + struct.pack("<4hHI", 0, 0, 9, 9, 96, 0) + bytes(100), id="wmf"),
        pytest.param(struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(LARGE_PNG), 22) + LARGE_PNG, id="ico"),
        pytest.param(b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 30000, 30000, 8, 3) + bytes(100), id="psd"),
        pytest.param(b"DDS \x7c\0\0\0" + bytes(200), id="dds"),
    ],
)
def test_formats_that_nest_others_or_start_programs_are_not_read(process, content):
    outcome = process.decode(content)
    assert outcome.end == "not_an_image"
    assert "JPEG, PNG, GIF, BMP, TIFF, WebP, JPEG 2000, AVIF, HEIC, PNM, Radiance HDR and Targa are read" in outcome.message


def too_much_work(make):
    """Takes ten seconds of a core."""
    return pytest.param(make, "too_much_work", marks=pytest.mark.matrix)


COSTLY = {
    "jpeg of 3,800 scans in 100 KB": too_much_work(lambda: hostile.jpeg_of_many_scans((2500, 2000), 3800)),
    "baseline jpeg of one plane 50,000 times": too_much_work(lambda: hostile.jpeg_of_many_planes((2500, 2000), 50000)),
    "jpeg of fill bytes": too_much_work(lambda: b"\xff\xd8" + b"\xff" * (80 << 20)),
    "jpeg of garbage": (lambda: b"\xff\xd8\xff" + b"\0\xff" * (4 << 20), "corrupt"),
    "jpeg with 450 times 5,400 descriptions": too_much_work(lambda: hostile.jpeg_with_much_exif(450)),
    "png of texts that unpack to 400 MB": (lambda: hostile.png_of_texts(50), "pixels"),
    "png of empty blocks": (lambda: hostile.png((5000, 5000), 16, 6, hostile.empty_deflate(20 << 20)), "corrupt"),
    "png that unpacks to 40 GB": too_much_work(lambda: hostile.png((5000, 5000), 16, 6, hostile.long_deflate(40 << 20))),
    "png of a long tail": (lambda: hostile.png((100, 100), 8, 2, zlib.compress(bytes(30100)) + bytes(1 << 20)), "pixels"),
    "png of a million chunks": (lambda: hostile.png((1, 1), 8, 2, zlib.compress(bytes(4)), before=CHUNKS), "pixels"),
    "gif of clear codes": (lambda: hostile.gif_of_clear_codes(1 << 20), "truncated"),
    "gif of more clear codes than pixels": (lambda: hostile.gif_of_clear_codes(5 << 20), "truncated"),
    "gif of empty comments": too_much_work(lambda: hostile.gif((8, 8), b"", before=b"!\xfe\0" * 10**7)),
    "tiff of tags that share their bytes": (lambda: hostile.tiff_of_tags_that_share_their_bytes(20000), "too_large"),
    "tiff of one huge tile": (hostile.tiff_of_a_huge_tile, "too_large"),
    "jpeg 2000 of a million precincts": (lambda: hostile.jpeg2000({4: b"\1", 9: b"\5\0\0\0\1" + b"\x11" * 6}), "corrupt"),
    "jpeg 2000 of 62,500 tiles": (lambda: hostile.jpeg2000({}, tile_wh=(4, 4)), "corrupt"),
    "jpeg 2000 of headers in headers": (lambda: hostile.jpeg2000_of_headers_within_headers(3000, 60000), "pixels"),
    "avif whose items share their bytes": (lambda: hostile.avif_whose_items_share_their_bytes(5000), "corrupt"),
    "pixels as text": (lambda: hostile.ascii_pixels((2900, 2000)), "pixels"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "end"), COSTLY.values(), ids=COSTLY)
def test_work_is_bounded_where_pixels_are_few(process, make, end):
    outcome = process.decode(make())
    assert outcome.end == end, outcome
    assert outcome.megabytes < 420


RADIANCE_ROW = b"\x02\x02" + struct.pack(">H", 14000) + 4 * (b"\xff\x00" * (14000 // 127) + bytes([128 + 14000 % 127, 0]))
OF_TWO_SIZES = {
    "jpeg of two frames": (hostile.jpeg_with_two_frames, "corrupt"),
    "png of two headers": (hostile.png_with_two_headers, "too_large"),
    "tiff of equal tags": (hostile.tiff_of_equal_tags, "too_large"),
    "tiff whose second page is large": (hostile.tiff_of_two_pages, (8, 8)),
    "radiance of three sizes": (hostile.radiance_of_three_sizes, "too_large"),
    "radiance of a line longer than a reader's buffer": (hostile.radiance_of_a_long_line, (8, 1)),
    "bmp from the top": (lambda: hostile.bmp((8, -8), data=bytes(192)), (8, 8)),
    "bmp of negative width": (lambda: hostile.bmp((-8, 8), data=bytes(192)), "too_large"),
    "bmp of the most negative height": (lambda: hostile.bmp((8, -(2**31)), data=bytes(192)), "too_large"),
    "bmp around a jpeg": (lambda: hostile.bmp((8, 8), compression=4, data=bytes(192)), "not_an_image"),
    "jpeg 2000 of two codestreams": (hostile.jpeg2000_of_two_codestreams, (8, 8)),
    "jpeg 2000 that calls itself avif": (hostile.jpeg2000_that_names_avif, (8, 8)),
    "avif whose stream is larger": (lambda: hostile.avif_of_another_size((5200, 5000)), (2, 2)),
    "webp whose canvas is larger": (lambda: hostile.webp_of_another_size((4000, 4000)), "corrupt"),
    "webp of the largest canvas": (lambda: hostile.webp_of_another_size((1 << 24, 1 << 24)), "too_large"),
    "gif with zeros before its frame": (lambda: hostile.gif((8, 8), b"\x44\x01", before=bytes(3)), "truncated"),
    "gif of zeros": (lambda: hostile.gif((8, 8), b"\x44\x01", before=bytes(8 << 20)), "truncated"),
    "gif whose frame is larger than its canvas": (hostile.gif_with_a_frame_beyond_its_canvas, "too_large"),
    "pnm with sizes in comments": (lambda: b"P5\n# 1 1\n8 8 # 60000\n255\n" + bytes(64), (8, 8)),
}
LARGE = {
    "png": lambda: LARGE_PNG,
    "png that only opencv reads": lambda: hostile.png((16000, 16000), 1, 0, LARGE_PIXELS, before=TEXT_BOMB),
    "gif": lambda: hostile.gif((65535, 65535), b"\x44\x01"),
    "pnm": lambda: b"P5\n60000 60000\n255\n" + bytes(64),
    "radiance": lambda: b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n-Y 14000 +X 14000\n" + RADIANCE_ROW * 14000,
    "bmp of runs": lambda: hostile.bmp((30000, 30000), bits=8, compression=1, data=bytes(1100)),
    "tiff": lambda: encoded(Image.new("1", (12000, 12000)), "TIFF", compression="packbits"),
    "progressive jpeg": lambda: encoded(Image.new("L", (6000, 6000)), "JPEG", progressive=True),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "end"), OF_TWO_SIZES.values(), ids=OF_TWO_SIZES)
def test_an_image_has_one_size_or_none(process, make, end):
    outcome = process.decode(make())
    assert (outcome.image_wh or outcome.end) == end, outcome
    assert outcome.megabytes < 200


@pytest.mark.slow
@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_a_bomb_is_refused_before_it_takes_memory(process, make):
    """The smallest of them would take 108 MB."""
    outcome = process.decode(make())
    assert outcome.end == "too_large", outcome
    assert outcome.megabytes < 60


@pytest.mark.slow
def test_the_hostile_files_of_others_end_as_rows_or_dead_letters(process):
    for path in sorted((fixtures_dir() / "hostile").iterdir()):
        outcome = process.decode(path.read_bytes())
        assert outcome.end in {*REASONS["decode"], "pixels"}, (path.name, outcome)
        assert outcome.megabytes < 200, (path.name, outcome)
