"""Hostile images: each ends as pixels or as one reason, within seconds of CPU and bounded memory, and no other program runs."""

import struct
import zlib

import pytest

from pipeline.failures import REASONS
from tests import hostile_images as hostile
from tests.decoding_process import DecodingProcess
from tests.fixtures import fixtures_dir

LARGE_PNG = hostile.png((16000, 16000), 1, 0, zlib.compress(bytes(2001 * 16000), 9))


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "end"),
    [
        pytest.param(lambda: hostile.jpeg_of_many_scans((2500, 2000), 3800), "too_much_work", id="jpeg of 3,800 scans in 100 KB"),
        pytest.param(
            lambda: hostile.jpeg_of_many_planes((2500, 2000), 50000),
            "too_much_work",
            id="baseline jpeg of one plane 50,000 times",
            marks=pytest.mark.matrix,
        ),
        pytest.param(lambda: b"\xff\xd8" + b"\xff" * (80 << 20), "too_much_work", id="jpeg of fill bytes"),
        pytest.param(lambda: b"\xff\xd8\xff" + b"\0\xff" * (20 << 20), "corrupt", id="jpeg of garbage"),
        pytest.param(lambda: hostile.jpeg_with_much_exif(450), "too_much_work", id="jpeg with 450 times 5,400 descriptions"),
        pytest.param(lambda: hostile.png_of_texts(50), "pixels", id="png of texts that unpack to 400 MB"),
        pytest.param(
            lambda: hostile.png((5000, 5000), 16, 6, hostile.empty_deflate(20 << 20)),
            "corrupt",
            id="png of empty deflate blocks",
        ),
        pytest.param(
            lambda: hostile.png((100, 100), 8, 2, zlib.compress(bytes(30100)) + bytes(1 << 20)),
            "pixels",
            id="png of a long tail",
        ),
        pytest.param(
            lambda: hostile.png((1, 1), 8, 2, zlib.compress(bytes(4)), before=hostile.png_chunk(b"tEXt", b"") * 10**6),
            "pixels",
            id="png of a million chunks",
        ),
        pytest.param(lambda: hostile.gif_of_clear_codes(1 << 20), "truncated", id="gif of clear codes"),
        pytest.param(lambda: hostile.gif_of_clear_codes(5 << 20), "truncated", id="gif of more clear codes than pixels"),
        pytest.param(
            lambda: hostile.tiff_of_tags_that_share_their_bytes(20000), "too_large", id="tiff of tags that share their bytes"
        ),
        pytest.param(hostile.tiff_of_a_huge_tile, "too_large", id="tiff of one huge tile"),
        pytest.param(
            lambda: hostile.jpeg2000({4: b"\1", 9: b"\5\0\0\0\1" + b"\x11" * 6}),
            "corrupt",
            id="jpeg 2000 of a million precincts",
        ),
        pytest.param(lambda: hostile.jpeg2000({}, tile_wh=(4, 4)), "corrupt", id="jpeg 2000 of 62,500 tiles"),
        pytest.param(
            lambda: hostile.jpeg2000_of_headers_within_headers(3000, 60000), "pixels", id="jpeg 2000 of headers in headers"
        ),
        pytest.param(
            lambda: hostile.avif_whose_items_share_their_bytes(5000), "corrupt", id="avif whose items share their bytes"
        ),
        pytest.param(
            lambda: hostile.png((5000, 5000), 16, 6, hostile.long_deflate(40 << 20)),
            "too_much_work",
            id="png that unpacks to 40 GB",
        ),
        pytest.param(lambda: hostile.ascii_pixels((2900, 2000)), "pixels", id="pixels as text"),
    ],
)
def test_work_is_bounded_where_pixels_are_few(process, make, end):
    outcome = process.decode(make())
    assert outcome.end == end, outcome
    assert outcome.megabytes < 420


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "end", "wh"),
    [
        pytest.param(hostile.jpeg_with_two_frames, "corrupt", None, id="jpeg of two frames"),
        pytest.param(hostile.png_with_two_headers, "too_large", None, id="png of two headers"),
        pytest.param(hostile.tiff_of_equal_tags, "too_large", None, id="tiff of equal tags"),
        pytest.param(hostile.tiff_of_two_pages, "pixels", (8, 8), id="tiff whose second page is large"),
        pytest.param(hostile.radiance_of_three_sizes, "too_large", None, id="radiance of three sizes"),
        pytest.param(hostile.radiance_of_a_long_line, "pixels", (8, 1), id="radiance of a line longer than a reader's buffer"),
        pytest.param(lambda: hostile.bmp((8, -8), data=bytes(192)), "pixels", (8, 8), id="bmp from the top"),
        pytest.param(lambda: hostile.bmp((-8, 8), data=bytes(192)), "too_large", None, id="bmp of negative width"),
        pytest.param(
            lambda: hostile.bmp((8, -(2**31)), data=bytes(192)), "too_large", None, id="bmp of the most negative height"
        ),
        pytest.param(lambda: hostile.bmp((8, 8), compression=4, data=bytes(192)), "not_an_image", None, id="bmp around a jpeg"),
        pytest.param(lambda: hostile.bmp((5001, 5000), bits=8, compression=1), "too_large", None, id="bmp of runs"),
        pytest.param(hostile.jpeg2000_of_two_codestreams, "pixels", (8, 8), id="jpeg 2000 of two codestreams"),
        pytest.param(hostile.jpeg2000_that_names_avif, "pixels", (8, 8), id="jpeg 2000 that calls itself avif"),
        pytest.param(lambda: hostile.avif_of_another_size((5200, 5000)), "pixels", (2, 2), id="avif whose stream is larger"),
        pytest.param(lambda: hostile.webp_of_another_size((4000, 4000)), "corrupt", None, id="webp whose canvas is larger"),
        pytest.param(
            lambda: hostile.webp_of_another_size((1 << 24, 1 << 24)), "too_large", None, id="webp of the largest canvas"
        ),
        pytest.param(
            lambda: hostile.gif((8, 8), b"\x44\x01", before=bytes(3)), "truncated", None, id="gif with zeros before its frame"
        ),
        pytest.param(lambda: hostile.gif((8, 8), b"\x44\x01", before=bytes(8 << 20)), "truncated", None, id="gif of zeros"),
        pytest.param(
            lambda: hostile.gif((8, 8), b"", before=b"!\xfe\0" * 10**7), "too_much_work", None, id="gif of empty comments"
        ),
        pytest.param(lambda: hostile.gif((65535, 65535), b"\x44\x01"), "too_large", None, id="gif of the largest canvas"),
        pytest.param(
            hostile.gif_with_a_frame_beyond_its_canvas, "too_large", None, id="gif whose frame is larger than its canvas"
        ),
        pytest.param(lambda: b"P5\n# 1 1\n8 8 # 60000\n255\n" + bytes(64), "pixels", (8, 8), id="pnm with sizes in comments"),
        pytest.param(lambda: b"P5\n60000 60000\n255\n" + bytes(64), "too_large", None, id="pnm that is large"),
    ],
)
def test_an_image_has_one_size_or_none(process, make, end, wh):
    outcome = process.decode(make())
    assert (outcome.end, outcome.image_wh) == (end, wh), outcome
    assert outcome.megabytes < 200


@pytest.mark.slow
def test_who_raises_the_limit_gets_larger_images():
    with DecodingProcess(max_pixels=200e6) as process:
        assert process.decode(hostile.png((12000, 12000), 1, 0, zlib.compress(bytes(1501 * 12000), 1))).image_wh == (12000, 12000)


@pytest.mark.slow
def test_the_hostile_files_of_others_end_as_rows_or_dead_letters(process):
    for path in sorted((fixtures_dir() / "hostile").iterdir()):
        outcome = process.decode(path.read_bytes())
        assert outcome.end in {*REASONS["decode"], "pixels"}, (path.name, outcome)
        assert outcome.megabytes < 200, (path.name, outcome)
