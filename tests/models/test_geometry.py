"""Box formats, the way to a model's input and back, IoU and NMS: golden numbers and properties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.geometry import InputTransform, boxes_to_xyxy, fit_image, iou_matrix, nmm, nms, resize_plan
from tests.models.box_formats import boxes_from_xyxy, to_model, to_original

SIDES = st.integers(min_value=1, max_value=20_000)
EDGES = st.floats(min_value=-1_000, max_value=20_000)


@pytest.mark.parametrize(
    ("box_format", "box"),
    [("xyxy", [10, 20, 40, 100]), ("yxyx", [20, 10, 100, 40]), ("xywh", [10, 20, 30, 80]), ("cxcywh", [25, 60, 30, 80])],
)
def test_each_box_format_names_the_same_box(box_format, box):
    xyxy = np.array([10.0, 20.0, 40.0, 100.0])
    assert boxes_to_xyxy(np.array(box, float), box_format).tolist() == xyxy.tolist()
    assert boxes_from_xyxy(xyxy, box_format).tolist() == box


@pytest.mark.parametrize(
    ("image_wh", "input_hw", "expected"),
    [
        ((768, 576), (416, 416), InputTransform(416 / 768, 312 / 576, 0, 52, (416, 312))),
        ((773, 512), (416, 416), InputTransform(416 / 773, 275 / 512, 0, 70, (416, 275))),
        ((500, 1000), (608, 608), InputTransform(304 / 500, 608 / 1000, 152, 0, (304, 608))),
        ((100, 100), (320, 640), InputTransform(3.2, 3.2, 160, 0, (320, 320))),
        ((10_000, 1), (64, 64), InputTransform(64 / 10_000, 1.0, 0, 31, (64, 1))),
    ],
    ids=["wide", "odd remainder", "tall", "wide input", "hair"],
)
def test_letterbox_follows_darknet_to_the_pixel(image_wh, input_hw, expected):
    assert resize_plan(image_wh, input_hw, "letterbox") == expected


def by_ultralytics(image_wh, input_hw):
    """Ultralytics' `LetterBox`, written out from `data/augment.py`: size, then left, top, right and bottom padding."""
    r = min(input_hw[0] / image_wh[1], input_hw[1] / image_wh[0])
    new_unpad = round(image_wh[0] * r), round(image_wh[1] * r)
    dw, dh = (input_hw[1] - new_unpad[0]) / 2, (input_hw[0] - new_unpad[1]) / 2
    return new_unpad, (round(dw - 0.1), round(dh - 0.1), round(dw + 0.1), round(dh + 0.1))


@pytest.mark.parametrize("input_hw", [(640, 640), (416, 416), (384, 640), (640, 384)], ids=str)
@pytest.mark.parametrize(
    "image_wh",
    [(1000, 333), (333, 1000), (773, 512), (512, 773), (1023, 767), (767, 1023), (640, 427), (1280, 853), (37, 19), (100, 100)],
    ids=str,
)
def test_letterbox_follows_ultralytics_to_the_pixel(image_wh, input_hw):
    """Sizes and padding, where height x scale is fractional, landscape and portrait."""
    plan = resize_plan(image_wh, input_hw, "letterbox", "ultralytics")
    size, (left, top, right, bottom) = by_ultralytics(image_wh, input_hw)
    assert plan.resized_wh == size
    assert (plan.offset_x, plan.offset_y) == (left, top)
    assert (input_hw[1] - size[0] - left, input_hw[0] - size[1] - top) == (right, bottom)


@given(
    image_wh=st.tuples(SIDES, SIDES),
    input_hw=st.tuples(st.sampled_from([32, 320, 416, 608]), st.sampled_from([32, 320, 416, 608])),
    resize=st.sampled_from(["stretch", "letterbox"]),
    rule=st.sampled_from(["darknet", "ultralytics"]),
    box=st.tuples(EDGES, EDGES, EDGES, EDGES),
)
def test_a_box_goes_to_the_model_and_back_unharmed(image_wh, input_hw, resize, rule, box):
    transform = resize_plan(image_wh, input_hw, resize, rule)
    there = to_model(np.array([box]), transform)
    np.testing.assert_allclose(to_original(there, transform), [box], atol=1e-6)
    whole = to_model(np.array([0, 0, *image_wh]), transform)
    (w, h), x, y = transform.resized_wh, transform.offset_x, transform.offset_y
    np.testing.assert_allclose(whole, [x, y, x + w, y + h], atol=1e-6)
    assert 0 <= x <= input_hw[1] - w and 0 <= y <= input_hw[0] - h
    assert (w, h) == input_hw[::-1] or (resize == "letterbox" and (w == input_hw[1] or h == input_hw[0]))


def test_a_fitted_image_lies_where_its_plan_says():
    image = np.full((50, 100, 3), 200, np.uint8)
    transform = resize_plan((100, 50), (64, 64), "letterbox")
    fitted = fit_image(image, transform, (64, 64), letterbox_value=128)
    assert fitted.shape == (64, 64, 3) and fitted.dtype == np.uint8
    assert (fitted[16:48] == 200).all() and (fitted[:16] == 128).all() and (fitted[48:] == 128).all()


