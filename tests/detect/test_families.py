"""Models of others, mostly without config: their boxes are those of the tools' own steps, in NumPy."""

import dataclasses

import cv2
import numpy as np
import pytest
from PIL import Image

from models.export import export_detector
from models.geometry import iou_matrix
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.families import family_of
from pipeline.detect.tensorflow_engine import described_signature
from tests.onnx_files import CELLS, HW, NAMES, STRIDES
from tests.tiny_models import detected, png, save_model
from tests.without_keras import tf
from tests.yolo_exports import export_yolo

SCORE, IOU = 0.3, 0.45
SETTINGS = DetectConfig(score_threshold=SCORE, iou_threshold=IOU, max_detections=300, batch_sizes=(1, 2), concurrent_batches=2)
MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def picture(size_wh, seed):
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 255, (size_wh[1] // 20, size_wh[0] // 20, 3), np.uint8)
    pixels = cv2.resize(coarse, size_wh, interpolation=cv2.INTER_CUBIC)
    return png(f"{seed}.png", pixels), pixels


PICTURES = [picture(size_wh, seed) for seed, size_wh in enumerate([(200, 133), (97, 231), (301, 99), (96, 64), (512, 128)])]


def channels(images, top):
    """The mean of each channel in each cell of the three grids `(N, 126, 3)`, in 0..1: what the toy heads are made of."""
    pooled = [tf.nn.avg_pool2d(images / top, stride, stride, "VALID") for stride in STRIDES]
    return tf.concat([tf.reshape(cells, [-1, cells.shape[1] * cells.shape[2], 3]) for cells in pooled], 1)


def joined(raw, cells):
    """The head of YOLOX before its decoding, from the channels."""
    a, b, c = (cells[..., n : n + 1] for n in range(3))
    left_top, size = tf.concat([b * 1.5 - 0.2, a * 1.2], -1), tf.concat([tf.math.log(1.0 + 3.0 * c), tf.math.log(1.5 + b)], -1)
    if not raw:
        corner = tf.constant([[x * s, y * s] for x, y, s in CELLS], tf.float32)
        stride = tf.constant([[s] for _, _, s in CELLS], tf.float32)
        left_top, size = left_top * stride + corner, tf.exp(size) * stride
    return tf.concat([left_top, size], -1), a, tf.concat([b, c, 1.0 - b], -1)


def save(folder, predict, name="images"):
    return save_model(folder, predict, tf.TensorSpec((None, *HW, 3), tf.float32, name))


def save_yolox(folder, raw=True, top=255.0, sure=False):
    """And YOLOv6, which is sure of an object in each cell."""

    def predict(images):
        boxes, objectness, scores = joined(raw, channels(images, top))
        return {"output": tf.concat([boxes, tf.ones_like(objectness) if sure else objectness, scores], -1)}

    return save(folder, predict)


def save_yolo_nas(folder):
    def predict(images):
        boxes, _, scores = joined(False, channels(images, 1.0))
        corners = tf.concat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1)
        return {"output_0": corners, "output_1": scores}

    return save(folder, predict, "input")


def save_detr(folder, slots, count=100, in_one=False):
    """Logits that depend on each channel after its normalisation (`in_one`: confidences); boxes all over the input."""
    draw = np.random.default_rng(slots)
    weights, bias = draw.normal(0, 3, (3, count * slots)), draw.normal(-2, 1, count * slots)
    places, spread = draw.uniform(0.2, 0.8, (count, 4)), draw.normal(0, 0.1, (3, count * 4))

    def predict(pixel_values):
        light = tf.reduce_mean(pixel_values, [1, 2])
        logits = tf.matmul(light, tf.constant(weights, tf.float32)) + tf.constant(bias, tf.float32)
        boxes = tf.constant(places, tf.float32) + tf.reshape(tf.matmul(light, tf.constant(spread, tf.float32)), [-1, count, 4])
        logits = tf.reshape(logits, [-1, count, slots])
        if in_one:
            return {"output_0": tf.concat([boxes, tf.sigmoid(logits)], -1)}
        return {"logits": logits, "pred_boxes": boxes, "last_hidden_state": boxes[..., :1]}

    return save(folder, predict, "pixel_values")


