"""Decoding: any image file ends as upright RGB pixels or as a reason, and takes no more memory than it may."""

import io
import itertools
import math
import struct
import subprocess
import sys
import zlib

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from pipeline import failures
from pipeline.detect.decode import decode_image
from pipeline.detect.headers.exif import orientation as orientation_of
from pipeline.detect.headers.formats import read_header
from pipeline.failures import ImageError
from tests.fixtures import REPO, fixtures_dir

LIMIT = 1e8
RANDOM = np.random.default_rng(0)
NOISE = RANDOM.integers(0, 255, (40, 60, 3), np.uint8)
SMOOTH = cv2.resize(NOISE[:4, :6], (60, 40), interpolation=cv2.INTER_CUBIC)
REASONS = set(failures.REASONS["decode"])


def encoded(image, file_format="PNG", **options):
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, file_format, **options)
    return file.getvalue()


def as_pillow_sees_it(content):
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))


def refusal(content, max_pixels=LIMIT):
    with pytest.raises(ImageError) as caught:
        decode_image(content, max_pixels)
    assert "\n" not in str(caught.value)
    return caught.value.reason


def declared_wh(content):
    try:
        return read_header(content).wh
    except ImageError:
        return None


def png_chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def blank_png(width, height, *, texts=b""):
    """A black 1-bit PNG, tiny however large the picture."""
    deflate = zlib.compressobj(9)
    pixels = b"".join(deflate.compress(bytes(1 + (width + 7) // 8)) for _ in range(height)) + deflate.flush()
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + texts + png_chunk(b"IDAT", pixels) + png_chunk(b"IEND", b"")


TEXT_BOMB = 2 * png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2 << 20)))  # Pillow refuses the whole file for it


class TestOrientation:
    @pytest.mark.parametrize(
        ("file_format", "options"),
        [
            ("JPEG", {"quality": 95}),
            ("PNG", {}),
            ("WEBP", {"lossless": True}),
            ("TIFF", {}),
            ("TIFF", {"compression": "tiff_lzw"}),
        ],
        ids=["jpeg", "png", "webp", "tiff", "tiff-lzw"],
    )
    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_pixels_are_turned_upright_as_pillow_does(self, file_format, options, orientation):
        exif = Image.Exif()
        exif[0x0112] = orientation
        content = encoded(SMOOTH, file_format, exif=exif, **options)
        decoded = decode_image(content, LIMIT)
        assert decoded.image_wh == ((40, 60) if orientation >= 5 else (60, 40))
        assert np.array_equal(decoded.pixels, as_pillow_sees_it(content))

    @pytest.mark.parametrize("orientation", [0, 9, 65535])
    def test_an_orientation_that_does_not_exist_is_ignored(self, orientation):
        exif = Image.Exif()
        exif[0x0112] = orientation
        assert decode_image(encoded(SMOOTH, "JPEG", exif=exif), LIMIT).image_wh == (60, 40)

    @pytest.mark.parametrize("file_format", ["JPEG", "WEBP", "AVIF"])
    @pytest.mark.parametrize("orientation", [1, 3, 6, 8])
    def test_xmp_says_what_is_up_where_exif_does_not(self, file_format, orientation):
        xmp = b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="%d"/>' % orientation
        content = encoded(SMOOTH, file_format, quality=95, xmp=xmp)
        decoded = decode_image(content, LIMIT)
        assert decoded.image_wh == ((40, 60) if orientation >= 5 else (60, 40))
        assert np.abs(decoded.pixels.astype(int) - as_pillow_sees_it(content)).mean() < 3

    @settings(max_examples=200, deadline=None)
    @given(
        exif=st.binary(max_size=60)
        | st.builds(
            lambda head, rest: head + rest, st.sampled_from([b"II*\0\x08\0\0\0", b"MM\0*\0\0\0\x08"]), st.binary(max_size=60)
        )
    )
    def test_a_damaged_block_of_exif_leaves_the_image_as_it_is_or_turns_it(self, exif):
        assert orientation_of(exif) in range(1, 9)

    def test_real_photos_of_one_scene_in_all_orientations_look_alike(self):
        photos = [
            decode_image((fixtures_dir() / "orientation" / f"Landscape_{n}.jpg").read_bytes(), LIMIT).pixels for n in range(1, 9)
        ]
        small = [cv2.resize(photo, (60, 40), interpolation=cv2.INTER_AREA).astype(int) for photo in photos]
        assert all(photo.shape[1] > photo.shape[0] for photo in photos)
        # each photo has its number painted on it
        assert all(np.abs(small[0] - other).mean() < 12 for other in small[1:])
        assert np.abs(small[0] - small[0][::-1]).mean() > 30


