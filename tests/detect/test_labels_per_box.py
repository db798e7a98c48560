"""`labels_per_box` several: each class above the threshold makes a detection of its box, in every kind of model."""

import dataclasses

import cv2
import numpy as np
import pytest
import tensorflow as tf

from models.export import export_detector
from models.geometry import iou_matrix
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.golden import GoldenImage, disagreement
from pipeline.detect.load_detector import load_detector
from pipeline.errors import ModelError
from pipeline.records import EncodedImage, ImageRef, detection_row
from tests.tiny_models import detected, save_model

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


def save_joined(folder):
    return save_model(
        folder, lambda images: {"output_0": tf.concat(tensors(images), -1)}, tf.TensorSpec((None, *HW, 3), tf.float32, "images")
    )


def save_apart(folder):
    def predict(images):
        boxes, scores = tensors(images)
        return {"boxes": boxes, "scores": scores}

    return save_model(folder, predict, tf.TensorSpec((None, *HW, 3), tf.float32, "images"))


def by_darknet(several):
    """Darknet's `do_nms_sort`, written out: class by class; a box that overlaps a better one loses this class only."""
    found = []
    for class_id in range(3):
        scores = (
            np.where(SCORES.argmax(axis=1) == class_id, SCORES[:, class_id], 0.0) if not several else SCORES[:, class_id].copy()
        )
        order = np.argsort(-scores)
        for place, n in enumerate(order):
            if scores[n] > 0.3:
                found.append((class_id, scores[n], BOXES[n]))
                for m in order[place + 1 :]:
                    if iou_matrix(BOXES[[n]], BOXES[[m]])[0, 0] > 0.45:
                        scores[m] = 0.0
    return sorted(found, key=lambda one: -one[1])


IMAGE = EncodedImage(ImageRef("a.png"), cv2.imencode(".png", np.full((64, 64, 3), 90, np.uint8))[1].tobytes())
MODELS = [
    pytest.param(save_exported, {}, id="exported by this project"),
    pytest.param(save_joined, {"class_names": NAMES, "box_format": "xyxy", "nms": "pipeline", "resize": "stretch"}, id="joined"),
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


def test_golden_images_with_the_best_class_of_each_box_stay_golden(tmp_path):
    """They were written without this setting; a second class of a box is no disagreement."""
    folder = save_exported(tmp_path / "toy")
    rows, detectors = [], []
    for labels in ("best", "several"):
        detectors.append(
            load_detector(ModelConfig(path=folder), dataclasses.replace(SETTINGS, score_threshold=0.5, labels_per_box=labels))
        )
        rows.append(detection_row(detectors[-1].detect([IMAGE])[0]))
    golden = [GoldenImage("a.png", IMAGE.content, {**rows[0], "score_threshold": 0.5, "iou_threshold": 0.45})]
    assert len(rows[1]["detections"]) > len(rows[0]["detections"])
    settings = dataclasses.replace(SETTINGS, score_threshold=0.5)
    assert disagreement(golden, detectors[1].detect, settings) is None
    for detector in detectors:
        detector.close()


def test_a_model_that_has_chosen_is_refused_in_one_line(tmp_path):
    def predict(images):
        one = tf.reduce_mean(images, [1, 2])[:, :1]
        return {"boxes": tf.stack([one, one, one, one], -1), "scores": one, "classes": one}

    folder = save_model(tmp_path / "model", predict, tf.TensorSpec((None, *HW, 3), tf.float32, "images"))
    with pytest.raises(ModelError, match="has one class for each box only") as caught:
        load_detector(ModelConfig(path=folder), SETTINGS)
    assert "\n" not in str(caught.value)