def padded(pixels, rounded, margin, before):
    """The image in a grey input that leaves a margin, `before` of the spare pixels before it; its scale and offset, as boxes."""
    h, w = pixels.shape[:2]
    r = min((HW[0] - margin) / h, (HW[1] - margin) / w)
    size = rounded(w * r), rounded(h * r)
    left, top = before(HW[1] - size[0]), before(HW[0] - size[1])
    boxed = np.full((*HW, 3), 114, np.uint8)
    boxed[top : top + size[1], left : left + size[0]] = cv2.resize(pixels, size, interpolation=cv2.INTER_LINEAR)
    return boxed, np.array([size[0] / w, size[1] / h] * 2), np.array([left, top] * 2)


def yolox_input(pixels):
    """`preproc` of YOLOX: the smaller image at the top left."""
    boxed, scale, offset = padded(pixels, int, 0, before=lambda spare: 0)
    return boxed[..., ::-1].astype(np.float32), scale, offset


def letterboxed(pixels):
    """`LetterBox` of Ultralytics, and of YOLOv6."""
    boxed, scale, offset = padded(pixels, round, 0, before=lambda spare: round(spare / 2 - 0.1))
    return boxed.astype(np.float32) / 255, scale, offset


def yolo_nas_input(pixels):
    """`DetectionLongestMaxSizeRescale` to 4 pixels less, then `DetectionCenterPadding`."""
    boxed, scale, offset = padded(pixels, round, 4, before=lambda spare: spare // 2)
    return boxed.astype(np.float32) / 255, scale, offset


def stretched(pixels):
    scale = np.array([HW[1] / pixels.shape[1], HW[0] / pixels.shape[0]] * 2)
    return cv2.resize(pixels, HW[::-1], interpolation=cv2.INTER_LINEAR).astype(np.float32) / 255, scale, np.zeros(4)


def antialiased(pixels):
    """As the processors of Hugging Face, which resize with Pillow."""
    _, scale, offset = stretched(pixels)
    return np.asarray(Image.fromarray(pixels).resize(HW[::-1], Image.Resampling.BILINEAR)).astype(np.float32) / 255, scale, offset


def detr_input(pixels):
    fitted, scale, offset = antialiased(pixels)
    return ((fitted - MEAN) / DEVIATION).astype(np.float32), scale, offset


def centres_to_corners(boxes):
    return np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)


def yolox_boxes(outputs):
    """`demo_postprocess` of YOLOX, cell by cell, and its scores."""
    rows = outputs["output"][0]
    cells = zip(rows, CELLS, strict=True)
    boxes = np.array([[(row[0] + x) * s, (row[1] + y) * s, np.exp(row[2]) * s, np.exp(row[3]) * s] for row, (x, y, s) in cells])
    return centres_to_corners(boxes), rows[:, 4:5] * rows[:, 5:]


def boxes_of_ultralytics(layout, units):
    def read(outputs):
        (rows,) = outputs["output_0"]
        rows = (rows.T if layout == "4+C,M" else rows).astype(float)
        boxes = rows[:, :4] if layout == "M,6" else centres_to_corners(rows[:, :4])
        scores = {"M,5+C": rows[:, 4:5] * rows[:, 5:], "M,6": rows[:, 4:5] * np.eye(3)[rows[:, -1].astype(int) % 3]}
        return boxes * (np.array([*HW[::-1]] * 2) if units == "norm" else 1), scores.get(layout, rows[:, 4:])

    return read


def decoded_boxes(outputs):
    (rows,) = next(iter(outputs.values()))
    return centres_to_corners(rows[:, :4]), rows[:, 4:5] * rows[:, 5:]


def yolo_nas_boxes(outputs):
    return outputs["output_0"][0], outputs["output_1"][0]


def shares(boxes):
    return centres_to_corners(boxes) * np.array([*HW[::-1]] * 2)


def detr_boxes(outputs):
    """Softmax over all slots; the last one is no object."""
    powers = np.exp(outputs["logits"][0].astype(float))
    return shares(outputs["pred_boxes"][0]), (powers / powers.sum(axis=1, keepdims=True))[:, :-1]


