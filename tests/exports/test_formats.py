"""Formats read back in libraries that others wrote: pandas, supervision, labelformat, TensorFlow, pycocotools; or held against a
published schema.
"""

import contextlib
import io
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
from pycocotools.coco import COCO

from pipeline.errors import InputError
from pipeline.exports.exports import FORMATS
from pipeline.exports.write_coco import write_coco
from pipeline.listing.tfrecords import images_of_file
from pipeline.records import ImageRef
from tests.conftest import write_bright_image
from tests.shard_rows import json_row as row

CAT = ([10.0, 20.0, 40.0, 30.0], 0, "cat", 0.9)
DOG = ([-5.0, 0.0, 5.0, 60.0], 2, "dog, big", 0.5)  # reaches beyond the image
GONE = ([-9.0, 0.0, 0.0, 9.0], 2, "dog, big", 0.5)  # lies outside of it
ROWS = [row("photos/a.png", CAT, DOG), row("photos/b.png"), row("photos/ä.png", GONE, CAT)]


@pytest.fixture
def written(tmp_path):
    """Writes rows in a format of one file; returns its path."""

    def write(name, rows):
        path = tmp_path / f"rows.{name}"
        with open(path, "wb") as file:
            FORMATS[name].write(rows, file)
        return path

    return write


@pytest.fixture
def unpacked(written, tmp_path):
    """What a writer of labels puts into its archive, unpacked."""

    def unpack(name, rows):
        with zipfile.ZipFile(written(name, rows)) as archive:
            assert archive.testzip() is None
            archive.extractall(tmp_path / "labels")
        return tmp_path / "labels"

    return unpack


@pytest.fixture
def photos(tmp_path):
    """The images of `ROWS`."""
    for each in ROWS:
        write_bright_image(tmp_path / each["image"]["uri"], (100, 50), (0, 0, 1, 1))
    return f"{tmp_path}/photos"


def test_pandas_reads_a_line_for_each_detection(written):
    table = pd.read_csv(written("csv", [*ROWS, row("a\udc80\n.png", CAT)]))
    assert table["uri"].tolist() == [*["photos/a.png"] * 2, *["photos/ä.png"] * 2, "a\\udc80\n.png"]
    assert table.iloc[1].tolist() == ["photos/a.png", 1, 100, 50, "m", 7, -5.0, 0.0, 5.0, 60.0, 2, "dog, big", 0.5]
    assert pd.read_csv(written("csv", [])).empty


def assert_as_expected(data: sv.DetectionDataset, atol: float) -> None:
    """The boxes of each image, clipped to it."""
    found = {path.rpartition("/")[2]: detections for path, _, detections in data}
    names = {name: [data.classes[number] for number in each.class_id] for name, each in found.items() if len(each)}
    assert names == {"a.png": ["cat", "dog, big"], "ä.png": ["cat"]}
    assert len(found["b.png"]) == 0
    np.testing.assert_allclose(found["a.png"].xyxy, [[10, 20, 40, 30], [0, 0, 5, 50]], atol=atol)


def test_supervision_reads_labels_in_yolos_format(unpacked, photos):
    folder = unpacked("yolo", ROWS)
    assert_as_expected(sv.DetectionDataset.from_yolo(photos, f"{folder}/labels/photos", f"{folder}/data.yaml"), atol=1e-3)
    dataset = yaml.safe_load((folder / "data.yaml").read_text())
    assert dataset == {"path": ".", "train": "images.txt", "val": "images.txt", "names": ["cat", "class_1", "dog, big"]}
    assert (folder / "images.txt").read_text() == "./images/photos/a.png\n./images/photos/b.png\n./images/photos/ä.png\n"
    assert (folder / "classes.txt").read_text() == "cat\nclass_1\ndog, big\n"


def test_supervision_reads_pascal_voc(unpacked, photos):
    annotations = f"{unpacked('voc', ROWS)}/Annotations/photos"
    assert_as_expected(sv.DetectionDataset.from_pascal_voc(photos, annotations), atol=0)


