"""A run in FiftyOne: the files that FiftyOne imports, and FiftyOne itself where there is one."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pipeline.commands import view
from tests.models.test_evaluate import found, row, truth, write_lines

LOADED = """
import pathlib, sys
import fiftyone
from pipeline.commands import view
dataset = view.loaded(fiftyone, pathlib.Path(sys.argv[1]))
print([dataset.count(), *(int(dataset.sum(f"errors_{kind}")) for kind in ("tp", "fp", "fn"))])
"""


@pytest.fixture
def photos(tmp_path):
    """Two files of images, and the rows of them: a cat that is found, and one that is missed and taken for a dog."""
    (tmp_path / "photos").mkdir()
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / "photos" / name).touch()
    rows = [row(f"{tmp_path}/photos/a.jpg", found()), row(f"{tmp_path}/photos/b.jpg", found("dog", class_id=1))]
    write_lines(tmp_path / "rows.jsonl", rows)
    (tmp_path / "truth.json").write_text(json.dumps(truth()))
    return tmp_path


def exported(folder, *flags):
    code = view.main([str(folder / "rows.jsonl"), "--export", str(folder / "export"), *map(str, flags)])
    return code, {path.stem: json.loads(path.read_text())["labels"] for path in sorted((folder / "export").glob("*"))}


def test_boxes_are_shares_of_the_image_by_its_absolute_path(photos):
    code, files = exported(photos, "--ground-truth", photos / "truth.json")
    box = pytest.approx([10 / 640, 10 / 480, 100 / 640, 100 / 480])
    a, b = (f"{photos}/photos/{name}" for name in ("a.jpg", "b.jpg"))
    assert code == 0
    assert files["detections"] == {
        a: [{"label": "cat", "bounding_box": box, "confidence": 0.9}],
        b: [{"label": "dog", "bounding_box": box, "confidence": 0.9}],
    }
    assert files["ground_truth"] == {image: [{"label": "cat", "bounding_box": box}] for image in (a, b)}


def test_images_that_have_moved_are_found_below_the_named_folder(photos, capsys):
    (photos / "photos").rename(photos / "moved")
    assert exported(photos) == (2, {})
    assert capsys.readouterr().err.count("2 of 2 images not on this disk") == 1
    (photos / "moved" / "b.jpg").unlink()
    code, files = exported(photos, "--images", photos / "moved")
    assert (code, list(files["detections"])) == (0, [f"{photos}/moved/a.jpg"])
    assert "warning: 1 of 2 images not on this disk" in capsys.readouterr().err


def test_images_of_an_archive_are_found_where_it_is_unpacked(photos):
    text = (photos / "rows.jsonl").read_text()
    (photos / "rows.jsonl").write_text(text.replace("/photos/", "/photos.zip#"))
    code, files = exported(photos, "--images", photos / "photos", "--ground-truth", photos / "truth.json")
    assert (code, list(files["detections"])) == (0, [f"{photos}/photos/a.jpg", f"{photos}/photos/b.jpg"])
    assert files["ground_truth"].keys() == files["detections"].keys()


def test_an_export_without_labels_takes_those_of_an_earlier_one_away(photos):
    """FiftyOne would count the new detections by labels that they were not asked with."""
    assert exported(photos, "--ground-truth", photos / "truth.json")[1].keys() == {"detections", "ground_truth"}
    code, files = exported(photos)
    assert (code, [*files]) == (0, ["detections"])


@pytest.mark.parametrize("name", ["detections.json", "ground_truth.json"])
def test_an_export_replaces_no_file_of_others(photos, capsys, name):
    """Labels in COCO's format may have such a name."""
    (photos / "export").mkdir()
    labels = photos / "export" / name
    labels.write_text(json.dumps(truth()))
    for flags in ([], ["--ground-truth", photos / "truth.json"]):
        assert view.main([str(photos / "rows.jsonl"), "--export", str(photos / "export"), *map(str, flags)]) == 2
        assert f"{labels}: is a file that this command did not write" in capsys.readouterr().err
    assert [*labels.parent.iterdir()] == [labels] and json.loads(labels.read_text()) == truth()


def test_two_rows_of_an_image_are_refused(photos, capsys):
    write_lines(photos / "rows.jsonl", [row("a.jpg"), row("a.jpg")])
    assert exported(photos)[0] == 2
    assert "a.jpg has 2 rows, each image may have one row" in capsys.readouterr().err


def test_without_fiftyone_one_line_names_the_extra(photos, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fiftyone", None)
    assert view.main([str(photos / "rows.jsonl")]) == 2
    said = capsys.readouterr().err
    assert "hybrid-detection-pipeline[fiftyone]" in said and said.count("\n") == 1


class FiftyOneConfigError(Exception):
    """FiftyOne raises it where it can neither start MongoDB nor connect to one."""


def test_without_mongodb_one_line_says_what_to_do(photos, monkeypatch, capsys):
    def refuses():
        raise FiftyOneConfigError("MongoDB could not be installed on your system")

    core = SimpleNamespace(config=SimpleNamespace(FiftyOneConfigError=FiftyOneConfigError))
    types = SimpleNamespace(FiftyOneImageDetectionDataset=None)
    monkeypatch.setitem(sys.modules, "fiftyone", SimpleNamespace(core=core, Dataset=refuses, types=types))
    assert view.main([str(photos / "rows.jsonl")]) == 2
    said = capsys.readouterr().err
    assert "FIFTYONE_DATABASE_URI" in said and "--export" in said and said.count("\n") == 1


@pytest.mark.skipif(
    not os.environ.get("FIFTYONE_PYTHON"),
    reason="needs MongoDB; FIFTYONE_PYTHON=<path> names the Python of an environment with FiftyOne and this project",
)
def test_fiftyone_counts_what_is_right_wrong_and_missed(photos):
    assert exported(photos, "--ground-truth", photos / "truth.json")[0] == 0
    command = [os.environ["FIFTYONE_PYTHON"], "-c", LOADED, str(photos / "export")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[2, 1, 1, 1]"