def rtdetr_boxes(outputs):
    return shares(outputs["pred_boxes"][0]), 1 / (1 + np.exp(-outputs["logits"][0].astype(float)))


def best_300_boxes(outputs):
    (rows,) = outputs["output_0"]
    return shares(rows[:, :4]), rows[:, 4:]


def best_of(boxes, scores, suppress=True, score=SCORE, iou=IOU):
    """The best class of each box above the threshold, then greedy suppression within each class."""
    classes, confidences = scores.argmax(axis=1), scores.max(axis=1)
    order = [n for n in np.argsort(-confidences, kind="stable") if confidences[n] > score]
    kept = []
    for n in order:
        rivals = [m for m in kept if classes[m] == classes[n]] if suppress else []
        if not rivals or iou_matrix(boxes[[n]], boxes[rivals]).max() <= iou:
            kept.append(n)
    return boxes[kept], classes[kept], confidences[kept]


def ultralytics(layout, units, family):
    """A row of `MODELS`: an export of this layout, with boxes in these units."""

    def save_export(folder):
        return export_yolo(folder, layout, units=units)

    return save_export, {}, letterboxed, boxes_of_ultralytics(layout, units), layout != "M,6", family


NAMED = {"class_names": NAMES}
NOT_NORMALISED = {**NAMED, "normalisation": ""}
MODELS = {
    "YOLOX": (save_yolox, NAMED, yolox_input, yolox_boxes, True, "YOLOX"),
    "YOLOX, decoded": (lambda f: save_yolox(f, raw=False), NAMED, yolox_input, decoded_boxes, True, "YOLOX"),
    "YOLOv6": (
        lambda f: save_yolox(f, raw=False, top=1.0, sure=True),
        NAMED,
        letterboxed,
        decoded_boxes,
        True,
        "YOLOv5, YOLOv6 or YOLOv7",
    ),
    "YOLO-NAS": (save_yolo_nas, {}, yolo_nas_input, yolo_nas_boxes, True, "YOLO-NAS"),
    "DETR of COCO": (lambda f: save_detr(f, 92), {}, detr_input, detr_boxes, False, "DETR or YOLOS"),
    "DETR with names": (lambda f: save_detr(f, 4), NAMED, detr_input, detr_boxes, False, "DETR or YOLOS"),
    "Deformable DETR of COCO": (lambda f: save_detr(f, 91, 300), {}, detr_input, rtdetr_boxes, False, "Deformable DETR"),
    "RT-DETR of COCO": (lambda f: save_detr(f, 80, 300), {}, antialiased, rtdetr_boxes, False, "RT-DETR"),
    "RT-DETR with names": (lambda f: save_detr(f, 3, 300), NOT_NORMALISED, antialiased, rtdetr_boxes, False, "RT-DETR"),
    "RT-DETR of Ultralytics": (
        lambda f: save_detr(f, 3, 300, in_one=True),
        NAMED,
        stretched,
        best_300_boxes,
        False,
        "RT-DETR of Ultralytics",
    ),
    "Ultralytics, pixels": ultralytics("4+C,M", "pixels", "YOLO of Ultralytics"),
    "Ultralytics, shares": ultralytics("4+C,M", "norm", "YOLO of Ultralytics"),
    "Ultralytics, boxes in rows": ultralytics("M,4+C", "norm", "YOLO of Ultralytics with its boxes in rows"),
    "YOLOv5": ultralytics("M,5+C", "pixels", "YOLOv5, YOLOv6 or YOLOv7"),
    "Ultralytics, suppressed, pixels": ultralytics("M,6", "pixels", "YOLO of Ultralytics with suppression"),
    "Ultralytics, suppressed, shares": ultralytics("M,6", "norm", "YOLO of Ultralytics with suppression"),
}