HOSTILE = [
    *("a\"'<&>]]>.jpg", "=1+1.jpg", "@x,\n;.jpg", "../../up.jpg", "\t-x\r\n.jpg", "ok/é日.jpg"),
    f"{'ä' * 120}/{'n' * 300}.jpg",
]


def test_labelformat_reads_what_cvat_imports(written):
    labels = [*CVATObjectDetectionInput(written("cvat", ROWS)).get_labels()]
    found = [
        [(one.category.name, one.box.xmin, one.box.ymin, one.box.xmax, one.box.ymax) for one in each.objects] for each in labels
    ]
    cat, dog = ("cat", 10, 20, 40, 30), ("dog, big", 0, 0, 5, 50)
    assert found == [[cat, dog], [], [cat]]
    assert {(each.image.width, each.image.height) for each in labels} == {(100, 50)}


def test_labelformat_reads_any_name_of_an_image_or_class_from_cvats_xml(written):
    rows = [row(name, (CAT[0], 0, name, 0.9)) for name in HOSTILE]
    path = written("cvat", [*rows, row("a\x01\udc80.jpg", CAT), row("gs://bucket/a/1.jpg", CAT)])
    *labels, odd, of_bucket = CVATObjectDetectionInput(path).get_labels()
    assert [each.image.filename for each in labels] == HOSTILE
    assert odd.image.filename == "a??.jpg"  # XML can hold neither
    assert of_bucket.image.filename == "a/1.jpg"  # as CVAT names it in the bucket
    assert [each.objects[0].category.name for each in labels] == HOSTILE


def test_label_studio_gets_tasks_with_predictions_as_its_guide_has_them(written):
    """Source: https://labelstud.io/guide/predictions, "JSON format for pre-annotations" and its example of rectangles."""
    rows = [*ROWS[:2], *(row(name, CAT) for name in [*HOSTILE, "gs://bucket/a b.jpg", "/abs.jpg"])]
    first, second, *tasks = json.loads(written("label-studio", rows).read_bytes())
    names = {"type": "rectanglelabels", "from_name": "label", "to_name": "image"}
    image = {"original_width": 100, "original_height": 50, "image_rotation": 0}
    cat = {"x": 10.0, "y": 40.0, "width": 30.0, "height": 20.0, "rotation": 0, "rectanglelabels": ["cat"]}
    dog = {"x": 0.0, "y": 0.0, "width": 5.0, "height": 100.0, "rotation": 0, "rectanglelabels": ["dog, big"]}
    regions = [
        {"id": f"{n}", **names, **image, "score": score, "value": box} for n, (score, box) in enumerate([(0.9, cat), (0.5, dog)])
    ]
    assert first == {
        "data": {"image": "/data/local-files/?d=photos/a.png", "uri": "photos/a.png", "generation": "1"},
        "predictions": [{"model_version": "m 7", "score": 0.5, "result": regions}],
    }
    assert second["predictions"] == [{"model_version": "m 7", "score": 0.0, "result": []}]
    *local, cloud, absolute = [task["data"]["image"] for task in tasks]
    assert [task["data"]["uri"] for task in tasks][:-2] == HOSTILE
    assert [unquote(each.partition("?d=")[2]) for each in local] == HOSTILE
    assert all(each.isprintable() and each.isascii() for each in local)
    assert (cloud, absolute) == ("gs://bucket/a b.jpg", "/data/local-files/?d=abs.jpg")


def test_a_spreadsheet_takes_no_name_of_an_image_for_a_formula(written):
    """A path that begins as a formula gets `./`, which names the same file; the others are unchanged."""
    names = [*HOSTILE, "-1.jpg", "+1.jpg"]
    read = pd.read_csv(written("csv", [row(name, CAT) for name in names]), lineterminator=None)["uri"].tolist()
    assert [name.removeprefix("./") for name in read] == names
    prefixed = [name for name in read if name.startswith("./")]
    assert prefixed == ["./=1+1.jpg", "./@x,\n;.jpg", "./\t-x\r\n.jpg", "./-1.jpg", "./+1.jpg"]


