"""Thumbnails and annotated samples."""

import cv2
import numpy as np
import pytest
from msgspec.structs import replace

from pipeline.feed.decode import DecodedImage
from pipeline.feed.thumbnails import make_thumbnail
from pipeline.records import DetectedImage, Detections, ImageRef
from pipeline.report.annotate import annotate, class_colour, label_text, picture


def grey(height, width, value=128):
    return np.full((height, width, 3), value, np.uint8)


def decoded(jpeg):
    return cv2.cvtColor(cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


def thumbnail_of(pixels):
    return make_thumbnail(DecodedImage(pixels, pixels.shape[1::-1]))


def detected(pixels, boxes, names=None, thumbnail=None, uri="a.jpg"):
    count = len(boxes)
    confidences = np.linspace(0.9, 0.3, count, dtype=np.float32)
    names = tuple(names or [f"class {index}" for index in range(count)])
    found = Detections(np.array(boxes, np.float32).reshape(-1, 4), np.arange(count, dtype=np.int32), confidences, names)
    thumbnail = thumbnail_of(pixels) if thumbnail is None else thumbnail
    return DetectedImage(ImageRef(uri), pixels.shape[1], pixels.shape[0], "m", "1", found, thumbnail=thumbnail)


@pytest.mark.parametrize(
    ("height", "width", "expected_hw"),
    [(1, 1, (1, 1)), (600, 800, (600, 800)), (1600, 800, (800, 400)), (2, 20_000, (1, 800))],
    ids=["one pixel", "fits", "tall", "a line"],
)
def test_a_thumbnail_keeps_the_aspect_ratio_and_colours_and_never_enlarges(height, width, expected_hw):
    thumbnail = decoded(thumbnail_of(np.full((height, width, 3), (255, 0, 0), np.uint8)))
    assert thumbnail.shape[:2] == expected_hw
    assert np.abs(thumbnail.reshape(-1, 3).mean(axis=0) - [255, 0, 0]).max() < 3


def test_boxes_are_drawn_where_the_original_has_them():
    """A box in pixels of a 1600x1200 original lands at half of them on the 800x600 thumbnail, in its colour, and nowhere else."""
    drawn = decoded(annotate(detected(grey(1200, 1600), [[400, 300, 1200, 900]]))).astype(int)
    assert drawn.shape == (600, 800, 3)
    colour = np.array(class_colour(0))
    for y, x in [(300, 201), (300, 598), (448, 400)]:
        assert np.abs(drawn[y, x] - colour).max() < 60, (y, x)
    assert np.abs(drawn[300, 400] - 128).max() <= 4
    assert np.abs(drawn[500:, :] - 128).max() <= 4
    assert np.abs(drawn[:, 650:] - 128).max() <= 4


@pytest.mark.parametrize(("height", "width"), [(1, 1), (16, 16), (600, 800)])
def test_no_box_breaks_the_picture_and_small_images_are_enlarged_until_a_label_fits(height, width):
    """Boxes that are larger than the image, outside of it, empty, in its corner, inside out, and no numbers."""
    boxes = [[-50, -50, 900, 700], [5000, 5000, 6000, 6000], [10, 10, 10, 10], [790, 590, 800, 600], [300, 200, 100, 50]]
    boxes += [[np.nan, 0, 10, 10], [-np.inf, 0, np.inf, 10]]
    assert 480 <= max(decoded(annotate(detected(grey(height, width), boxes))).shape) <= 800


def boxes_in_rows(count):
    return [[20 + place % 10 * 75, 40 + place // 10 * 70, 60 + place % 10 * 75, 90 + place // 10 * 70] for place in range(count)]


@pytest.mark.parametrize(("count", "is_crowd"), [(1, False), (16, False), (80, True)])
def test_a_given_picture_has_names_at_its_boxes_or_in_a_crowd_a_list_beside_it(count, is_crowd):
    """Sixteen objects are none: a label with a name is as wide as the name. A thumbnail gets no list, as the report has one."""
    image = detected(grey(600, 800), boxes_in_rows(count))
    drawn, thumbnail = decoded(annotate(image, grey(600, 800))), decoded(annotate(image))
    assert thumbnail.shape == (600, 800, 3)
    assert drawn.shape[0] == 600 and (drawn.shape[1] > 800) == is_crowd
    of_label = np.abs(drawn[25:38, 20:200].astype(int) - class_colour(0)).max(axis=-1) < 60
    assert (of_label.any(axis=0).sum() > 40) == (not is_crowd)
    if is_crowd:
        beside = drawn[:, 800:]
        assert (beside[:8] > 230).all() and (beside.min(axis=-1) < 100).any(axis=1).sum() > 200, "lines of text on white"


@pytest.mark.parametrize("place", [(70, 102), (40, 100), (40, 118), (0, 0)], ids=["beside", "same", "below", "in the corner"])
def test_no_label_covers_that_of_a_neighbour(place):
    """Each has as many pixels of its colour as without the other, less those where a line of a box crosses."""
    first, second = [*(place if place == (0, 0) else (40, 100)), 340, 300], [*place, 370, 330]

    def coloured(classes):
        boxes, ids = [[first, second][each] for each in classes], np.array(classes, np.int32)
        image = detected(grey(600, 800), boxes, names=["a cat and a dog"] * len(boxes))
        found = replace(image.detections, class_ids=ids)
        drawn = decoded(annotate(replace(image, detections=found), grey(600, 800))).astype(int)
        return [int((np.abs(drawn - class_colour(each)).max(axis=-1) < 60).sum()) for each in classes]

    alone, together = [*coloured([0]), *coloured([1])], coloured([0, 1])
    assert all(both > 0.8 * one for one, both in zip(alone, together, strict=True)), (alone, together)


@pytest.mark.parametrize("thumbnail", [b"", b"no picture"], ids=["none", "broken"])
def test_an_image_without_thumbnail_has_no_picture(thumbnail):
    assert annotate(detected(grey(8, 8), [], thumbnail=thumbnail)) == b""


def test_the_picture_of_a_result_is_drawn_once_for_samples_and_reports():
    image = detected(grey(100, 100), [[10, 10, 90, 90]])
    assert picture(image) == annotate(image)
    assert picture(image) is picture(image)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, "#7") for name in ("", "猫", "cat 猫", "a\nb", "\u202egpj")),
        ("person", "person"),
        ("Gänse", "Ganse"),
        ("x" * 200, "x" * 25 + "..."),
    ],
)
def test_labels_read_sensibly_in_ascii(name, expected):
    assert label_text(name, 7) == expected
    assert annotate(detected(grey(100, 100), [[10, 10, 90, 90]], names=[name]))
