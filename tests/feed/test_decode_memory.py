"""Images are refused on their header: before their pixels take memory."""

import pytest
from PIL import Image

from tests.decoding_process import DecodingProcess


@pytest.fixture(scope="module")
def process():
    with DecodingProcess(max_pixels=100e6) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.png", "a.gif", "a.tif", "a.bmp", "progressive.jpg"])
def test_an_image_above_the_limit_takes_no_memory(process, name, tmp_path):
    """144 megapixels would be 432 MB; refusing them takes next to nothing."""
    path = tmp_path / name
    options = {"progressive": True} if name.endswith("jpg") else {"compression": "packbits"} if name.endswith("tif") else {}
    Image.new("1" if name.endswith(("bmp", "tif")) else "L", (12000, 12000)).save(path, **options)
    outcome = process.decode(path.read_bytes())
    assert outcome.end == "too_large"
    assert outcome.megabytes < 60