def test_a_spreadsheet_takes_no_text_of_a_server_or_a_model_for_a_formula(written):
    """A web server chooses the generation, and a model's author the names of its classes; numbers stay numbers."""
    formula = '=HYPERLINK("http://elsewhere","x")'
    image = row("a.jpg", (CAT[0], 0, formula, 0.9), DOG)
    image["image"]["generation"] = image["model"]["name"] = image["model"]["version"] = formula
    first, second = pd.read_csv(written("csv", [image])).to_dict("records")
    texts = ("generation", "model", "version", "class_name")
    assert {name: first[name] for name in texts} == dict.fromkeys(texts, f"'{formula}")
    assert (second["class_name"], second["x0"]) == ("dog, big", -5.0)


@pytest.mark.parametrize("name", ["yolo", "voc"])
def test_no_name_of_an_image_leads_out_of_where_labels_are_unpacked_or_hides_another(written, name):
    names = ["../../a.jpg", "/a.jpg", "gs://a.jpg", "a.png", "..\\a.jpg", "a\udc80.jpg", "b/.jpg", "\x01.jpg"]
    with zipfile.ZipFile(written(name, [row(each, CAT) for each in names])) as archive:
        entries = [each for each in archive.namelist() if "/" in each]
        texts = [archive.read(each) for each in entries]
    assert len({*entries}) == len(names)
    assert not any(each.startswith("/") or "\\" in each or ".." in each.split("/") for each in entries)
    if name == "voc":
        assert [ElementTree.fromstring(text).findtext("object/name") for text in texts] == ["cat"] * len(names)


def test_labels_of_names_longer_than_a_disk_takes_are_unpacked(unpacked):
    """Objects of Cloud Storage have names of up to 1,024 bytes."""
    long = [f"gs://b/{'ä' * 200}/{'n' * 300}{end}.jpg" for end in "ab"]
    folder = unpacked("yolo", [row(each, CAT) for each in [*long, f"{'n' * 251}.jpg", f"{'n' * 251}.png"]])
    assert sum(path.suffix == ".txt" and path.parent != folder for path in folder.rglob("*")) == 4


def test_a_class_id_of_any_size_takes_no_memory(unpacked):
    """Rows may be somebody else's."""
    folder = unpacked("yolo", [row("a.png", (CAT[0], 10**12, "cat", 0.9))])
    assert (folder / "labels" / "a.txt").read_text().startswith("1000000000000 ")


def test_tensorflow_parses_a_record_of_each_row(written):
    import tensorflow as tf

    path = written("tfrecord", [row("ä.jpg", CAT, DOG), row("none.jpg")])
    records = tf.data.TFRecordDataset([str(path)]).as_numpy_iterator()
    features = (tf.train.Example.FromString(each).features.feature for each in records)
    both, none = (
        {name: list(getattr(of[name], of[name].WhichOneof("kind") or "int64_list").value) for name in of} for of in features
    )
    corners = {"xmin": [np.float32(0.1), 0.0], "ymin": [np.float32(0.4), 0.0]}
    corners |= {"xmax": [np.float32(0.4), np.float32(0.05)], "ymax": [np.float32(0.6), 1.0]}  # cut at the edges
    of_image = {"image/source_id": ["ä.jpg".encode()], "image/filename": ["ä.jpg".encode()], "image/width": [100]}
    of_objects = {
        **{f"image/{kind}/bbox/{side}": shares for kind in ("object", "detection") for side, shares in corners.items()},
        "image/object/class/text": [b"cat", b"dog, big"],
        "image/object/class/label": [1, 3],  # 0 is the background
        "image/detection/label": [1, 3],
        "image/detection/score": [np.float32(0.9), 0.5],
    }
    assert both == {**of_image, "image/height": [50], **of_objects}
    assert not any(none[name] for name in of_objects)


