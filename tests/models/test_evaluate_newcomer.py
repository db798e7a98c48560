"""The three commands of docs/evaluation.md lead from a folder of photos with labels to a page."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.fixtures import REPO, fixtures_dir

HERE = {"yolov4.cfg": "yolo-fastest-1.1.cfg", "yolov4.weights": "yolo-fastest-1.1.weights", "608": "320"}  # a model of 1 MB


def shown(page, end):
    """The commands of a page before `end`."""
    text = (REPO / page).read_text(encoding="utf-8").split(end)[0]
    return [line.strip() for line in text.splitlines() if line.startswith("    detect-objects ")]


def test_the_readme_shows_the_same_three_commands_together():
    assert shown("README.md", "A row:")[-3:] == shown("docs/evaluation.md", "## Labels")


def commands():
    lines = shown("docs/evaluation.md", "## Labels")
    return [["-m", "pipeline", *(HERE.get(word, word) for word in shlex.split(line)[1:])] for line in lines]


def write_photos(folder):
    """Photos with labels: what another model found in them with a confidence of 0.4 or more."""
    fixtures = fixtures_dir()
    models = json.loads((fixtures / "photos_reference_opencv.json").read_text())["models"]
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True)
    shutil.copy(fixtures / "darknet/coco.names", folder / "classes.txt")
    for place, image in models["mobilenetv2-yolov3-nano-coco@416"]["images"].items():
        photo = shutil.copy(fixtures / place, folder / "images")
        w, h = image["width"], image["height"]
        boxes = [(found["class_id"], *found["box"]) for found in image["detections"] if found["score"] >= 0.4]
        lines = [f"{c} {(a + x) / 2 / w} {(b + y) / 2 / h} {(x - a) / w} {(y - b) / h}\n" for c, a, b, x, y in boxes]
        (folder / "labels" / os.path.basename(photo)).with_suffix(".txt").write_text("".join(lines))


@pytest.mark.matrix
@pytest.mark.slow
def test_three_commands_lead_from_photos_with_labels_to_a_page(tmp_path):
    write_photos(tmp_path / "photos")
    for name in ("yolo-fastest-1.1.cfg", "yolo-fastest-1.1.weights", "coco.names"):
        shutil.copy(fixtures_dir() / "darknet" / name, tmp_path)
    (tmp_path / "configs").symlink_to(REPO / "configs")
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    assert len(commands()) == 3
    for command in commands():
        run = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
    assert re.search(r"^\d{3} detections in 7 ground-truth images; classes matched by name$", run.stdout, re.MULTILINE)
    page = (tmp_path / "evaluation.html").read_text(encoding="utf-8")
    assert "<b>out/</b> beside the labels of <b>photos/labels</b>" in page
    assert "data:image/jpeg;base64," in page
