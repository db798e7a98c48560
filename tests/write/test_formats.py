"""Formats read back in libraries that others wrote: pandas, supervision, labelformat; or held against a published schema."""

import json
import zipfile
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import supervision as sv
import yaml
from labelformat.formats.cvat import CVATObjectDetectionInput

from pipeline.write.exports import FORMATS
from tests.conftest import write_bright_image
from tests.shard_rows import json_row as row

CAT = ([10.0, 20.0, 40.0, 30.0], 0, "cat", 0.9)
DOG = ([-5.0, 0.0, 5.0, 60.0], 2, "dog, big", 0.5)  # reaches beyond the image
GONE = ([-9.0, 0.0, 0.0, 9.0], 2, "dog, big", 0.5)  # lies outside of it
ROWS = [row("photos/a.png", CAT, DOG), row("photos/b.png"), row("photos/ä.png", GONE, CAT)]


def written(name, rows, path):
    """Writes rows in a format of one file."""
    with open(path, "wb") as file:
        FORMATS[name].write(rows, file)


@pytest.fixture
def unpacked(tmp_path):
    """What a writer of labels puts into its archive, unpacked beside the images of its rows."""

    def write(name, rows=ROWS):
        written(name, rows, f"{tmp_path}/rows.{name}")
        with zipfile.ZipFile(tmp_path / f"rows.{name}") as archive:
            assert archive.testzip() is None
            archive.extractall(tmp_path / "labels")
        for each in rows:
            image = each["image"]
            write_bright_image(tmp_path / image["uri"], (image["width"], image["height"]), (0, 0, 1, 1))
        return tmp_path / "labels"

    return write


def test_pandas_reads_a_line_for_each_detection(tmp_path):
    written("csv", [*ROWS, row("a\udc80\n.png", CAT)], f"{tmp_path}/rows.csv")
    table = pd.read_csv(tmp_path / "rows.csv")
    assert table["uri"].tolist() == [*["photos/a.png"] * 2, *["photos/ä.png"] * 2, "a\\udc80\n.png"]
    assert table.iloc[1].tolist() == ["photos/a.png", 1, 100, 50, "m", 7, -5.0, 0.0, 5.0, 60.0, 2, "dog, big", 0.5]
    written("csv", [], f"{tmp_path}/none.csv")
    assert pd.read_csv(tmp_path / "none.csv").empty


def assert_as_expected(data: sv.DetectionDataset, atol: float) -> None:
    """The boxes of each image, clipped to it."""
    found = {path.rpartition("/")[2]: detections for path, _, detections in data}
    names = {name: [data.classes[number] for number in each.class_id] for name, each in found.items() if len(each)}
    assert names == {"a.png": ["cat", "dog, big"], "ä.png": ["cat"]}
    assert len(found["b.png"]) == 0
    np.testing.assert_allclose(found["a.png"].xyxy, [[10, 20, 40, 30], [0, 0, 5, 50]], atol=atol)


def test_supervision_reads_labels_in_yolos_format(unpacked, tmp_path):
    folder = unpacked("yolo")
    places = (f"{tmp_path}/photos", f"{folder}/labels/photos", f"{folder}/data.yaml")
    assert_as_expected(sv.DetectionDataset.from_yolo(*places), atol=1e-3)
    assert yaml.safe_load((folder / "data.yaml").read_text()) == {"names": ["cat", "class_1", "dog, big"]}
    assert (folder / "classes.txt").read_text() == "cat\nclass_1\ndog, big\n"


def test_supervision_reads_pascal_voc(unpacked, tmp_path):
    folder = unpacked("voc")
    assert_as_expected(sv.DetectionDataset.from_pascal_voc(f"{tmp_path}/photos", f"{folder}/Annotations/photos"), atol=0)


HOSTILE = [
    *("a\"'<&>]]>.jpg", "=1+1.jpg", "@x,\n;.jpg", "../../up.jpg", "\t-x\r\n.jpg", "ok/é日.jpg"),
    f"{'ä' * 120}/{'n' * 300}.jpg",
]


def test_labelformat_reads_what_cvat_imports(tmp_path):
    written("cvat", ROWS, f"{tmp_path}/rows.xml")
    labels = [*CVATObjectDetectionInput(tmp_path / "rows.xml").get_labels()]
    assert [each.image.filename for each in labels] == ["photos/a.png", "photos/b.png", "photos/ä.png"]
    assert {(each.image.width, each.image.height) for each in labels} == {(100, 50)}
    found = [
        [(one.category.name, one.box.xmin, one.box.ymin, one.box.xmax, one.box.ymax) for one in each.objects] for each in labels
    ]
    cat, dog = ("cat", 10, 20, 40, 30), ("dog, big", 0, 0, 5, 50)
    assert found == [[cat, dog], [], [cat]]


def test_labelformat_reads_any_name_of_an_image_or_class_from_cvats_xml(tmp_path):
    rows = [row(name, (CAT[0], 0, name, 0.9)) for name in HOSTILE]
    written("cvat", [*rows, row("a\x01\udc80.jpg", CAT), row("gs://bucket/a/1.jpg", CAT)], f"{tmp_path}/rows.xml")
    *labels, odd, of_bucket = CVATObjectDetectionInput(tmp_path / "rows.xml").get_labels()
    assert [each.image.filename for each in labels] == HOSTILE
    assert odd.image.filename == "a??.jpg"  # XML can hold neither
    assert of_bucket.image.filename == "a/1.jpg"  # as CVAT names it in the bucket
    assert [each.objects[0].category.name for each in labels] == HOSTILE