class TestFormats:
    def frames(self):
        return [Image.new("RGB", (30, 20), colour) for colour in ("red", "lime", "blue")]

    @pytest.mark.parametrize(
        ("file_format", "options"),
        [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {}), ("MPO", {})],
        ids=["gif", "webp", "apng", "tiff", "mpo"],
    )
    def test_of_several_frames_the_first_counts(self, file_format, options):
        first, *others = self.frames()
        content = encoded(first, file_format, save_all=True, append_images=others, **options)
        assert getattr(Image.open(io.BytesIO(content)), "n_frames", 1) == 3
        pixels = decode_image(content, LIMIT).pixels
        assert pixels.shape == (20, 30, 3)
        assert np.abs(pixels.astype(int) - [255, 0, 0]).max() <= 3

    @pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "JPEG2000", "AVIF", "TGA"])
    def test_one_pixel_is_an_image(self, file_format):
        decoded = decode_image(encoded(Image.new("RGB", (1, 1), "red"), file_format), LIMIT)
        assert (decoded.image_wh, decoded.pixels.shape) == ((1, 1), (1, 1, 3))
        assert np.abs(decoded.pixels[0, 0].astype(int) - [255, 0, 0]).max() <= 3

    @pytest.mark.parametrize(
        "image",
        [
            pytest.param(Image.fromarray(SMOOTH).convert("L"), id="grey"),
            pytest.param(Image.fromarray(SMOOTH).convert("1"), id="1-bit"),
            pytest.param(Image.fromarray(SMOOTH).quantize(16), id="palette"),
            pytest.param(Image.fromarray(np.dstack([NOISE, NOISE[..., :1]])), id="alpha is dropped"),
            pytest.param(Image.fromarray(NOISE[..., :2].copy(), "LA"), id="grey and alpha"),
        ],
    )
    def test_every_png_mode_gives_rgb(self, image):
        content = encoded(image)
        assert np.array_equal(decode_image(content, LIMIT).pixels, as_pillow_sees_it(content))

    @pytest.mark.parametrize("file_format", ["PNG", "TIFF", "JPEG2000", "PPM"])
    def test_16_bits_are_scaled_to_8_not_clipped(self, file_format):
        values = np.linspace(0, 65535, 60 * 40).reshape(40, 60).astype(np.uint16)
        pixels = decode_image(encoded(values, file_format), LIMIT).pixels
        assert np.abs(pixels.astype(int) - (values // 256)[..., None]).max() <= 1

    def test_floats_are_scaled_by_their_largest_value(self):
        values = np.linspace(0, 3, 60 * 40).reshape(40, 60).astype(np.float32)
        pixels = decode_image(encoded(values, "TIFF"), LIMIT).pixels
        assert pixels.max() == 255
        assert (np.diff(pixels[..., 0].ravel().astype(int)) >= 0).all()

    @pytest.mark.parametrize("mode", ["RGBA", "LA", "RGB", "L"])
    def test_avif_keeps_its_colours_with_and_without_alpha(self, mode):
        image = Image.fromarray(np.dstack([SMOOTH, SMOOTH[..., 0] | 128])).convert(mode)
        pixels = decode_image(encoded(image, "AVIF", quality=100, subsampling="4:4:4"), LIMIT).pixels
        assert np.abs(pixels.astype(int) - np.asarray(image.convert("RGB"))).mean() < 3

    @pytest.mark.parametrize(
        "options", [{"compression": name} for name in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "zstd")]
    )
    @pytest.mark.parametrize("big", [False, True], ids=["classic", "bigtiff"])
    def test_tiff_is_read_however_it_is_packed(self, options, big):
        pixels = decode_image(encoded(SMOOTH, "TIFF", big_tiff=big, **options), LIMIT).pixels
        assert np.abs(pixels.astype(int) - SMOOTH).mean() < (4 if options["compression"] == "jpeg" else 0.01)

    @pytest.mark.parametrize(
        "options", [{}, {"no_jp2": True}, {"tile_size": (16, 16)}, {"precinct_size": (32, 32)}, {"num_resolutions": 1}]
    )
    @pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA"])
    def test_jpeg_2000_is_read_however_it_is_cut(self, options, mode):
        image = (
            Image.fromarray(SMOOTH[..., 0].astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(SMOOTH).convert(mode)
        )
        pixels = decode_image(encoded(image, "JPEG2000", **options), LIMIT).pixels
        assert np.array_equal(pixels, np.repeat(SMOOTH[..., :1], 3, 2) if mode == "I;16" else np.asarray(image.convert("RGB")))

    def test_what_a_png_says_of_itself_does_not_change_its_pixels(self):
        from PIL.PngImagePlugin import PngInfo

        notes = PngInfo()
        notes.add_text("Comment", "x" * 1000, zip=True)
        plain = decode_image(encoded(SMOOTH), LIMIT).pixels
        assert np.array_equal(
            decode_image(encoded(SMOOTH, pnginfo=notes, dpi=(9, 9), icc_profile=b"no profile"), LIMIT).pixels, plain
        )

    @pytest.mark.parametrize("end", [0, 4, 11])
    def test_a_png_that_lacks_its_end_alone_is_read(self, end):
        content = encoded(SMOOTH)
        assert np.array_equal(decode_image(content[: len(content) - 12 + end], LIMIT).pixels, SMOOTH)

    def test_cmyk_is_converted_within_what_colour_profiles_leave_open(self):
        content = encoded(Image.fromarray(SMOOTH).convert("CMYK"), "JPEG", quality=95)
        assert np.abs(decode_image(content, LIMIT).pixels.astype(int) - as_pillow_sees_it(content)).mean() < 3

    def test_what_only_opencv_reads_is_read(self):
        radiance = cv2.imencode(".hdr", np.full((20, 30, 3), 0.5, np.float32))[1].tobytes()
        decoded = decode_image(radiance, LIMIT)
        assert (decoded.image_wh, decoded.pixels.shape, decoded.pixels.dtype) == ((30, 20), (20, 30, 3), np.uint8)

    def test_a_jpeg_with_data_behind_its_end_is_whole(self):
        content = encoded(SMOOTH, "JPEG")
        assert np.array_equal(decode_image(content + b"trailer" * 9, LIMIT).pixels, decode_image(content, LIMIT).pixels)

    def test_an_embedded_thumbnail_does_not_pass_for_the_end_of_a_truncated_jpeg(self):
        exif = Image.Exif()
        exif[0x010E] = encoded(SMOOTH, "JPEG").decode("latin-1")
        content = encoded(cv2.resize(NOISE, (600, 400)), "JPEG", exif=exif.tobytes() + encoded(SMOOTH, "JPEG"))
        assert refusal(content[: len(content) // 2]) == "truncated"


class TestScaledDecode:
    FULL = cv2.resize(NOISE, (1600, 1200), interpolation=cv2.INTER_CUBIC)

    @pytest.mark.parametrize(
        ("needed_wh", "factor"),
        [
            ((1600, 1200), 1),
            ((534, 400), 1),
            ((533, 400), 2),
            ((266, 200), 4),
            ((133, 100), 8),
            ((134, 100), 4),
            ((133, 101), 4),
            ((10, 7), 8),
        ],
    )
    def test_the_model_keeps_one_and_a_half_pixels_for_each_it_sees(self, needed_wh, factor):
        decoded = decode_image(encoded(self.FULL, "JPEG"), LIMIT, lambda _: needed_wh)
        assert decoded.image_wh == (1600, 1200)
        assert decoded.pixels.shape == (1200 // factor, 1600 // factor, 3)

    def test_it_shows_the_same_as_full_scale(self):
        content = encoded(self.FULL, "JPEG", quality=95)
        scaled, full = (decode_image(content, LIMIT, needed).pixels for needed in (lambda _: (100, 75), None))
        area = cv2.resize(full, scaled.shape[1::-1], interpolation=cv2.INTER_AREA)
        assert scaled.shape == (150, 200, 3)
        assert np.abs(scaled.astype(int) - area).max() <= 6

    @settings(max_examples=40, deadline=None)
    @given(wh=st.tuples(st.integers(1, 130), st.integers(1, 130)), orientation=st.integers(1, 8), progressive=st.booleans())
    def test_odd_sizes_and_orientations_keep_their_geometry(self, wh, orientation, progressive):
        exif = Image.Exif()
        exif[0x0112] = orientation
        content = encoded(Image.new("RGB", wh, "teal"), "JPEG", exif=exif, progressive=progressive)
        asked = []
        decoded = decode_image(content, LIMIT, lambda upright: asked.append(upright) or (5, 5))
        upright = wh[::-1] if orientation >= 5 else wh
        factor = next((f for f in (8, 4, 2) if min(wh) // f >= 7.5), 1)
        assert asked == [upright]
        assert decoded.image_wh == upright
        assert decoded.pixels.shape[1::-1] == tuple(math.ceil(side / factor) for side in upright)

    def test_only_jpeg_is_decoded_at_reduced_scale(self):
        assert decode_image(encoded(self.FULL), LIMIT, lambda _: (10, 10)).pixels.shape == (1200, 1600, 3)


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

    def test_bombs_and_hostile_files_end_as_pixels_or_reasons_in_bounded_memory(self, tmp_path):
        """In a process of its own, whose peak memory is its own, with the limit at 25 megapixels."""
        radiance = b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n-Y 14000 +X 14000\n"
        row = b"\x02\x02" + struct.pack(">H", 14000) + 4 * (b"\xff\x00" * (14000 // 127) + bytes([128 + 14000 % 127, 0]))
        bombs = {
            "plain.png": blank_png(16000, 16000),
            "text.png": blank_png(16000, 16000, texts=TEXT_BOMB),
            "rle.hdr": radiance + row * 14000,
            "rle.bmp": b"BM"
            + struct.pack("<IIIIiiHHIIIIII", 1078, 0, 1078, 41, 30000, 30000, 1, 8, 1, 0, 0, 0, 0, 0)
            + bytes(1100),
            "big.gif": b"GIF89a" + struct.pack("<HH", 65535, 65535) + encoded(SMOOTH, "GIF")[10:],
        }
        for name, content in bombs.items():
            (tmp_path / name).write_bytes(content)
        hostile = [path for path in (fixtures_dir() / "hostile").iterdir() if path.suffix != ".tsv"]
        code = (
            "import sys; from pathlib import Path\n"
            "from pipeline.detect.decode import decode_image; from pipeline.failures import ImageError\n"
            "peak = lambda: int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) // 1024\n"
            "decode_image(open(sys.argv[1], 'rb').read(), 25e6); before = peak()\n"
            "for path in sys.argv[2:]:\n"
            "    try: result = 'pixels %dx%d' % decode_image(open(path, 'rb').read(), 25e6).image_wh\n"
            "    except ImageError as err: result = err.reason\n"
            "    print(path, result, peak() - before, sep='\\t')"
        )
        (tmp_path / "good.png").write_bytes(encoded(SMOOTH))
        paths = [tmp_path / "good.png", *(tmp_path / name for name in bombs), *hostile]
        done = subprocess.run(
            [sys.executable, "-c", code, *paths], cwd=REPO, capture_output=True, text=True, timeout=120, check=True
        )
        lines = [line.split("\t") for line in done.stdout.splitlines()]
        assert [line[0] for line in lines] == [str(path) for path in paths[1:]]
        assert [line[1] for line in lines[: len(bombs)]] == len(bombs) * ["too_large"]
        assert {line[1].split()[0] for line in lines} <= REASONS | {"pixels"}
        assert max(int(line[2]) for line in lines) < 200  # megabytes; the smallest of the bombs would take 256

    @pytest.mark.parametrize(
        ("content", "wh"),
        [
            pytest.param(encoded(NOISE), (60, 40), id="png"),
            pytest.param(encoded(NOISE, "BMP"), (60, 40), id="bmp"),
            pytest.param(b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 60, 40, 1, 24), (60, 40), id="bmp of OS/2"),
            pytest.param(b"BM" + bytes(12) + struct.pack("<Iii", 40, 60, -40), (60, 40), id="bmp from the top"),
            pytest.param(cv2.imencode(".hdr", NOISE.astype(np.float32))[1].tobytes(), (60, 40), id="radiance"),
            pytest.param(b"#?RGBE\n\n+X 60 -Y 40\n", (60, 40), id="radiance in columns"),
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


def test_decoding_does_not_depend_on_its_neighbours_in_time():
    from concurrent.futures import ThreadPoolExecutor

    contents = [encoded(SMOOTH, file_format) for file_format in ("JPEG", "PNG", "GIF", "WEBP")]
    alone = [decode_image(content, LIMIT).pixels for content in contents]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda content: decode_image(content, LIMIT).pixels, contents * 20))
    assert all(np.array_equal(pixels, wanted) for pixels, wanted in zip(together, itertools.cycle(alone), strict=False))


def test_postscript_is_no_image():
    """Pillow would start Ghostscript on it."""
    with pytest.raises(ImageError) as caught:
        decode_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n", 1e6)
    assert caught.value.reason == "not_an_image"
