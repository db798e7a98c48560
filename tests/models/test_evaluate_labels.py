"""Labels of other tools: each form gives the ground truth that the same boxes have as COCO annotations."""

import json
import re
import sys
import zipfile

import pytest

from models.evaluate import FIGURES, evaluate
from models.evaluate.detection_rows import RowsError
from models.evaluate.ground_truth import read_truth
from pipeline.exports.write_labels import write_yolo as write_yolo_labels
from tests.models.test_evaluate import error_of, found, row, write_lines

NAMES = ["cat", "dog", "potted plant"]
WIDTH, HEIGHT = 640, 480
# (image, class, xywh): a and b have objects, c has none
BOXES = [("a", 0, (10, 20, 200, 100)), ("a", 1, (300, 200, 40, 50)), ("b", 2, (0, 0, 640, 480)), ("b", 0, (100, 100, 16, 16))]
COCO = {
    "images": [{"id": n, "file_name": f"{image}.jpg", "width": WIDTH, "height": HEIGHT} for n, image in enumerate("abc")],
    "annotations": [{"image_id": "abc".index(image), "category_id": c + 1, "bbox": list(box)} for image, c, box in BOXES],
    "categories": [{"id": n + 1, "name": name} for n, name in enumerate(NAMES)],
}


def rows(folder="/photos", images="abc"):
    """What a detector finds there: the objects, a little beside their places."""
    boxes = [(image, c, (x + 2, y, x + w, y + h - 1)) for image, c, (x, y, w, h) in BOXES]
    objects = [(image, found(NAMES[c], box, 0.9 - n / 10, class_id=c)) for n, (image, c, box) in enumerate(boxes)]
    return [row(f"{folder}/{image}.jpg", *(one for of, one in objects if of == image)) for image in images]


def yolo_line(c, box):
    x, y, w, h = box
    return f"{c} {(x + w / 2) / WIDTH} {(y + h / 2) / HEIGHT} {w / WIDTH} {h / HEIGHT}\n"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def write_yolo(folder, images="abc"):
    for image in images:
        write(folder / f"{image}.txt", "".join(yolo_line(c, box) for of, c, box in BOXES if of == image))
    return folder


def yolo(top):
    write(top / "classes.txt", "\n".join(NAMES) + "\n")
    return write_yolo(top / "labels")


def yolo_beside_images(top):
    """`c` is an image without a label file: it has no objects."""
    write(top / "obj.names", "\n".join(NAMES))
    write(top / "c.jpg", "")
    return write_yolo(top, "ab")


def yolo_dataset(top):
    for image in "abc":
        write(top / f"images/val/{image}.jpg", "")
    write_yolo(top / "labels/val", "ab")
    write_yolo(top / "labels/train", "x")
    names = "".join(f"  {n}: {name}\n" for n, name in enumerate(NAMES))
    return write(top / "data.yaml", f"path: ../somewhere/{top.name}\ntrain: images/train\nval: images/val\nnames:\n{names}")


def yolo_dataset_with_lists(top):
    yolo_dataset(top)
    write(top / "val.txt", "".join(f"./images/val/{image}.jpg\n" for image in "abc"))
    return write(top / "lists.yaml", f"val: [val.txt]\nnames: {json.dumps(NAMES)}\n")


def voc_object(c, x, y, w, h):
    corners = f"<xmin>{x + 1}</xmin><ymin>{y + 1}</ymin><xmax>{x + w}</xmax><ymax>{y + h}</ymax>"
    return f"<object><name>{NAMES[c]}</name><difficult>0</difficult><bndbox>{corners}</bndbox></object>"


def voc(top):
    for image in "abc":
        objects = "".join(voc_object(c, *box) for of, c, box in BOXES if of == image)
        size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>"
        write(top / f"Annotations/{image}.xml", f"<annotation><filename>other.png</filename>{size}{objects}</annotation>")
    return top


def fiftyone_coco(top):
    write(top / "labels.json", json.dumps(COCO))
    return top


FORMS = [yolo, yolo_beside_images, yolo_dataset, yolo_dataset_with_lists, voc, fiftyone_coco]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_each_form_has_the_figures_of_the_same_coco_annotations(tmp_path, form):
    expected, result = evaluate(rows(), COCO), evaluate(rows(), form(tmp_path))
    assert {key: result[key] for key in FIGURES} == {key: pytest.approx(expected[key], abs=1e-9) for key in FIGURES}
    assert result["per_class"] == {name: pytest.approx(value) for name, value in expected["per_class"].items()}
    assert (result["images"], result["images_without_row"], result["classes_by"]) == (3, 0, "name")
    assert 0.1 < result["AP"] < 1


def test_labels_without_names_have_the_classes_of_the_model(tmp_path):
    result = evaluate(rows(), write_yolo(tmp_path / "labels"))
    assert (result["AP"], result["classes_by"]) == (pytest.approx(evaluate(rows(), COCO)["AP"]), "class_id")

    assert {name: value for name, value in result["per_class"].items() if value is not None} == {
        name: pytest.approx(value) for name, value in evaluate(rows(), COCO)["per_class"].items() if value is not None
    }, "classes have the names of the rows"


