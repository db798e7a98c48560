"""Images are refused on their header: before their pixels take memory."""

import subprocess
import sys

import pytest
from PIL import Image

from tests.conftest import REPO

MEASURE = """
import sys
from pathlib import Path
from pipeline.detect.decode import decode_image
from pipeline.failures import ImageError
content = open(sys.argv[1], "rb").read()
# getrusage begins with what the parent held, which may be more than is measured here
peak = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = peak()
try:
    decode_image(content, 100e6)
except ImageError as err:
    print(err.reason, (peak() - before) // 1024)
"""


@pytest.mark.parametrize("name", ["a.png", "a.gif", "a.tif", "a.bmp", "progressive.jpg"])
def test_an_image_above_the_limit_takes_no_memory(name, tmp_path):
    """144 megapixels would be 432 MB; refusing them takes next to nothing."""
    path = tmp_path / name
    options = {"progressive": True} if name.endswith("jpg") else {"compression": "packbits"} if name.endswith("tif") else {}
    Image.new("1" if name.endswith(("bmp", "tif")) else "L", (12000, 12000)).save(path, **options)
    done = subprocess.run([sys.executable, "-c", MEASURE, path], cwd=REPO, capture_output=True, text=True, timeout=60, check=True)
    reason, megabytes = done.stdout.split()
    assert reason == "too_large"
    assert int(megabytes) < 60
