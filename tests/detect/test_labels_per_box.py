"""`labels_per_box` several: each class above the threshold makes a detection of its box, in every kind of model."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from models.export import export_detector
from models.geometry import iou_matrix
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from tests.tiny_models import detected, png, save_model

HW = (64, 64)
NAMES = ("ant", "bee", "cow")
COUNT = 40
SETTINGS = DetectConfig(score_threshold=0.3, iou_threshold=0.45, max_detections=200, labels_per_box="several")


def candidates():
    """Boxes (xyxy, pixels) in clusters, and scores, many boxes with two or three classes above the threshold."""
    draw = np.random.default_rng(5)
    centre = draw.choice([16.0, 48.0], (COUNT, 2)) + draw.normal(0, 3, (COUNT, 2))
    half = draw.uniform(4, 10, (COUNT, 2))
    return np.concatenate([centre - half, centre + half], 1), draw.uniform(0, 0.9, (COUNT, 3))


BOXES, SCORES = candidates()


def tensors(images):
    """The candidates, for each image, as shares and a little lighter on brighter images."""
    light = tf.reduce_mean(tf.cast(images, tf.float32), [1, 2, 3])[:, None, None]
    return tf.constant(BOXES / 64, tf.float32)[None] + 0.0 * light, tf.constant(SCORES, tf.float32)[None] + 0.0 * light


def save_exported(folder):
    export_detector(tensors, DetectorMetadata("toy", HW, "stretch", NAMES), str(folder))
    return str(folder)


def save_apart(folder):
    def predict(images):
        boxes, scores = tensors(images)
        return {"boxes": boxes, "scores": scores}

    return save_model(folder, predict, tf.TensorSpec((None, *HW, 3), tf.float32, "images"))


def by_darknet(several):
    """Darknet's `do_nms_sort`, written out: class by class; a box that overlaps a better one loses this class only."""
    found = []
    for class_id in range(3):
        scores = np.where(several | (SCORES.argmax(axis=1) == class_id), SCORES[:, class_id], 0.0)
        order = np.argsort(-scores)
        for place, n in enumerate(order):
            if scores[n] > 0.3:
                found.append((class_id, scores[n], BOXES[n]))
                for m in order[place + 1 :]:
                    if iou_matrix(BOXES[[n]], BOXES[[m]])[0, 0] > 0.45:
                        scores[m] = 0.0
    return sorted(found, key=lambda one: -one[1])


IMAGE = png("a.png", np.full((*HW, 3), 90, np.uint8))
MODELS = [
    pytest.param(save_exported, {}, id="suppressed in the graph, exported by this project"),
    pytest.param(save_apart, {"class_names": NAMES, "nms": "pipeline"}, id="suppressed in the pipeline"),
]


@pytest.mark.parametrize("labels", ["best", "several"])
@pytest.mark.parametrize(("save", "config"), MODELS)
def test_detections_are_those_of_darknets_suppression(tmp_path, save, config, labels):
    settings = dataclasses.replace(SETTINGS, labels_per_box=labels)
    ((result,), _) = detected(save(tmp_path / "model"), [IMAGE], settings, **config)
    expected = by_darknet(labels == "several")
    found = result.detections
    assert found.class_ids.tolist() == [class_id for class_id, _, _ in expected]
    np.testing.assert_allclose(found.confidences, [score for _, score, _ in expected], atol=1e-6)
    np.testing.assert_allclose(found.boxes_xyxy, [box for _, _, box in expected], atol=1e-4)
    boxes = [tuple(box) for box in np.round(found.boxes_xyxy, 3).tolist()]
    assert (len(set(boxes)) < len(boxes)) == (labels == "several")