@pytest.mark.parametrize("place", ["", "labels/"])
def test_names_are_those_of_the_data_yaml_above_the_labels(place, tmp_path):
    """Of `labels/` or of a split in it; a file of names in the folder wins."""
    yolo_dataset(tmp_path)
    (tmp_path / place).mkdir(exist_ok=True)
    labels = tmp_path / "labels" / "val" if place else tmp_path / "labels"
    assert list(read_truth(labels).class_names) == NAMES
    write(labels / "classes.txt", "\n".join(["other", *NAMES]))
    assert next(iter(read_truth(labels).class_names)) == "other"
    (labels / "classes.txt").unlink()
    write(tmp_path / "data.yaml", "names: [a, 'b\n")
    with pytest.raises(RowsError, match=r"data.yaml: expected the key names"):
        read_truth(labels)


@pytest.mark.parametrize("end", ["", "\n", "\r\n\n \n"], ids=repr)
def test_blank_lines_may_follow_the_last_name(tmp_path, end):
    write(tmp_path / "labels/a.txt", yolo_line(*BOXES[0][1:]))
    write(tmp_path / "labels/classes.txt", "\n".join(NAMES) + end)
    assert list(read_truth(tmp_path / "labels").class_names) == NAMES


def test_a_polygon_counts_as_its_box(tmp_path):
    write(tmp_path / "a.txt", "1 0.1 0.2 0.5 0.2 0.5 0.6 0.3 0.7\n")
    assert read_truth(tmp_path).objects.xyxy[0] == pytest.approx([0.1, 0.2, 0.5, 0.7])


def test_label_files_of_one_name_are_told_apart_by_their_folders(tmp_path):
    write(tmp_path / "labels/x/a.txt", yolo_line(*BOXES[0][1:]))
    write(tmp_path / "labels/y/a.txt", "")
    assert evaluate([*rows("/photos/x", "a"), *rows("gs://b/y", "a")], tmp_path / "labels")["images_without_row"] == 0
    with pytest.raises(RowsError, match=r"/photos/z/a.jpg fits 2 ground-truth images: x/a and y/a"):
        evaluate(rows("/photos/z", "a"), tmp_path / "labels")


def test_a_difficult_object_counts_neither_as_found_nor_as_missed(tmp_path):
    voc(tmp_path)
    path = tmp_path / "Annotations/a.xml"
    path.write_text(path.read_text().replace("<difficult>0</difficult>", "<difficult>1</difficult>"))
    all_rows, without = (evaluate(each, tmp_path)["per_class"] for each in (rows(), rows(images="bc")))
    assert all_rows["dog"] is without["dog"] is None
    assert all_rows["cat"] == without["cat"]


def test_labels_that_the_pipeline_wrote_for_frames_and_members_are_labels_of_these(tmp_path):
    """A frame's name ends with a time, which is no ending of a file."""
    names = {"a": "clip.mp4#t=0.480", "b": "clip.mp4#t=1", "c": "photos.zip#c.jpg"}
    written = rows(folder="x")
    for each in written:
        each["image"]["uri"] = f"x/{names[each['image']['uri'][2]]}"
    with open(tmp_path / "rows.yolo.zip", "wb") as file:
        write_yolo_labels(written, file)
    with zipfile.ZipFile(tmp_path / "rows.yolo.zip") as archive:
        assert {f"labels/x/{name.removesuffix('.jpg')}.txt" for name in names.values()} < {*archive.namelist()}
        archive.extractall(tmp_path)
    for labels in ("labels", "", "data.yaml"):  # the last two list the images by name
        result = evaluate(written, tmp_path / labels)
        assert (result["AP50"], result["images"], result["images_without_row"]) == (pytest.approx(1), 3, 0), labels


def test_images_that_differ_by_their_endings_alone_have_their_own_labels(tmp_path):
    """Ultralytics takes the labels of 1.jpg for 1.png in the same folder, too, so the list of images has the first one only."""
    written = rows(folder="x")
    for each, name in zip(written, ("y/1.jpg", "y/1.png", "1.png"), strict=True):
        each["image"]["uri"] = f"x/{name}"
    with open(tmp_path / "rows.yolo.zip", "wb") as file:
        (note,) = write_yolo_labels(written, file)
    assert note.startswith("yolo.zip does not list 1 image in images.txt, such as x/y/1.png: ")
    with zipfile.ZipFile(tmp_path / "rows.yolo.zip") as archive:
        assert {f"labels/x/{name}.txt" for name in ("y/1", "y/1.png", "1")} < {*archive.namelist()}
        assert archive.read("images.txt").decode().split() == ["./images/x/y/1.jpg", "./images/x/1.png"]
        archive.extractall(tmp_path)
    result = evaluate(written, tmp_path / "labels")
    assert (result["AP50"], result["images"], result["images_without_row"]) == (pytest.approx(1), 3, 0)


