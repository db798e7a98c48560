"""Labels that other tools read: names relative to a root, a list of the images, and all classes of the model."""

import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import supervision as sv
import yaml
from pycocotools.coco import COCO

from models.evaluate.ground_truth import read_truth
from pipeline import run
from pipeline.commands import export
from pipeline.exports.data_set import DataSet, data_set_of
from tests.conftest import write_bright_image
from tests.fixtures import REPO
from tests.real_yolo import run_worker
from tests.shard_rows import VERSION, detected, json_row, write_rows

SCENES = REPO / "models" / "digits" / "samples"
DIGITS = [str(digit) for digit in range(10)]


def unpacked(out, tmp_path, *flags):
    """The YOLO data set that is exported, unpacked."""
    assert export.main([str(out), "--format", "yolo,coco", *flags]) == 0
    with zipfile.ZipFile(f"{out}/exports/yolo.zip") as archive:
        archive.extractall(tmp_path / "set")
        return sorted(archive.namelist())


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The results of a job with the bundled detector over two of its scenes, in `photos/`; no scene shows each digit."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "photos").mkdir()
    for name in ("scene_001.jpg", "scene_003.jpg"):  # 6 and 9; none
        shutil.copy(SCENES / name, folder / "photos")
    assert run.main(["--input", f"{folder}/photos/", "--output", f"{folder}/out", "--model", "digits"]) == 0
    return folder


@pytest.mark.slow
def test_supervision_reads_the_data_set_of_a_folder_of_photos_with_all_classes_of_the_model(job, tmp_path):
    """Its labels are flat, as the photos; also those of classes that no row has have their names."""
    names = unpacked(job / "out", tmp_path)
    assert names == ["classes.txt", "data.yaml", "images.txt", "labels/scene_001.txt", "labels/scene_003.txt"]
    read = sv.DetectionDataset.from_yolo(f"{job}/photos", f"{tmp_path}/set/labels", f"{tmp_path}/set/data.yaml")
    assert read.classes == DIGITS
    assert {os.path.basename(path): len(found) for path, _, found in read} == {"scene_001.jpg": 2, "scene_003.jpg": 0}
    assert yaml.safe_load((tmp_path / "set/data.yaml").read_text()) == {
        "path": ".", "train": "images.txt", "val": "images.txt", "names": DIGITS,
    }  # fmt: skip


@pytest.mark.slow
def test_supervision_and_pycocotools_read_the_same_objects_as_coco(job, tmp_path):
    unpacked(job / "out", tmp_path)
    coco = f"{job}/out/exports/coco"
    read = sv.DetectionDataset.from_coco(f"{job}/photos", f"{coco}/annotations.json")
    assert read.classes == DIGITS
    assert {os.path.basename(path): len(found) for path, _, found in read} == {"scene_001.jpg": 2, "scene_003.jpg": 0}
    images, labels = COCO(f"{coco}/images.json"), COCO(f"{coco}/annotations.json")
    assert sorted(image["file_name"] for image in images.imgs.values()) == ["scene_001.jpg", "scene_003.jpg"]
    results = images.loadRes(f"{coco}/results.json")
    assert [(one["image_id"], one["category_id"]) for one in results.anns.values()] == [
        (one["image_id"], one["category_id"]) for one in labels.anns.values()
    ]
    assert [category["name"] for category in images.loadCats(images.getCatIds())] == DIGITS


@pytest.mark.slow
def test_the_photos_beside_the_labels_are_a_data_set_for_trainers_and_for_evaluate(job, tmp_path):
    """A link to the photos is enough: each line of images.txt leads to a photo, and its label lies at the place of trainers."""
    unpacked(job / "out", tmp_path)
    (tmp_path / "set" / "images").symlink_to(job / "photos")
    for line in (tmp_path / "set" / "images.txt").read_text().splitlines():
        image = tmp_path / "set" / line
        assert image.is_file() and (tmp_path / "set" / "labels" / f"{image.stem}.txt").is_file()
    truth = read_truth(tmp_path / "set")
    assert (truth.class_names, len(truth.file_names), len(truth.objects.images)) == (DIGITS, 2, 2)


