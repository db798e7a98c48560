"""COCO results load in the official tools, with ids that mean something."""

import json

import pytest
from pycocotools.coco import COCO

from pipeline.errors import InputError
from pipeline.write.write_coco import write_coco
from tests.shard_rows import json_row as row

CAT, DOG = ([1.0, 2.0, 4.5, 8.0], 0, "cat", 0.9), ([-5.0, 0.0, 5.0, 5.0], 16, "dog", 0.5)
ROWS = [row("in/a.jpg", CAT, DOG), row("in/b.jpg"), row("in/ä.jpg", DOG)]


@pytest.fixture
def write(tmp_path):
    def run(rows, truth=None):
        with open(tmp_path / "results.json", "wb") as results, open(tmp_path / "images.json", "wb") as images:
            run.notes = write_coco(rows, results, images, truth or "")
        return [json.loads((tmp_path / name).read_text(encoding="utf-8")) for name in ("results.json", "images.json")]

    return run


def test_ids_count_images_by_their_rows_and_classes_from_one(write, tmp_path):
    results, images = write(ROWS)
    assert results == [
        {"image_id": 1, "category_id": 1, "bbox": [1.0, 2.0, 3.5, 6.0], "score": 0.9},
        {"image_id": 1, "category_id": 17, "bbox": [-5.0, 0.0, 10.0, 5.0], "score": 0.5},
        {"image_id": 3, "category_id": 17, "bbox": [-5.0, 0.0, 10.0, 5.0], "score": 0.5},
    ]
    assert [(image["id"], image["file_name"], image["width"], image["height"]) for image in images["images"]] == [
        (1, "in/a.jpg", 100, 50),
        (2, "in/b.jpg", 100, 50),
        (3, "in/ä.jpg", 100, 50),
    ]
    assert images["categories"] == [{"id": 1, "name": "cat"}, {"id": 17, "name": "dog"}]
    assert len(COCO(str(tmp_path / "images.json")).loadRes(str(tmp_path / "results.json")).anns) == 3
    assert write([]) == [[], {"images": [], "annotations": [], "categories": []}]


def test_ids_are_those_of_the_ground_truth_with_which_pycocotools_loads_them(write, tmp_path):
    truth = {
        "images": [{"id": 70, "file_name": "x/b.jpg"}, {"id": 80, "file_name": "a.jpg"}],
        "annotations": [],
        "categories": [{"id": 5, "name": "dog"}],
    }
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    results, images = write([*ROWS, row("photos.zip#b.jpg")], truth=str(tmp_path / "truth.json"))
    assert results == [{"image_id": 80, "category_id": 5, "bbox": [-5.0, 0.0, 10.0, 5.0], "score": 0.5}]
    assert [image["id"] for image in images["images"]] == [80, 70, 70]
    assert len(COCO(str(tmp_path / "truth.json")).loadRes(str(tmp_path / "results.json")).anns) == 1


def test_what_a_ground_truth_does_not_know_is_said(write, tmp_path):
    """Images and objects that are left out are counted; images of one name that lie in several folders are, too."""
    truth = {"images": [{"id": 80, "file_name": "a.jpg"}], "categories": [{"id": 5, "name": "dog"}]}
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    write([*ROWS, row("of/a.jpg", CAT)], truth=str(tmp_path / "truth.json"))
    assert [note.replace(f"{tmp_path}/", "") for note in write.notes] == [
        "coco/ leaves out 2 images that truth.json does not name",
        "coco/ leaves out 2 objects of classes that truth.json does not name: cat",
        "coco/ has 1 images under the id of another one, since truth.json tells them by file name alone",
    ]
    write(ROWS)
    assert write.notes == []


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"images": [{}], "categories": []}'])
def test_a_ground_truth_that_is_none_is_one_clear_error(write, tmp_path, content):
    path = tmp_path / "truth.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=r"coco_ground_truth .*: expected COCO annotations") as caught:
        write(ROWS, truth=str(path))
    assert "\n" not in str(caught.value)
