"""From a model's answer to boxes on the original image."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from models.geometry import resize_plan
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.detect.detections import check_classes, to_detections
from pipeline.errors import ModelError
from pipeline.failures import Failure
from pipeline.records import DetectedImage, ImageRef, detection_row
from tests.models.box_formats import boxes_from_xyxy, to_model

MODEL = DetectorMetadata("m", (100, 200), "stretch", ("cat", "dog", "person"))
SAME = resize_plan((200, 100), (100, 200), "stretch")  # an image that fills the input as it is


def answer(boxes, scores, classes=None, count=None):
    outputs = {"boxes": np.array(boxes, np.float32).reshape(-1, 4), "scores": np.array(scores, np.float32)}
    if classes is not None:
        outputs["classes"] = np.array(classes, np.float32)
    if count is not None:
        outputs["count"] = np.array(count, np.float32)
    return outputs


def of_one_image(outputs, model, transform, detect):
    (result,) = to_detections({name: np.asarray(array)[None] for name, array in outputs.items()}, model, [transform], detect)
    return result


def found(outputs, model=MODEL, transform=SAME, **settings):
    result = of_one_image(outputs, model, transform, DetectConfig(**settings))
    assert result.boxes_xyxy.shape == (len(result), 4)
    assert (result.boxes_xyxy.dtype, result.confidences.dtype, result.class_ids.dtype) == (np.float32, np.float32, np.int32)
    return [
        (result.class_names[n], round(float(result.confidences[n]), 3), result.boxes_xyxy[n].tolist()) for n in range(len(result))
    ]


UNIT = [0, 0, 1, 1]
FOUR = answer([UNIT, [0.5, 0.5, 1, 1], UNIT, [0, 0, 0.5, 0.5]], [0.5, 0.9, 0.1, 0.5], [0, 1, 2, 0])


@pytest.mark.parametrize(
    ("settings", "names_and_scores"),
    [
        pytest.param({"score_threshold": 1.0}, [], id="nothing above"),
        pytest.param({}, [("dog", 0.9), ("cat", 0.5), ("cat", 0.5)], id="confidence descending"),
        pytest.param({"score_threshold": 0.5}, [("dog", 0.9), ("cat", 0.5), ("cat", 0.5)], id="the threshold itself is enough"),
        pytest.param({"score_threshold": 0.0}, [("dog", 0.9), ("cat", 0.5), ("cat", 0.5), ("person", 0.1)], id="all"),
        pytest.param({"max_detections": 2}, [("dog", 0.9), ("cat", 0.5)], id="most confident first"),
        pytest.param({"classes": ("cat",), "max_detections": 2}, [("cat", 0.5), ("cat", 0.5)], id="filtered before limited"),
        pytest.param({"classes": ("person", "dog"), "score_threshold": 0.0}, [("dog", 0.9), ("person", 0.1)], id="two classes"),
    ],
)
def test_thresholds_filter_and_limit(settings, names_and_scores):
    assert [row[:2] for row in found(FOUR, **settings)] == names_and_scores


def test_ties_keep_the_models_order_and_boxes_stay_unclipped():
    rows = found(answer([[-0.25, 0, 1.5, 1], UNIT], [0.5, 0.5], [0, 0]))
    assert [row[2] for row in rows] == [[-50, 0, 300, 100], [0, 0, 200, 100]]


WHOLE = [0, 0, 200, 100]  # `UNIT` on the image
FROM_1 = dataclasses.replace(MODEL, class_id_offset=1)
YXYX = dataclasses.replace(MODEL, box_format="yxyx")
CXCYWH = dataclasses.replace(MODEL, box_format="cxcywh", box_units="pixels")
NAMELESS = dataclasses.replace(FROM_1, class_names=())
NUMBERLESS = [np.nan, np.inf, 1e10, -1e10]


@pytest.mark.parametrize(
    ("outputs", "model", "rows"),
    [
        pytest.param(answer([], [], []), MODEL, [], id="no boxes"),
        pytest.param(answer([UNIT, UNIT], [0.9, 0.8], [0, 1], count=0), MODEL, [], id="count of none"),
        pytest.param(answer([UNIT, UNIT], [0.9, 0.8], [0, 1], count=1), MODEL, [("cat", 0.9, WHOLE)], id="padded answer"),
        pytest.param(answer([UNIT], [0.9], [0], count=1e30), MODEL, [("cat", 0.9, WHOLE)], id="a huge count"),
        pytest.param(answer([UNIT], [0.9], [1]), FROM_1, [("cat", 0.9, WHOLE)], id="classes from 1"),
        pytest.param(answer([UNIT], [0.9], [18]), NAMELESS, [("class 18", 0.9, WHOLE)], id="from 1 without a name"),
        pytest.param(answer([UNIT], [0.9], [-1]), MODEL, [("class -1", 0.9, WHOLE)], id="a class without a name"),
        pytest.param(answer([UNIT], [[0.1, 0.7, 0.2]]), MODEL, [("dog", 0.7, WHOLE)], id="scores of all classes"),
        pytest.param(answer([UNIT], [0.7]), MODEL, [("cat", 0.7, WHOLE)], id="one class, no class output"),
        pytest.param(answer([[0.1, 0.2, 0.3, 0.5]], [0.9]), YXYX, [("cat", 0.9, [40, 10, 100, 30])], id="yxyx shares"),
        pytest.param(answer([[50, 40, 20, 10]], [0.9]), CXCYWH, [("cat", 0.9, [40, 35, 60, 45])], id="cxcywh pixels"),
        pytest.param(answer([UNIT, UNIT], [np.inf, 0.8], [0, 0]), MODEL, [("cat", 0.8, WHOLE)], id="an infinite score"),
        pytest.param(answer([UNIT], [np.nan], [0]), MODEL, [], id="a score that is no number"),
        pytest.param(answer([UNIT], [1.5], [0]), MODEL, [("cat", 1.0, WHOLE)], id="a score above 1"),
        pytest.param(answer([UNIT] * 4, [0.9] * 4, NUMBERLESS), MODEL, [], id="classes that are no numbers"),
        pytest.param(answer([[0, 0, np.inf, 1], [np.nan] * 4], [0.9] * 2), MODEL, [], id="boxes that are no numbers"),
        pytest.param(answer([[0, 0, 3e38, 1]], [0.9]), MODEL, [], id="a box that is infinite once it is on the image"),
    ],
)
def test_what_models_say(outputs, model, rows):
    """Numbers that are none are left out."""
    got = found(outputs, model)
    assert [row[:2] for row in got] == [row[:2] for row in rows]
    assert np.allclose([row[2] for row in got], [row[2] for row in rows], atol=1e-4)


def test_overlaps_are_suppressed_by_class_where_the_model_does_not():
    overlapping = answer(
        [[0, 0, 100, 100], [0, 0, 90, 100], [0, 0, 90, 100], [150, 0, 200, 100]], [0.9, 0.8, 0.7, 0.6], [0, 0, 1, 0]
    )
    pixels = dataclasses.replace(MODEL, box_units="pixels")
    ours = dataclasses.replace(pixels, nms="pipeline")
    assert [row[1] for row in found(overlapping, pixels)] == [0.9, 0.8, 0.7, 0.6]
    assert [row[1] for row in found(overlapping, ours)] == [0.9, 0.7, 0.6]
    assert [row[1] for row in found(overlapping, ours, iou_threshold=0.95)] == [0.9, 0.8, 0.7, 0.6]
    assert [row[1] for row in found(overlapping, ours, max_detections=2)] == [0.9, 0.7]


edges = st.floats(-0.5, 1.5, width=32)


@given(
    boxes=st.lists(st.tuples(edges, edges, edges, edges), min_size=1, max_size=5),
    image_wh=st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
    input_hw=st.tuples(st.integers(32, 700), st.integers(32, 700)),
    resize=st.sampled_from(["stretch", "letterbox"]),
    box_format=st.sampled_from(["xyxy", "yxyx", "xywh", "cxcywh"]),
    box_units=st.sampled_from(["norm", "pixels"]),
)
def test_a_box_drawn_on_the_image_comes_back_from_every_kind_of_model(boxes, image_wh, input_hw, resize, box_format, box_units):
    """The way to the model and back is the identity, to a thousandth of the image."""
    original = np.array(boxes) * [*image_wh, *image_wh]
    transform = resize_plan(image_wh, input_hw, resize)
    seen = to_model(original, transform) / ([*input_hw[::-1]] * 2 if box_units == "norm" else 1)
    outputs = answer(boxes_from_xyxy(seen, box_format), np.full(len(boxes), 0.5), np.zeros(len(boxes)))
    model = DetectorMetadata("m", input_hw, resize, ("cat",), box_format=box_format, box_units=box_units)
    result = of_one_image(outputs, model, transform, DetectConfig())
    assert np.allclose(result.boxes_xyxy, original, atol=max(image_wh) * 1e-3)


@pytest.mark.parametrize(
    ("classes", "names", "message"),
    [
        (("cat", "persn"), MODEL.class_names, "classes: model m has no class 'persn'; did you mean 'person'?"),
        (("zebra",), MODEL.class_names, "classes: model m has no class 'zebra'; it has cat, dog, person"),
        (("cat",), (), "classes: model m has no class 'cat'; it has no class names"),
    ],
)
def test_a_filter_for_a_class_that_the_model_lacks_is_refused(classes, names, message):
    with pytest.raises(ModelError) as caught:
        check_classes(classes, dataclasses.replace(MODEL, class_names=names))
    assert str(caught.value) == message


def outputs_of(boxes_shape, scores_shape, classes_shape=None):
    shapes = {"boxes": boxes_shape, "scores": scores_shape, "classes": classes_shape}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items() if shape is not None}


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        pytest.param(answer([UNIT], [0.9], [0], count=np.nan), "as the model's count, got [nan]", id="count that is no number"),
        pytest.param(answer([UNIT], [0.9], [0], count=-1), "as the model's count, got [-1.0]", id="negative count"),
        pytest.param(answer([UNIT], [0.9], [0], count=[1, 1]), "as the model's count, got [1.0, 1.0]", id="two counts"),
        pytest.param(outputs_of((1, 4), (2,), (1,)), "got (1, 4) and (2,) and (1,)", id="more scores than boxes"),
        pytest.param(outputs_of((1, 4), (1,), (2,)), "got (1, 4) and (1,) and (2,)", id="more classes than boxes"),
        pytest.param(outputs_of((1, 4), (1, 1), (1,)), "expected boxes (M, 4), scores (M,) and classes (M,)", id="classes twice"),
        pytest.param(outputs_of((1, 5), (1,)), "got (1, 5) and (1,)", id="five numbers a box"),
        pytest.param(outputs_of((), (1,)), "got () and (1,)", id="one number"),
        pytest.param(outputs_of((1, 4), (1, 0)), "got (1, 4) and (1, 0)", id="no class"),
        pytest.param({**outputs_of((1, 4), ()), "scores": np.array([b"high"])}, "numbers as the model's scores", id="texts"),
        pytest.param({"boxes": np.zeros((1, 4))}, "expected numbers as the model's scores, got none", id="no scores"),
    ],
)
def test_an_output_that_is_none_of_a_detector_is_a_failure_of_its_image(outputs, message):
    failure = of_one_image(outputs, MODEL, SAME, DetectConfig())
    assert (failure.stage, failure.reason) == ("detect", "bad_output")
    assert message in failure.message


large = float(np.finfo(np.float32).max)
wild = st.one_of(st.floats(width=32), st.sampled_from([0.0, 0.5, 1.0, -1.0, large, -large, np.inf, -np.inf, np.nan]))
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def arrays_of(shape):
    """Arrays of numbers of every kind, mostly of the right shape."""
    return st.one_of(st.just(shape), shapes).flatmap(lambda each: arrays(np.float32, each, elements=wild))


@given(
    outputs=st.integers(0, 4).flatmap(
        lambda most: st.fixed_dictionaries(
            {"boxes": arrays_of((most, 4)), "scores": st.one_of(arrays_of((most,)), arrays_of((most, 3)))},
            optional={"classes": arrays_of((most,)), "count": arrays_of(())},
        )
    ),
    image_wh=st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
    box_format=st.sampled_from(["xyxy", "yxyx", "xywh", "cxcywh"]),
    box_units=st.sampled_from(["norm", "pixels"]),
    nms=st.sampled_from(["model", "pipeline"]),
    threshold=st.sampled_from([0.0, 0.25]),
)
def test_whatever_a_model_returns_is_a_row_of_strict_json_or_a_failure_of_its_image(
    outputs, image_wh, box_format, box_units, nms, threshold
):
    model = dataclasses.replace(MODEL, box_format=box_format, box_units=box_units, nms=nms)
    transform = resize_plan(image_wh, MODEL.input_hw, "stretch")
    detections = of_one_image(outputs, model, transform, DetectConfig(score_threshold=threshold))
    if isinstance(detections, Failure):
        assert detections.reason == "bad_output"
        return
    row = detection_row(DetectedImage(ImageRef("a"), *image_wh, "m", "1", detections))
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    confidences = [each["confidence"] for each in row["detections"]]
    assert confidences == sorted(confidences, reverse=True)
    assert all(0 <= confidence <= 1 for confidence in confidences)