@pytest.mark.parametrize(("save_as", "config", "fit", "read", "suppress", "family"), MODELS.values(), ids=MODELS)
def test_boxes_are_those_of_the_tools_own_steps(tmp_path, save_as, config, fit, read, suppress, family):
    folder = save_as(tmp_path / "model")
    *_, metadata = described_signature(folder, folder, ModelConfig(path=folder, **config), SETTINGS)
    assert family_of(metadata) == family
    results, _ = detected(folder, [image for image, _ in PICTURES], SETTINGS, **config)
    signature = tf.saved_model.load(folder).signatures["serving_default"]
    (name,) = signature.structured_input_signature[1]
    counts = []
    for (_, pixels), result in zip(PICTURES, results, strict=True):
        fitted, scale, offset = fit(pixels)
        outputs = {key: value.numpy() for key, value in signature(**{name: tf.constant(fitted[None])}).items()}
        boxes, classes, confidences = best_of(*read(outputs), suppress)
        found = result.detections
        apart = 1e5 * classes[:, None], 1e5 * found.class_ids[:, None].astype(float)  # only boxes of one class overlap
        ious = iou_matrix((boxes - offset) / scale + apart[0], found.boxes_xyxy + apart[1])
        match = ious.argmax(axis=1)  # boxes on the grey border have one confidence, so their order is open
        assert sorted(match) == [*range(len(found))] and ious.max(axis=1).min() > 0.999
        assert (found.class_ids[match] == classes).all()
        np.testing.assert_allclose(found.boxes_xyxy[match], (boxes - offset) / scale, atol=2e-3)  # pixels, of up to 512
        np.testing.assert_allclose(found.confidences[match], confidences, atol=2e-5)
        assert (np.diff(found.confidences) <= 0).all()
        counts.append(len(boxes))
    assert min(counts) > 1 and (len({*counts}) > 1 or {*counts} == {300})  # else nothing would have been compared


def save_exported(folder, predict):
    export_detector(predict, DetectorMetadata("toy", HW, "stretch", NAMES), str(folder))
    return str(folder)


def save_apart(folder, predict):
    return save(folder, lambda images: dict(zip(("boxes", "scores"), predict(images), strict=True)))


@pytest.mark.parametrize(
    ("save_as", "config"),
    [
        pytest.param(save_exported, {}, id="suppressed in the graph, exported by this project"),
        pytest.param(save_apart, {**NAMED, "nms": "pipeline"}, id="suppressed in the pipeline"),
    ],
)
def test_several_labels_of_a_box_are_those_of_darknets_suppression(tmp_path, save_as, config):
    """`do_nms_sort`, written out: class by class; a box that overlaps a better one loses this class only."""
    draw = np.random.default_rng(5)
    centre, half = draw.choice([16.0, 48.0], (40, 2)) + draw.normal(0, 3, (40, 2)), draw.uniform(4, 10, (40, 2))
    boxes, scores = np.concatenate([centre - half, centre + half], 1), draw.uniform(0, 0.9, (40, 3))

    def predict(images):
        nothing = 0.0 * tf.reduce_mean(tf.cast(images, tf.float32), [1, 2, 3])[:, None, None]
        return tf.constant(boxes / [*HW[::-1], *HW[::-1]], tf.float32) + nothing, tf.constant(scores, tf.float32) + nothing

    expected = []
    for class_id, of_class in enumerate(scores.T.copy()):
        order = np.argsort(-of_class)
        for place, n in enumerate(order):
            if of_class[n] > SCORE:
                expected.append((class_id, of_class[n], boxes[n]))
                rivals = order[place + 1 :]
                of_class[rivals[iou_matrix(boxes[[n]], boxes[rivals])[0] > IOU]] = 0.0
    classes, confidences, kept = zip(*sorted(expected, key=lambda one: -one[1]), strict=True)
    settings = dataclasses.replace(SETTINGS, labels_per_box="several")
    image = png("a.png", np.full((*HW, 3), 90, np.uint8))
    found = detected(save_as(tmp_path / "model", predict), [image], settings, **config)[0][0].detections
    assert found.class_ids.tolist() == [*classes]
    np.testing.assert_allclose(found.confidences, confidences, atol=1e-6)
    np.testing.assert_allclose(found.boxes_xyxy, kept, atol=1e-4)
    assert len({tuple(box) for box in kept}) < len(kept)