def test_a_second_row_of_an_image_is_not_said_to_be_another_image(tmp_path):
    """As that of another model in the same results."""
    written = [{**rows()[0], "image": {**rows()[0]["image"], "uri": "x/1.jpg"}}] * 2
    with open(tmp_path / "rows.yolo.zip", "wb") as file:
        (note,) = write_yolo_labels(written, file)
    assert note.endswith(
        "such as x/1.jpg: another row has its labels' name; choose one model, or rename images that differ in their endings"
    )


def test_without_its_package_pascal_voc_names_the_extra_in_a_line(tmp_path, monkeypatch):
    voc(tmp_path)
    monkeypatch.setitem(sys.modules, "defusedxml", None)
    with pytest.raises(RowsError, match=r"^Pascal VOC is read by defusedxml: pip install 'hybrid-detection-pipeline\[voc\]'$"):
        read_truth(str(tmp_path))


A_LABEL = "0 0.5 0.5 1 1"
MISTAKES = {
    "empty folder": ({}, ".", "holds no labels: expected COCO annotations"),
    "folder with COCO": ({"sub/instances.json": "{}"}, ".", "holds no labels: expected COCO annotations"),
    "no such file": ({}, "absent.json", "absent.json cannot be read: No such file"),
    "broken JSON": ({"a.json": "{"}, "a.json", "a.json is not JSON"),
    "JSON of another form": ({"a.json": "[]"}, "a.json", "expected COCO annotations with the lists images, annotations and"),
    "one label file": ({"a.txt": A_LABEL}, "a.txt", "is one label file: give its folder"),
    "two tools": ({"a.txt": "", "b.xml": ""}, ".", "has .xml and .txt files"),
    "pixels": ({"a.txt": "0 320 240 20 20"}, ".", "a.txt: expected `class cx cy width .*got 0 320 240 20 20, which are pixels"),
    "words": ({"a.txt": "cat 0.5 0.5 0.1 0.1"}, ".", "a.txt: expected `class cx cy"),
    "too few names": ({"a.txt": "7 0.5 0.5 0.1 0.1", "classes.txt": "cat\ndog"}, ".", "have class 7, and only 2 names: cat, dog"),
    "only names": ({"classes.txt": "cat"}, ".", "has no label file beside classes.txt"),
    "empty XML": ({"a.xml": ""}, ".", "a.xml: expected a Pascal VOC annotation, got ParseError"),
    "XML with entities that grow": ({"a.xml": '<!DOCTYPE a [<!ENTITY b "cc">]><a>&b;&b;</a>'}, ".", "got EntitiesForbidden"),
    "XML with a file": ({"a.xml": '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/hosts">]><a>&b;</a>'}, ".", "EntitiesForbidden"),
    "XML of no objects": ({"a.xml": "<html/>"}, ".", "1 .xml files and no object"),
    "a box without corner": ({"a.xml": "<a><object><bndbox/></object></a>"}, ".", "an object without xmin"),
    "data.yaml without names": ({"data.yaml": "val: images"}, ".", "expected the keys val .* and names"),
    "an empty line of names": ({"a.txt": A_LABEL, "classes.txt": "cat\n \ndog\n"}, ".", "classes.txt: .*: line 2 is empty"),
    "a number without name": (
        {"data.yaml": "val: im\nnames: {0: cat, 2: dog}", "im/a.jpg": ""},
        ".",
        "names, by number from 0 without gaps, got KeyError: 1",
    ),
    "data.yaml without images": ({"data.yaml": "val: images\nnames: [cat]"}, "data.yaml", "no image in images"),
    "data.yaml without labels": ({"data.yaml": "val: im\nnames: [cat]", "im/a.jpg": ""}, ".", "none of 1 images has a label"),
    "broken data.yaml": ({"data.yaml": "val: ["}, "data.yaml", "expected the keys val"),
    "a place elsewhere": ({}, "gs://bucket/labels", "is not a local path"),
    "other images": ({"x.txt": A_LABEL}, ".", "none of 3 rows is in the ground truth: the rows have /photos/a.jpg"),
    "other names": ({"a.txt": A_LABEL, "classes.txt": "ship"}, ".", "no class of the detections .* the labels have ship"),
}


@pytest.mark.parametrize(("files", "truth", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_with_labels_is_told_in_one_line(tmp_path, capsys, files, truth, message):
    for name, text in files.items():
        write(tmp_path / "labels" / name, text)
    (tmp_path / "labels").mkdir(exist_ok=True)
    detections = str(write_lines(tmp_path / "rows.jsonl", rows()))
    place = truth if "://" in truth else str(tmp_path / "labels" / truth)
    assert re.search(message, error_of(capsys, "--detections", detections, "--ground-truth", place))


def test_sizes_are_needed_for_labels_that_are_shares(tmp_path):
    unsized = [{**one, "image": {"uri": one["image"]["uri"]}} for one in rows()]
    with pytest.raises(RowsError, match="shares of the image, and a row has no width and height"):
        evaluate(unsized, yolo(tmp_path))
