"""Photos of 20 megapixels with a real model: what other tools find in the same slices, and what is gained on small objects."""

import contextlib
import dataclasses
import hashlib
import json
from collections import defaultdict
from pathlib import Path

import cv2
import numpy as np
import pytest

from models.geometry import iou_matrix
from models.import_darknet import import_darknet
from pipeline.commands import evaluate
from pipeline.config import DetectConfig
from pipeline.detect.detect_objects import detect_images
from pipeline.detect.load_detector import load_detector
from tests.detect.sliced import by_sahi, by_supervision
from tests.fixtures import fixtures_dir
from tests.shard_rows import write_rows

WH = 5472, 3648
MODEL = "yolo-fastest-1.1@320"
PHOTOS = 2
TILES = DetectConfig(tiles=640, max_detections=1000, score_threshold=0.3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    stem, size = MODEL.split("@")
    darknet, folder = fixtures_dir() / "darknet", tmp_path_factory.mktemp("model")
    names = darknet / f"{stem}.cfg", darknet / f"{stem}.weights", darknet / "coco.names"
    import_darknet(*map(str, names), str(folder / "1"), input_hw=(int(size), int(size)))
    return str(folder)


def mosaic(seed, lengths=(150, 600), side=600):
    """A photo of 20 megapixels of small fixture photos, and what OpenCV finds in each for sure: (x, y, w, h, name).

    Args:
      seed: Of what is drawn.
      lengths: Of the longer sides of the small photos, pixels.
      side: Of the squares, each of which has one.
    """
    reference = json.loads((fixtures_dir() / "photos_reference_opencv.json").read_text())["models"][MODEL]["images"]
    draw, names = np.random.default_rng(seed), sorted(reference)
    pixels, objects = np.full((WH[1], WH[0], 3), 114, np.uint8), []
    for top in range(0, WH[1] - side, side):
        for left in range(0, WH[0] - side, side):
            name = names[draw.integers(len(names))]
            photo = cv2.cvtColor(cv2.imread(str(fixtures_dir() / name)), cv2.COLOR_BGR2RGB)
            scale = draw.uniform(*lengths) / max(photo.shape)
            small = cv2.resize(photo, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
            y, x = (corner + draw.integers(0, side - length) for corner, length in zip((top, left), small.shape, strict=False))
            pixels[y : y + small.shape[0], x : x + small.shape[1]] = small
            for one in reference[name]["detections"]:
                if one["score"] >= 0.5:
                    a, b, c, d = np.array(one["box"]) * scale
                    objects.append([x + a, y + b, c - a, d - b, one["name"]])
    return pixels, objects


@pytest.fixture(scope="module")
def photos():
    return [mosaic(seed) for seed in range(PHOTOS)]


def detected_in(images, model, detect):
    with contextlib.closing(load_detector(model, detect)) as detector:
        return list(detect_images(images, detector))


def matched(ours, theirs):
    """How many match one to one: the same class, an IoU of at least .99, confidences within .01."""
    same = (iou_matrix(ours[:, :4], theirs[:, :4]) >= 0.99) & (np.abs(ours[:, 4:5] - theirs[:, 4]) <= 0.01)
    same &= ours[:, 5:6] == theirs[:, 5]
    return min(same.any(0).sum(), same.any(1).sum())


@pytest.fixture(scope="module")
def find(model):
    """What the model finds in a slice; several tools ask for the same ones."""
    known: dict[bytes, np.ndarray] = {}
    with contextlib.closing(load_detector(model, TILES.without_tiles())) as detector:

        def find(part):
            key = hashlib.sha256(np.ascontiguousarray(part)).digest()
            if key not in known:
                (result,) = detect_images([part], detector)
                known[key] = rows_of(result)
            return known[key]

        yield find


def rows_of(result):
    found = result.detections
    return np.column_stack([found.boxes_xyxy, found.confidences, found.class_ids]).astype(float)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "settings", "share"),
    [
        pytest.param(by_supervision, {}, 1.0, id="supervision"),
        pytest.param(by_sahi, {}, 0.9, id="SAHI", marks=pytest.mark.matrix),
        pytest.param(by_sahi, {"tile_whole": True, "tile_merge": "nmm"}, 0.9, id="SAHI, whole, merged"),
    ],
)
def test_photos_have_the_boxes_of_other_tools(tool, settings, share, find, model, photos):
    """In the slices of the same model and settings, one to one. SAHI cuts boxes off at the left and upper edge of a slice."""
    detect = dataclasses.replace(TILES, **settings)
    results = detected_in([pixels for pixels, _ in photos], model, detect)
    pairs = [(rows_of(result), tool(find, pixels, detect)) for (pixels, _), result in zip(photos, results, strict=True)]
    same, ours, theirs = np.sum([(matched(*pair), *map(len, pair)) for pair in pairs], axis=0)
    assert same >= share * max(ours, theirs) > 80, f"{same} of {ours} and {theirs}"


def evaluated(images, objects, model, detect):
    """The figures of `detect-objects evaluate`; zeros where nothing is found of any class that the photos show."""
    names = sorted({one[4] for of_photo in objects for one in of_photo})
    boxes = [(number, one) for number, of_photo in enumerate(objects) for one in of_photo]
    truth = {
        "images": [{"id": n, "file_name": f"images[{n}]", "width": WH[0], "height": WH[1]} for n in range(len(images))],
        "categories": [{"id": names.index(name), "name": name} for name in names],
        "annotations": [
            {"id": k, "image_id": n, "category_id": names.index(one[4]), "bbox": one[:4], "area": one[2] * one[3], "iscrowd": 0}
            for k, (n, one) in enumerate(boxes)
        ],
    }
    results = detected_in(images, model, detect)
    if not {name for result in results for name in result.detections.class_names} & set(names):
        return defaultdict(float)
    rows = f"rows-{detect.tiles}"
    write_rows(rows, results)
    Path("truth.json").write_text(json.dumps(truth))
    assert evaluate.main(["--detections", rows, "--ground-truth", "truth.json", "--json", "found.json", "--resamples", "0"]) == 0
    return json.loads(Path("found.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "places", "tiles", "least"),
    [
        pytest.param(PHOTOS, {}, TILES.tiles, {"AP50": 0.3, "AP_medium": 0.05}, id="small in their photo"),
        pytest.param(
            *(1, {"lengths": (60, 120), "side": 200}, 160, {"AP_small": 0.05}),
            marks=pytest.mark.matrix,
            id="at most 32x32 pixels",
        ),
    ],
)
def test_evaluate_shows_what_is_gained_on_small_objects(count, places, tiles, least, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images, objects = zip(*(mosaic(seed, **places) for seed in range(count)), strict=True)
    settings = [dataclasses.replace(TILES, score_threshold=0.01, tiles=each) for each in (None, tiles)]
    whole, in_tiles = (evaluated(images, objects, model, detect) for detect in settings)
    assert all(in_tiles[key] - whole[key] > gain for key, gain in least.items()), (whole, in_tiles)
