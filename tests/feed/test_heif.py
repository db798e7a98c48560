"""HEIC and HEIF, which an extra package reads."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from pipeline.failures import MAY_PASS
from pipeline.feed.decode import decode_image
from tests import hostile_images
from tests.feed.feeding import PIXELS
from tests.fixtures import REPO

LIMIT = 1e8


class TestHeif:
    @pytest.fixture(autouse=True)
    def _opener(self):
        import pillow_heif

        pillow_heif.register_heif_opener()

    @pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
    def test_heic_is_read(self, mode):
        smooth = Image.linear_gradient("L").resize((60, 40))
        content = hostile_images.encoded(smooth.convert(mode), "HEIF", quality=95)
        decoded = decode_image(content, LIMIT)
        assert decoded.image_wh == (60, 40)
        assert np.abs(decoded.pixels.astype(int) - np.asarray(smooth.convert("RGB"))).mean() < 3

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_its_pixels_are_turned_upright(self, orientation):
        exif = Image.Exif()
        exif[0x0112] = orientation
        smooth = Image.linear_gradient("L").resize((64, 48)).convert("RGB")
        content = hostile_images.encoded(smooth, "HEIF", quality=95, exif=exif.tobytes())  # with `irot` and `imir`, as phones do
        as_jpeg = hostile_images.encoded(smooth, "JPEG", quality=95, exif=exif)
        pixels, wanted = (decode_image(one, LIMIT).pixels for one in (content, as_jpeg))
        assert pixels.shape == wanted.shape
        assert np.abs(pixels.astype(int) - wanted).mean() < 3

    def test_of_several_images_the_first_counts(self):
        others = [Image.new("RGB", (30, 20), colour) for colour in ("red", "lime")]
        content = hostile_images.encoded(Image.new("RGB", (60, 40), "blue"), "HEIF", save_all=True, append_images=others)
        decoded = decode_image(content, LIMIT)
        assert decoded.image_wh == (60, 40)
        assert np.abs(decoded.pixels.astype(int) - (0, 0, 255)).max() < 8

    def test_without_its_package_the_dead_letter_names_the_extra(self, tmp_path):
        (tmp_path / "pillow_heif.py").write_text("raise ImportError('not installed')")
        (tmp_path / "a.heic").write_bytes(hostile_images.encoded(Image.fromarray(PIXELS), "HEIF"))
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from pipeline.feed.decode import decode_image\n"
        code += "try: decode_image(open(sys.argv[1], 'rb').read(), 1e8)\nexcept Exception as err: print(err.reason, err)"
        command = [sys.executable, "-c", code, str(tmp_path / "a.heic")]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
        expected = "no_decoder HEIC and HEIF need pillow-heif: pip install 'hybrid-detection-pipeline[heif]'\n"
        assert done.stdout == expected
        assert "no_decoder" in MAY_PASS
