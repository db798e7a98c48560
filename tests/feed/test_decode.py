"""Decoding: any image file ends as upright RGB pixels or as a reason, and takes no more memory than it may."""

import io
import math

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from pipeline import failures
from pipeline.failures import ImageError
from pipeline.feed.decode import decode_image
from tests import hostile_images
from tests.fixtures import fixtures_dir

LIMIT = 1e8
RANDOM = np.random.default_rng(0)
NOISE = RANDOM.integers(0, 255, (40, 60, 3), np.uint8)
SMOOTH = cv2.resize(NOISE[:4, :6], (60, 40), interpolation=cv2.INTER_CUBIC)
REASONS = set(failures.REASONS["decode"])


def encoded(image, file_format="PNG", **options):
    return hostile_images.encoded(Image.fromarray(image) if isinstance(image, np.ndarray) else image, file_format, **options)


def as_pillow_sees_it(content):
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))


def refusal(content, max_pixels=LIMIT):
    with pytest.raises(ImageError) as caught:
        decode_image(content, max_pixels)
    assert "\n" not in str(caught.value)
    return caught.value.reason


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

    @pytest.mark.filterwarnings("ignore")
    @settings(max_examples=200, deadline=None)
    @given(
        exif=st.binary(max_size=60)
        | st.builds(
            lambda head, rest: head + rest, st.sampled_from([b"II*\0\x08\0\0\0", b"MM\0*\0\0\0\x08"]), st.binary(max_size=60)
        )
    )
    def test_a_damaged_block_of_exif_leaves_the_image_as_it_is_or_turns_it(self, exif):
        for content in (encoded(SMOOTH, "JPEG", exif=exif), encoded(SMOOTH, exif=exif), encoded(SMOOTH, "WEBP", exif=exif)):
            assert set(decode_image(content, LIMIT).image_wh) == {60, 40}

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

    @pytest.mark.parametrize(
        ("most", "dtype"), [(4095, np.uint16), (1000, np.uint16), (200, np.int32), (3_000_000, np.int32)], ids=str
    )
    def test_a_tiff_of_fewer_bits_than_it_is_stored_in_is_no_dark_image(self, most, dtype):
        """As of a microscope with 12 bits, or a depth camera."""
        values = np.linspace(0, most, 60 * 40).reshape(40, 60).astype(dtype)
        pixels = decode_image(encoded(values, "TIFF"), LIMIT).pixels
        assert pixels.max() > 128 and (np.diff(pixels[..., 0].ravel().astype(int)) >= 0).all()

    @pytest.mark.parametrize(("most", "dtype"), [(4095, np.uint16), (0.5, np.float32)], ids=["12 bits", "floats"])
    def test_a_tiff_of_three_colours_in_more_than_8_bits_is_read(self, most, dtype):
        red, green, blue = (np.linspace(0, most / part, 60 * 40).reshape(40, 60).astype(dtype) for part in (1, 2, 4))
        pixels = decode_image(cv2.imencode(".tif", np.dstack([blue, green, red]))[1].tobytes(), LIMIT).pixels
        assert pixels[-1, -1].tolist() == [255, 127, 63]

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
        image = Image.fromarray(SMOOTH).convert(mode)
        pixels = decode_image(encoded(image, "JPEG2000", **options), LIMIT).pixels
        assert np.array_equal(pixels, np.asarray(image.convert("RGB")))

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

    @pytest.mark.parametrize(
        "header",
        [
            pytest.param(b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\nEXPOSURE=1.0\n\n", id="a line behind the format"),
            pytest.param(b"#?RGBE\nGAMMA=1\n# " + b"x" * 200 + b"\nFORMAT=32-bit_rle_rgbe\n\n", id="a long comment"),
            pytest.param(b"#?RADIANCE\n\n", id="no format"),
        ],
    )
    def test_radiance_is_read_whatever_stands_in_its_header(self, header):
        plain = cv2.imencode(".hdr", SMOOTH.astype(np.float32) / 255)[1].tobytes()
        other = header + plain[plain.index(b"-Y") :]
        assert np.array_equal(decode_image(other, LIMIT).pixels, decode_image(plain, LIMIT).pixels)

    def test_radiance_of_other_colours_is_not_read(self):
        plain = cv2.imencode(".hdr", SMOOTH.astype(np.float32))[1].tobytes()
        assert refusal(plain.replace(b"rle_rgbe", b"rle_xyze")) == "not_an_image"

    def test_a_jpeg_with_data_behind_its_end_is_whole(self):
        content = encoded(SMOOTH, "JPEG")
        assert np.array_equal(decode_image(content + b"trailer" * 9, LIMIT).pixels, decode_image(content, LIMIT).pixels)

    @pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 100}], ids=str)
    @pytest.mark.parametrize("image", [SMOOTH, NOISE], ids=["smooth", "noise"])
    def test_a_jpeg_that_lacks_the_marker_of_its_end_alone_is_whole(self, image, options):
        """Browsers show it, too. One whose pixels are cut is not."""
        content = encoded(image, "JPEG", **options)
        for cut in (1, 2):
            assert np.array_equal(decode_image(content[:-cut], LIMIT).pixels, decode_image(content, LIMIT).pixels)
        assert [refusal(content[:-cut]) for cut in (4, 10, 20)] == ["truncated"] * 3

    def test_a_jpeg_with_restarts_that_is_cut_is_not_whole(self):
        content = encoded(SMOOTH, "JPEG", subsampling=0, restart_marker_blocks=2)
        assert {refusal(content[:-cut]) for cut in range(2, 60)} == {"truncated"}

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
