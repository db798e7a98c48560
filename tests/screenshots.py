"""Pictures of the report, the evaluation and the live page of the demo, taken with Chromium: `make screenshots`.

python -m tests.screenshots .site/pages
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from pipeline import evaluate, run
from pipeline.config import load_config
from pipeline.monitoring.http_server import served
from pipeline.monitoring.live_page import HOST, application
from pipeline.stats.process import PROCESS
from pipeline.stats.samples import REPORT_SAMPLES
from pipeline.stats.summary import JobStats
from tests.fixtures import REPO

WIDTH = 1100
HEIGHTS = {"report": 1150, "evaluation": 1500, "live": 1150}  # pixels; the rest of a page is cut off


@contextlib.contextmanager
def pages(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """Runs the demo and its evaluation into a folder; yields the addresses of the pages while the live one is served."""
    stats, out = JobStats(), f"{folder}/demo"
    config = load_config([], {"output": out, "detect.score_threshold": 0.3})
    live = application(config, lambda: PROCESS.add_model(PROCESS.copy_of(stats)))
    PROCESS.begin_counting(stats)
    PROCESS.samples = REPORT_SAMPLES
    flags = ["--input", f"{REPO}/models/digits/samples/*.jpg", "--output", out, "--model", "digits", "--score-threshold", "0.3"]
    if run.main(flags):
        raise SystemExit("the demo failed")
    truth = f"{REPO}/models/digits/samples/ground_truth.json"
    evaluate.main(["--detections", out, "--ground-truth", truth, "--page", f"{folder}/evaluation.html"])
    with served(HOST, 0, "page_port", {"/": live}) as port:
        yield {
            "report": f"file://{out}/report.html",
            "evaluation": f"file://{folder}/evaluation.html",
            "live": f"http://{HOST}:{port}/",
        }


def take(chromium: str, address: str, picture: pathlib.Path, height: int) -> None:
    """Writes a PNG of the upper part of a page."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                *(chromium, "--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu", f"--user-data-dir={profile}"),
                *(f"--window-size={WIDTH},{height}", f"--screenshot={picture}", address),
            ],
            check=True,
            capture_output=True,
            timeout=600,
        )


def main(folder: str) -> None:
    """Takes all pictures into a folder."""
    pictures = pathlib.Path(folder)
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as demo, pages(pathlib.Path(demo)) as addresses:
        for name, address in addresses.items():
            take("chromium", address, pictures / f"{name}.png", HEIGHTS[name])


if __name__ == "__main__":
    os.chdir(REPO)
    main(sys.argv[1])
