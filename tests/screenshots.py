"""`python -m tests.screenshots docs`: pictures of the report, the evaluation and the live page of the demo, with Chromium."""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import cv2
import numpy as np

from pipeline import run
from pipeline.commands import evaluate
from pipeline.config import load_config
from pipeline.monitoring.http_server import served
from pipeline.monitoring.live_page import HOST, LivePage
from pipeline.stats.counted import COUNTED
from pipeline.stats.samples import REPORT_SAMPLES
from tests.fixtures import REPO
from tests.monitoring.browser import running_chromium

DEMO = ["--model", "digits", "--score-threshold", "0.3", "--samples", "4"]
WIDTH, HEIGHTS, SCALE = 1100, {"report": 800, "evaluation": 1100, "live": 800}, 0.75  # the rest of a page is cut off
SAMPLE = "001-*.jpg"  # beside the report in the README


@contextlib.contextmanager
def pages(folder: str) -> Iterator[dict[str, str]]:
    """Runs the demo and its evaluation in a folder; yields the addresses of the pages while the live one is served."""
    os.chdir(folder)
    os.symlink(REPO / "models", "models")  # so that no page shows where the repository lies
    stats = COUNTED.begin_counting()
    config = load_config([], {"output": "out", "detect.score_threshold": 0.3})
    live = LivePage(config, lambda: COUNTED.stats_of(stats))
    COUNTED.samples = REPORT_SAMPLES
    if run.main(["--input", "models/digits/samples/*.jpg", "--output", "out", *DEMO]):
        raise SystemExit("the demo failed")
    evaluate.main(
        ["--detections", "out", "--ground-truth", "models/digits/samples/ground_truth.json", "--page", "evaluation.html"]
    )
    with served(HOST, 0, "page_port", {"/": live.answer}) as port:
        yield {
            "report": f"file://{folder}/out/report.html",
            "evaluation": f"file://{folder}/evaluation.html",
            "live": f"http://{HOST}:{port}/",
        }


def main(pictures: pathlib.Path) -> None:
    """Writes all pictures into a folder."""
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, pages(folder) as addresses, running_chromium() as browser:
        for name, address in addresses.items():
            page = browser.new_page(device_scale_factor=SCALE)
            page.set_viewport_size({"width": WIDTH, "height": HEIGHTS[name]})
            page.goto(address)
            page.screenshot(path=pictures / f"{name}.jpg", quality=70)
        report, sample = cv2.imread(f"{pictures}/report.jpg"), cv2.imread(glob.glob(f"{folder}/out/samples/{SAMPLE}")[0])
        height = report.shape[0]
        sample = cv2.resize(sample, (sample.shape[1] * height // sample.shape[0], height), interpolation=cv2.INTER_AREA)
        cv2.imwrite(f"{pictures}/picture.jpg", np.hstack([sample, report]), [cv2.IMWRITE_JPEG_QUALITY, 80])


if __name__ == "__main__":
    if not shutil.which("chromium"):
        print("no pictures of the pages were taken: install Chromium (apt-get install chromium)")
    else:
        main(pathlib.Path(sys.argv[1]).resolve())
