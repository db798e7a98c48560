"""The commands of docs/tutorial.md lead from photos with labels to which model is better, as they stand there."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures import REPO, fixtures_dir

PAGE = (REPO / "docs" / "tutorial.md").read_text(encoding="utf-8")
COMMANDS = [line.strip() for line in PAGE.splitlines() if line.startswith("    ")]
DOWNLOADED = {
    "nano.cfg": "mobilenetv2-yolov3-nano.cfg",
    "nano.weights": "mobilenetv2-yolov3-nano.weights",
    "fastest.cfg": "yolo-fastest-1.1.cfg",
    "fastest.weights": "yolo-fastest-1.1.weights",
    "coco.names": "coco.names",
}


def download(folder: Path) -> None:
    """Puts what the page downloads into a folder: seven photos in place of 128, labelled by another model."""
    for name, of_fixtures in DOWNLOADED.items():
        shutil.copy(fixtures_dir() / "darknet" / of_fixtures, folder / name)
    images, labels = (folder / "coco128" / kind / "train2017" for kind in ("images", "labels"))
    images.mkdir(parents=True)
    labels.mkdir(parents=True)
    models = json.loads((fixtures_dir() / "photos_reference_opencv.json").read_text())["models"]
    for place, image in models["mobilenetv2-yolov3-nano-coco@416"]["images"].items():
        shutil.copy(fixtures_dir() / place, images)
        w, h = image["width"], image["height"]
        boxes = [(found["class_id"], *found["box"]) for found in image["detections"] if found["score"] >= 0.4]
        lines = [f"{c} {(a + x) / 2 / w} {(b + y) / 2 / h} {(x - a) / w} {(y - b) / h}\n" for c, a, b, x, y in boxes]
        (labels / Path(place).with_suffix(".txt").name).write_text("".join(lines))


def test_the_page_downloads_all_that_its_commands_use():
    downloads = " ".join(line for line in COMMANDS if line.startswith("curl "))
    assert all(name in downloads for name in DOWNLOADED) and "coco128.zip" in downloads


@pytest.mark.matrix
@pytest.mark.slow
def test_the_commands_lead_from_photos_with_labels_to_which_model_is_better(tmp_path):
    download(tmp_path)
    said = []
    for command in COMMANDS:
        program, *words = shlex.split(command.replace("detect-objects doctor", "true"))
        runs = {"cp": ["cp"], "python": [sys.executable], "detect-objects": [sys.executable, "-m", "pipeline"]}
        if program not in runs or "venv" in words:
            continue
        done = subprocess.run([*runs[program], *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        said += done.stdout.splitlines()
    shown = [line for line in COMMANDS if line.startswith(("AP at IoU", "at confidence", "not shown to differ"))]
    assert len(shown) == 4 and {*shown} <= {*said}, "the figures of the page are those of the commands"
    page = (tmp_path / "nano.html").read_text(encoding="utf-8").replace("<wbr>", "")  # places at which a long name may break
    assert "<b>out-nano/</b> beside the labels of <b>coco128/labels/train2017</b>" in page and "data:image/jpeg;base64," in page