def test_a_stretched_image_is_interpolated_between_pixel_centres():
    image = np.repeat(np.array([[0, 100]], np.uint8)[..., None], 3, axis=-1)
    fitted = fit_image(image, resize_plan((2, 1), (1, 4), "stretch"), (1, 4))
    assert fitted[0, :, 0].tolist() == [0, 25, 75, 100]


def test_iou_of_golden_pairs():
    a = np.array([[0, 0, 2, 2], [0, 0, 0, 0]], float)
    b = np.array([[0, 0, 2, 2], [1, 1, 3, 3], [2, 0, 4, 2], [0, 0, 1, 2], [5, 5, 5, 5]], float)
    assert iou_matrix(a, b).tolist() == [[1.0, 1 / 7, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]]
    assert iou_matrix(np.zeros((0, 4)), b).shape == (0, 5)


BOXES = np.array([[0, 0, 10, 10], [0, 0, 10, 9], [20, 0, 30, 10], [0, 0, 10, 5]], float)
SCORES = np.array([0.5, 0.9, 0.7, 0.6])


@pytest.mark.parametrize(
    ("groups", "iou_threshold", "stays"),
    [
        ([0, 0, 0, 0], 0.45, [1, 2]),
        ([1, 0, 0, 0], 0.45, [0, 1, 2]),
        ([0, 0, 0, 0], 0.9, [0, 1, 2, 3]),
        ([-(2**40), -(2**40), 2**40, 2**40], 0.45, [1, 2, 3]),
    ],
    ids=["one class", "two classes", "at the threshold stays", "two images"],
)
def test_nms_keeps_the_best_of_each_cluster(groups, iou_threshold, stays):
    assert np.flatnonzero(nms(BOXES, SCORES, np.array(groups), iou_threshold)).tolist() == stays


def test_of_equal_scores_the_first_stays_and_a_box_without_area_has_no_rivals():
    twice = np.repeat(BOXES[:1], 3, axis=0)
    flat = np.array([[0, 0, 10, 0], [10, 10, 0, 0], [10, 0, 0, 10]], float)
    boxes = np.concatenate([twice, flat, flat])
    assert nms(boxes, np.full(len(boxes), 0.5), np.zeros(len(boxes), int), 0.45).tolist() == [True, False, False] + [True] * 6
    assert nms(boxes[:0], np.zeros(0), np.zeros(0, int), 0.45).tolist() == []


@given(st.integers(0, 200), st.integers(0, 2**32 - 1), st.floats(0.1, 0.9), st.sampled_from([1, 2, 40]))
def test_nms_leaves_no_rivals_and_drops_nothing_without_one(count, seed, iou_threshold, groups):
    rng = np.random.default_rng(seed)
    corners = rng.uniform(0, 50, (count, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(1, 40, (count, 2))], axis=1)
    scores, class_ids = rng.uniform(0, 1, count), rng.integers(0, groups, count)
    kept = np.flatnonzero(nms(boxes, scores, class_ids, iou_threshold))
    rivals = (iou_matrix(boxes, boxes) > iou_threshold) & (class_ids[:, None] == class_ids[None, :])
    assert rivals[np.ix_(kept, kept)].sum() == len(kept)
    for dropped in set(range(count)) - set(kept.tolist()):
        assert (rivals[dropped, kept] & (scores[kept] >= scores[dropped])).any()


@pytest.mark.parametrize(
    ("boxes", "kept", "grown"),
    [
        pytest.param([], [], [], id="no box"),
        pytest.param([[0, 0, 9, 9], [8, 0, 17, 9]], [0, 1], [[0, 0, 9, 9], [8, 0, 17, 9]], id="neighbours"),
        pytest.param([[0, 0, 9, 9], [4, 0, 13, 9], [8, 0, 17, 9]], [0, 2], [[0, 0, 13, 9], [8, 0, 17, 9]], id="no chain"),
        pytest.param([[4, 4, 6, 6], [0, 0, 9, 9]], [0], [[0, 0, 9, 9]], id="a part is surer than the whole"),
        pytest.param([[0, 0, 9, 9], [4, 4, 4, 6]], [0, 1], [[0, 0, 9, 9], [4, 4, 4, 6]], id="no area"),
    ],
)
def test_merging_grows_the_surest_box_around_those_that_share_half_of_the_smaller_one(boxes, kept, grown):
    boxes = np.array(boxes, float).reshape(-1, 4)
    scores = np.linspace(0.9, 0.5, len(boxes))
    found = nmm(boxes, scores, np.zeros(len(boxes), int), 0.5, 9)
    assert (found[0].tolist(), found[1].tolist()) == (kept, grown)
    other_classes = nmm(boxes, scores, np.arange(len(boxes)), 0.5, 9)
    assert np.array_equal(other_classes[1], boxes)
    assert nmm(boxes, scores, np.arange(len(boxes)), 0.5, 1)[0].tolist() == kept[:1]
