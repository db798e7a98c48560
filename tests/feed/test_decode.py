"""Decoding: an image of any format, mode and orientation ends as upright RGB pixels, no larger than the model needs."""

import contextlib
import io
import math
import subprocess
import sys

import cv2
import numpy as np
import pillow_heif
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from pipeline.failures import MAY_PASS, Failure
from pipeline.feed.decode import decode_image
from tests import hostile_images
from tests.fixtures import REPO

LIMIT = 1e8
NOISE = np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8)
SMOOTH = cv2.resize(NOISE[:4, :6], (60, 40), interpolation=cv2.INTER_CUBIC)
ALPHA = Image.fromarray(np.dstack([SMOOTH, SMOOTH[..., 0] | 128]))


@pytest.fixture(autouse=True, scope="module")
def _heif_encoder():
    pillow_heif.register_heif_opener()


def encoded(image, file_format="PNG", **options):
    return hostile_images.encoded(Image.fromarray(image) if isinstance(image, np.ndarray) else image, file_format, **options)


def exif_of(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def difference(pixels, expected):
    """Of two pictures of one size, on average."""
    assert pixels.shape == expected.shape and pixels.dtype == np.uint8
    return np.abs(pixels.astype(int) - expected).mean()


def refusal(content, max_pixels=LIMIT):
    failure = decode_image(content, max_pixels)
    assert isinstance(failure, Failure) and "\n" not in failure.message
    return failure.reason


def test_the_time_of_decoding_follows_format_and_size():
    """JPEG 2000 takes sixty times as long as JPEG."""
    allowed = {}
    for file_format in ("JPEG", "PNG", "JPEG2000"):

        def room(_needed_bytes, wh, seconds, name=file_format):
            allowed[name] = seconds / (wh[0] * wh[1] / 1e6)
            return contextlib.nullcontext()

        decode_image(encoded(SMOOTH, file_format), LIMIT, room=room)
    assert allowed == pytest.approx({"JPEG": 0.05, "PNG": 0.2, "JPEG2000": 1.5})


class TestOrientation:
    @pytest.mark.parametrize(
        ("file_format", "options"),
        [
            *(("JPEG", {"quality": 95}), ("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})),
            ("TIFF", {"compression": "tiff_lzw"}),
            ("HEIF", {"quality": 95}),  # with `irot` and `imir`, as phones do
        ],
        ids=str,
    )
    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_pixels_are_turned_upright_as_pillow_does(self, file_format, options, orientation):
        exif = exif_of(orientation)
        decoded = decode_image(encoded(SMOOTH, file_format, exif=exif.tobytes(), **options), LIMIT)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded(SMOOTH, exif=exif))))
        assert decoded.image_wh == upright.size == ((40, 60) if orientation >= 5 else (60, 40))
        assert difference(decoded.pixels, np.asarray(upright)) < 6

    def test_an_orientation_that_does_not_exist_is_ignored(self):
        assert {decode_image(encoded(SMOOTH, "JPEG", exif=exif_of(n)), LIMIT).image_wh for n in (0, 9, 65535)} == {(60, 40)}

    @pytest.mark.parametrize("file_format", ["JPEG", "WEBP", "AVIF"])
    @pytest.mark.parametrize("orientation", [1, 3, 6, 8])
    def test_xmp_says_what_is_up_where_exif_does_not(self, file_format, orientation):
        xmp = b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="%d"/>' % orientation
        content = encoded(SMOOTH, file_format, quality=95, xmp=xmp)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
        assert upright.size == ((40, 60) if orientation >= 5 else (60, 40))
        assert difference(decode_image(content, LIMIT).pixels, np.asarray(upright)) < 3

    @pytest.mark.filterwarnings("ignore")
    @settings(max_examples=200, deadline=None)
    @given(head=st.sampled_from([b"", b"II*\0\x08\0\0\0", b"MM\0*\0\0\0\x08"]), rest=st.binary(max_size=60))
    def test_a_damaged_block_of_exif_leaves_the_image_as_it_is_or_turns_it(self, head, rest):
        for file_format in ("JPEG", "PNG", "WEBP"):
            assert set(decode_image(encoded(SMOOTH, file_format, exif=head + rest), LIMIT).image_wh) == {60, 40}