@pytest.mark.parametrize("uri", ["gs://bucket/ä b.jpg", "\udcff\udc80.jpg", "\ud800.jpg"], ids=ascii)
def test_an_image_keeps_its_name_for_our_own_reader_of_tfrecord_files(written, uri):
    """The pixels are not in it, and the reader says so under the image's name."""
    (letter,) = images_of_file(ImageRef(str(written("tfrecord", [row(uri, CAT)]))), 1 << 20)
    assert (letter.ref.uri, letter.reason) == (uri.replace("\ud800", "\\ud800"), "no_image")  # no file's name has that code


@pytest.fixture
def coco(tmp_path):
    """Writes rows as COCO, with the ids of a ground truth: results, images, and what was noted."""

    def write(rows, truth=None):
        if truth is not None:
            (tmp_path / "truth.json").write_text(json.dumps(truth))
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(tmp_path / name, "wb")) for name in ("results.json", "images.json", "labels.json")]
            notes = write_coco(rows, *files, ground_truth="" if truth is None else f"{tmp_path}/truth.json")
        return *(json.loads((tmp_path / name).read_bytes()) for name in ("results.json", "images.json")), notes

    return write


def test_coco_ids_count_images_by_their_rows_and_classes_from_one(coco, tmp_path):
    results, images, notes = coco(ROWS)
    assert results == [
        {"image_id": 1, "category_id": 1, "bbox": [10.0, 20.0, 30.0, 10.0], "score": 0.9},
        {"image_id": 1, "category_id": 3, "bbox": [-5.0, 0.0, 10.0, 60.0], "score": 0.5},
        {"image_id": 3, "category_id": 3, "bbox": [-9.0, 0.0, 9.0, 9.0], "score": 0.5},
        {"image_id": 3, "category_id": 1, "bbox": [10.0, 20.0, 30.0, 10.0], "score": 0.9},
    ]
    names = {1: "photos/a.png", 2: "photos/b.png", 3: "photos/ä.png"}
    sized = [{"id": number, "file_name": name, "width": 100, "height": 50} for number, name in names.items()]
    assert [{key: image[key] for key in sized[0]} for image in images["images"]] == sized
    assert images["categories"] == [{"id": 1, "name": "cat"}, {"id": 3, "name": "dog, big"}]
    assert len(COCO(f"{tmp_path}/images.json").loadRes(f"{tmp_path}/results.json").anns) == 4
    assert notes == []
    assert coco([])[:2] == ([], {"images": [], "annotations": [], "categories": []})


def test_coco_ids_are_those_of_the_ground_truth_with_which_pycocotools_loads_them(coco, tmp_path):
    truth = {
        "images": [{"id": 70, "file_name": "x/b.png"}, {"id": 80, "file_name": "ä.png"}],
        "annotations": [],
        "categories": [{"id": 5, "name": "cat"}],
    }
    results, images, notes = coco([*ROWS, row("photos.zip#b.png"), row("of/b.png", CAT)], truth)
    expected = [{"image_id": number, "category_id": 5, "bbox": [10.0, 20.0, 30.0, 10.0], "score": 0.9} for number in (80, 70)]
    assert results == expected
    assert [image["id"] for image in images["images"]] == [70, 80, 70, 70]
    assert len(COCO(f"{tmp_path}/truth.json").loadRes(f"{tmp_path}/results.json").anns) == 2
    assert [note.replace(f"{tmp_path}/", "") for note in notes] == [
        "coco/ leaves out 1 image that truth.json does not name",
        "coco/ leaves out 1 object of classes that truth.json does not name: dog, big",
        "coco/ has 2 images under the id of another, since truth.json tells them by file name",
    ]


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"images": [{}], "categories": []}'])
def test_a_ground_truth_that_is_none_is_one_clear_error(tmp_path, content):
    if content is not None:
        (tmp_path / "truth.json").write_text(content)
    with pytest.raises(InputError, match=r"coco_ground_truth .*: expected COCO annotations") as caught:
        write_coco(ROWS, *(io.BytesIO() for _ in range(3)), ground_truth=f"{tmp_path}/truth.json")
    assert "\n" not in str(caught.value)