def region(number, score, x, y, width, height, name):
    """Source: https://labelstud.io/guide/predictions, "JSON format for pre-annotations" and its example of rectangles."""
    names = {"type": "rectanglelabels", "from_name": "label", "to_name": "image"}
    image = {"original_width": 100, "original_height": 50, "image_rotation": 0}
    value = {"x": x, "y": y, "width": width, "height": height, "rotation": 0, "rectanglelabels": [name]}
    return {"id": number, **names, **image, "score": score, "value": value}


def test_label_studio_gets_tasks_with_predictions_as_its_guide_has_them(tmp_path):
    written("label-studio", ROWS, f"{tmp_path}/rows.json")
    first, second, _ = json.loads((tmp_path / "rows.json").read_bytes())
    regions = [region("0", 0.9, 10.0, 40.0, 30.0, 20.0, "cat"), region("1", 0.5, 0.0, 0.0, 5.0, 100.0, "dog, big")]
    assert first == {
        "data": {"image": "/data/local-files/?d=photos/a.png", "uri": "photos/a.png", "generation": "1"},
        "predictions": [{"model_version": "m 7", "score": 0.5, "result": regions}],
    }
    assert second["predictions"] == [{"model_version": "m 7", "score": 0.0, "result": []}]


def test_label_studio_gets_any_name_of_an_image_as_an_address_and_unchanged(tmp_path):
    written("label-studio", [row(name, CAT) for name in [*HOSTILE, "gs://bucket/a b.jpg", "/abs.jpg"]], f"{tmp_path}/rows.json")
    tasks = [task["data"] for task in json.loads((tmp_path / "rows.json").read_bytes())]
    *local, cloud, absolute = [task["image"] for task in tasks]
    assert [task["uri"] for task in tasks][:-2] == HOSTILE
    assert [unquote(each.partition("?d=")[2]) for each in local] == HOSTILE
    assert all(each.isprintable() and each.isascii() for each in local)
    assert (cloud, absolute) == ("gs://bucket/a b.jpg", "/data/local-files/?d=abs.jpg")


def test_a_spreadsheet_takes_no_name_of_an_image_for_a_formula(tmp_path):
    """A path that begins as a formula gets `./`, which names the same file; the others are unchanged."""
    written("csv", [row(name, CAT) for name in [*HOSTILE, "-1.jpg", "+1.jpg"]], f"{tmp_path}/rows.csv")
    read = pd.read_csv(tmp_path / "rows.csv", lineterminator=None)["uri"].tolist()
    assert [name.removeprefix("./") for name in read] == [*HOSTILE, "-1.jpg", "+1.jpg"]
    assert [name for name in read if name[0] in "=+-@\t\r"] == []
    prefixed = [name for name in read if name.startswith("./")]
    assert prefixed == ["./=1+1.jpg", "./@x,\n;.jpg", "./\t-x\r\n.jpg", "./-1.jpg", "./+1.jpg"]


def test_a_spreadsheet_takes_no_text_of_a_server_or_a_model_for_a_formula(tmp_path):
    """A web server chooses the generation, and a model's author the names of its classes; numbers stay numbers."""
    formula = '=HYPERLINK("http://elsewhere","x")'
    image = row("a.jpg", (CAT[0], 0, formula, 0.9), DOG)
    image["image"]["generation"] = image["model"]["name"] = image["model"]["version"] = formula
    written("csv", [image], f"{tmp_path}/rows.csv")
    first, second = pd.read_csv(tmp_path / "rows.csv").to_dict("records")
    texts = ("generation", "model", "version", "class_name")
    assert {name: first[name] for name in texts} == dict.fromkeys(texts, f"'{formula}")
    assert (second["class_name"], second["x0"]) == ("dog, big", -5.0)


@pytest.mark.parametrize("name", ["yolo", "voc"])
def test_no_name_of_an_image_leads_out_of_where_labels_are_unpacked_or_hides_another(tmp_path, name):
    names = ["../../a.jpg", "/a.jpg", "gs://a.jpg", "a.png", "..\\a.jpg", "a\udc80.jpg", "b/.jpg", "\x01.jpg"]
    written(name, [row(each, CAT) for each in names], f"{tmp_path}/rows.zip")
    with zipfile.ZipFile(tmp_path / "rows.zip") as archive:
        entries = [each for each in archive.namelist() if "/" in each]
        texts = [archive.read(each) for each in entries]
    assert len({*entries}) == len(names)
    assert not any(each.startswith("/") or "\\" in each or ".." in each.split("/") for each in entries)
    if name == "voc":
        assert [ElementTree.fromstring(text).findtext("object/name") for text in texts] == ["cat"] * len(names)


def test_labels_of_names_longer_than_a_disk_takes_are_unpacked(tmp_path):
    """Objects of Cloud Storage have names of up to 1,024 bytes."""
    long = [f"gs://b/{'ä' * 200}/{'n' * 300}{end}.jpg" for end in "ab"]
    written("yolo", [row(each, CAT) for each in [*long, f"{'n' * 251}.jpg", f"{'n' * 251}.png"]], f"{tmp_path}/rows.zip")
    with zipfile.ZipFile(tmp_path / "rows.zip") as archive:
        archive.extractall(tmp_path / "labels")
    assert sum(path.suffix == ".txt" and path.stem != "classes" for path in (tmp_path / "labels").rglob("*")) == 4


def test_a_class_id_of_any_size_takes_no_memory(tmp_path):
    """Rows may be somebody else's."""
    written("yolo", [row("a.png", (CAT[0], 10**12, "cat", 0.9))], f"{tmp_path}/rows.zip")
    with zipfile.ZipFile(tmp_path / "rows.zip") as archive:
        assert archive.read("labels/a.txt").startswith(b"1000000000000 ")