@pytest.mark.matrix
def test_ultralytics_reads_the_data_set_and_trains_an_epoch_on_it(job, tmp_path):
    """In the folder of data.yaml, as docs/exports.md shows it."""
    unpacked(job / "out", tmp_path)
    (tmp_path / "set" / "images").symlink_to(job / "photos")
    run_worker("train", "data.yaml", tmp_path, cwd=tmp_path / "set")
    read = json.loads((tmp_path / "read.json").read_text())
    assert {name: len(objects) for name, objects in read.items()} == {"scene_001.jpg": 2, "scene_003.jpg": 0}
    written = [line.split() for line in (tmp_path / "set" / "labels" / "scene_001.txt").read_text().splitlines()]
    assert read["scene_001.jpg"] == [
        [DIGITS[int(digit)], *(pytest.approx(float(each)) for each in box)] for digit, *box in written
    ]
    assert (tmp_path / "train" / "weights" / "last.pt").is_file()


def rows_of(tmp_path, *names):
    for name in names:
        write_bright_image(tmp_path / "photos" / name, (64, 48), (10, 10, 30, 30))
    out = f"{tmp_path}/out"
    write_rows(out, [detected(f"{tmp_path}/photos/{name}") for name in names])
    return out


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        pytest.param([], ["labels/x/1.txt", "labels/y/2.txt"], id="the folder that they have in common"),
        pytest.param(["--root", "{}"], ["labels/photos/x/1.txt", "labels/photos/y/2.txt"], id="a folder above"),
        pytest.param(["--root", "{}/photos/x/"], ["labels/1.txt", "labels{}/photos/y/2.txt"], id="of some"),
    ],
)
def test_names_of_labels_count_from_the_root(flags, names, tmp_path):
    """An image outside of it has its whole path."""
    out = rows_of(tmp_path, "x/1.png", "y/2.png")
    found = unpacked(out, tmp_path, *(flag.format(tmp_path) for flag in flags))
    assert [name for name in found if name.startswith("labels/")] == sorted(name.format(tmp_path) for name in names)
    images = json.loads(Path(f"{out}/exports/coco/images.json").read_bytes())["images"]
    stems = [f"labels/{os.path.splitext(image['file_name'])[0].lstrip('/')}.txt" for image in images]
    assert sorted(stems) == sorted(name.format(tmp_path) for name in names)


def test_a_root_without_images_is_one_line(tmp_path, capsys):
    out = rows_of(tmp_path, "x/1.png")
    assert export.main([out, "--format", "yolo", "--root", f"{tmp_path}/out"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"root {tmp_path}/out: expected a folder of images, found none of them in it" in error
    assert f"{tmp_path}/photos/x/1.png" in error


@pytest.mark.parametrize(
    ("uris", "root"),
    [
        ([], ""),
        (["a.jpg"], ""),
        (["/p/a.jpg"], "/p"),
        (["/p/a.jpg", "/q/b.jpg"], ""),
        (["/p/x/a.jpg", "/p/xy/b.jpg"], "/p"),
        (["gs://b/p/a.jpg", "gs://b/p/q/b.jpg"], "gs://b/p"),
        (["gs://b/a.jpg", "s3://b/b.jpg"], ""),
        (["/p/a.zip#x/1.jpg", "/p/a.zip#y/2.jpg"], "/p"),
    ],
    ids=repr,
)
def test_the_root_is_the_deepest_folder_that_all_images_have_in_common(uris, root):
    data_set, models = data_set_of(map(json_row, uris))
    assert (data_set, len(models)) == (DataSet(root), min(len(uris), 1))


def test_class_names_of_an_older_summary_are_those_of_the_rows(tmp_path):
    """0.1.0 did not note the names of classes that no row has; another file of that name is none."""
    out = rows_of(tmp_path, "x/1.png")
    for folder, summary in [("", {"model": {"name": VERSION.model, "version": VERSION.version}}), ("runs/a/", [5])]:
        os.makedirs(f"{out}/{folder}", exist_ok=True)
        with open(f"{out}/{folder}summary.json", "w") as file:
            json.dump(summary, file)
    unpacked(out, tmp_path)
    assert yaml.safe_load((tmp_path / "set/data.yaml").read_text())["names"] == ["class_0", "class_1", "class_2", "cat"]