PNG, JPEG = encoded(SMOOTH), encoded(SMOOTH, "JPEG")
COMMENT = PngInfo()
COMMENT.add_text("Comment", "x" * 1000, zip=True)
COLOURS = {
    "PNG": [(mode, {}, 0) for mode in ("1", "L", "P", "LA", "RGBA")],
    "AVIF": [(mode, {"quality": 100, "subsampling": "4:4:4"}, 3) for mode in ("L", "LA", "RGB", "RGBA")],
    "HEIF": [(mode, {"quality": 95, "chroma": 444}, 3) for mode in ("L", "RGB", "RGBA")],
    "JPEG": [("CMYK", {"quality": 95}, 3)],  # what colour profiles leave open
    "JPEG2000": [
        *((mode, options, 0) for mode in ("L", "LA", "RGB", "RGBA") for options in ({}, {"tile_size": (16, 16)})),
        *(("RGB", options, 0) for options in ({"no_jp2": True}, {"precinct_size": (32, 32)}, {"num_resolutions": 1})),
    ],
    "TIFF": [
        *(("RGB", {"compression": name}, 0) for name in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "zstd")),
        *(("RGB", {"compression": name, "big_tiff": True}, 4) for name in ("tiff_lzw", "jpeg")),
    ],
}


class TestFormats:
    @pytest.mark.parametrize(
        ("file_format", "mode", "options", "most_difference"),
        [(file_format, *each) for file_format, modes in COLOURS.items() for each in modes],
        ids=str,
    )
    def test_an_image_has_its_colours_whatever_its_mode_and_however_it_is_packed(
        self, file_format, mode, options, most_difference
    ):
        image = ALPHA.convert(mode)
        pixels = decode_image(encoded(image, file_format, **options), LIMIT).pixels
        assert difference(pixels, np.asarray(image.convert("RGB"))) <= most_difference

    @pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "TIFF", "MPO", "HEIF"])
    def test_of_several_frames_the_first_counts(self, file_format):
        red, *others = (Image.new("RGB", (30, 20), colour) for colour in ("red", "lime", "blue"))
        content = encoded(red, file_format, save_all=True, append_images=others)
        assert getattr(Image.open(io.BytesIO(content)), "n_frames", 1) == 3
        assert difference(decode_image(content, LIMIT).pixels, np.asarray(red)) <= 3

    @pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "JPEG2000", "AVIF", "TGA"])
    def test_one_pixel_is_an_image(self, file_format):
        image = Image.new("RGB", (1, 1), "red")
        decoded = decode_image(encoded(image, file_format), LIMIT)
        assert decoded.image_wh == (1, 1) and difference(decoded.pixels, np.asarray(image)) <= 3

    @pytest.mark.parametrize(
        ("file_format", "most", "dtype", "brightest"),
        [
            *((file_format, 65535, np.uint16, 255) for file_format in ("PNG", "TIFF", "JPEG2000", "PPM")),
            pytest.param("TIFF", 4095, np.uint16, 255, id="12 bits of a microscope"),
            pytest.param("TIFF", 1000, np.uint16, 249, id="10 bits"),
            pytest.param("TIFF", 200, np.int32, 200, id="8 bits, stored in 32"),
            pytest.param("TIFF", 3_000_000, np.int32, 255, id="more than 16 bits"),
            pytest.param("TIFF", 3, np.float32, 255, id="floats"),
        ],
    )
    def test_more_than_8_bits_are_scaled_and_not_clipped(self, file_format, most, dtype, brightest):
        values = np.linspace(0, most, 60 * 40).reshape(40, 60).astype(dtype)
        pixels = decode_image(encoded(values, file_format), LIMIT).pixels
        assert np.abs(pixels - values[..., None] * (brightest / most)).max() < 1.1

    @pytest.mark.parametrize(("most", "dtype"), [(4095, np.uint16), (0.5, np.float32)], ids=["12 bits", "floats"])
    def test_a_tiff_of_three_colours_in_more_than_8_bits_is_read(self, most, dtype):
        red, green, blue = (np.linspace(0, most / part, 60 * 40).reshape(40, 60).astype(dtype) for part in (1, 2, 4))
        pixels = decode_image(cv2.imencode(".tif", np.dstack([blue, green, red]))[1].tobytes(), LIMIT).pixels
        assert pixels[-1, -1].tolist() == [255, 127, 63]

    @pytest.mark.parametrize(
        ("content", "plain"),
        [
            pytest.param(encoded(SMOOTH, pnginfo=COMMENT, dpi=(9, 9), icc_profile=b"no profile"), PNG, id="notes in a png"),
            *(pytest.param(PNG[:-cut], PNG, id=f"a png that lacks {cut} bytes of its end") for cut in (1, 8, 12)),
            *(pytest.param(JPEG[:-cut], JPEG, id=f"a jpeg that lacks {cut} bytes of its end") for cut in (1, 2)),
            pytest.param(JPEG + b"trailer" * 9, JPEG, id="data behind the end of a jpeg"),
        ],
    )
    def test_what_lies_beside_the_pixels_changes_none(self, content, plain):
        assert np.array_equal(decode_image(content, LIMIT).pixels, decode_image(plain, LIMIT).pixels)

    @pytest.mark.parametrize(
        "header",
        [
            pytest.param(b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\nEXPOSURE=1.0\n\n", id="a line behind the format"),
            pytest.param(b"#?RGBE\nGAMMA=1\n# " + b"x" * 200 + b"\nFORMAT=32-bit_rle_rgbe\n\n", id="a long comment"),
            pytest.param(b"#?RADIANCE\n\n", id="no format"),
        ],
    )
    def test_radiance_is_read_whatever_stands_in_its_header_but_for_other_colours(self, header):
        plain = cv2.imencode(".hdr", SMOOTH.astype(np.float32) / 255)[1].tobytes()
        other = header + plain[plain.index(b"-Y") :]
        assert difference(decode_image(other, LIMIT).pixels, decode_image(plain, LIMIT).pixels) == 0
        assert refusal(plain.replace(b"rle_rgbe", b"rle_xyze")) == "not_an_image"

    @pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 100}], ids=str)
    @pytest.mark.parametrize("image", [SMOOTH, NOISE], ids=["smooth", "noise"])
    def test_a_jpeg_that_lacks_more_than_the_marker_of_its_end_is_truncated(self, image, options):
        content = encoded(image, "JPEG", **options)
        assert [refusal(content[:-cut]) for cut in (4, 10, 20)] == ["truncated"] * 3

    def test_a_jpeg_with_restarts_that_is_cut_is_not_whole(self):
        content = encoded(SMOOTH, "JPEG", subsampling=0, restart_marker_blocks=2)
        assert {refusal(content[:-cut]) for cut in range(2, 60)} == {"truncated"}

    def test_an_embedded_thumbnail_does_not_pass_for_the_end_of_a_truncated_jpeg(self):
        exif = Image.Exif()
        exif[0x010E] = JPEG.decode("latin-1")
        content = encoded(cv2.resize(NOISE, (600, 400)), "JPEG", exif=exif.tobytes() + JPEG)
        assert refusal(content[: len(content) // 2]) == "truncated"

    def test_without_its_package_the_dead_letter_of_a_heic_names_the_extra(self, tmp_path):
        (tmp_path / "pillow_heif.py").write_text("raise ImportError('not installed')")
        (tmp_path / "a.heic").write_bytes(encoded(SMOOTH, "HEIF"))
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from pipeline.feed.decode import decode_image\n"
        code += "failure = decode_image(open(sys.argv[1], 'rb').read(), 1e8)\nprint(failure.reason, failure.message)"
        command = [sys.executable, "-c", code, str(tmp_path / "a.heic")]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
        assert done.stdout == "no_decoder HEIC and HEIF need pillow-heif: pip install 'hybrid-detection-pipeline[heif]'\n"
        assert "no_decoder" in MAY_PASS


class TestScaledDecode:
    FULL = cv2.resize(NOISE, (1600, 1200), interpolation=cv2.INTER_CUBIC)

    @pytest.mark.parametrize(
        ("file_format", "needed_wh", "factor"),
        [
            ("JPEG", (1600, 1200), 1),
            ("JPEG", (534, 400), 1),
            ("JPEG", (533, 400), 2),
            ("JPEG", (266, 200), 4),
            ("JPEG", (134, 100), 4),
            ("JPEG", (133, 101), 4),
            ("JPEG", (133, 100), 8),
            ("JPEG", (10, 7), 8),
            ("PNG", (10, 7), 1),
        ],
    )
    def test_a_jpeg_keeps_one_and_a_half_pixels_for_each_that_the_model_sees(self, file_format, needed_wh, factor):
        """And shows the same as at full scale."""
        content = encoded(self.FULL, file_format, **({"quality": 95} if file_format == "JPEG" else {}))
        decoded = decode_image(content, LIMIT, lambda _: needed_wh)
        assert decoded.image_wh == (1600, 1200)
        assert decoded.pixels.shape == (1200 // factor, 1600 // factor, 3)
        area = cv2.resize(decode_image(content, LIMIT).pixels, decoded.pixels.shape[1::-1], interpolation=cv2.INTER_AREA)
        assert np.abs(decoded.pixels.astype(int) - area).max() <= 6

    @settings(max_examples=40, deadline=None)
    @given(wh=st.tuples(st.integers(1, 130), st.integers(1, 130)), orientation=st.integers(1, 8), progressive=st.booleans())
    def test_odd_sizes_and_orientations_keep_their_geometry(self, wh, orientation, progressive):
        content = encoded(Image.new("RGB", wh, "teal"), "JPEG", exif=exif_of(orientation), progressive=progressive)
        asked = []
        decoded = decode_image(content, LIMIT, lambda upright: asked.append(upright) or (5, 5))
        upright = wh[::-1] if orientation >= 5 else wh
        factor = next((f for f in (8, 4, 2) if min(wh) // f >= 7.5), 1)
        assert asked == [upright] == [decoded.image_wh]
        assert decoded.pixels.shape[1::-1] == tuple(math.ceil(side / factor) for side in upright)
