"""`python -m tests.readme_picture out/demo/samples/004-scene_021.jpg`: makes docs/picture.jpg of what `make demo` left.

It shows the annotated sample beside the report's page.
Needs Chromium, which takes the screenshot of the page.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np

from tests.fixtures import REPO

_WIDTH, _HEIGHT = 1000, 820
_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--hide-scrollbars"]


def screenshot(page: Path, folder: str) -> np.ndarray:
    """The page as Chromium draws it: `(h, w, 3) uint8`, BGR."""
    picture = f"{folder}/page.png"
    command = ["chromium", *_FLAGS, f"--user-data-dir={folder}/profile", f"--window-size={_WIDTH},{_HEIGHT}"]
    subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True, timeout=120)
    return cv2.imread(picture)


def beside(sample: np.ndarray, page: np.ndarray) -> np.ndarray:
    """Both at the page's height, side by side."""
    wide = round(sample.shape[1] * page.shape[0] / sample.shape[0])
    return np.hstack([cv2.resize(sample, (wide, page.shape[0]), interpolation=cv2.INTER_AREA), page])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        both = beside(cv2.imread(sys.argv[1]), screenshot(REPO / "out/demo/report.html", folder))
    cv2.imwrite(str(REPO / "docs/picture.jpg"), cv2.resize(both, None, fx=0.6, fy=0.6, interpolation=cv2.INTER_AREA))
