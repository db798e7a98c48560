"""Models of any input size get each image at its own size: their boxes are those of TensorFlow called directly."""

import cv2
import numpy as np
import pytest

from models.geometry import iou_matrix
from pipeline.config import DetectConfig
from pipeline.records import EncodedImage, ImageRef
from tests.tiny_models import detected, png, save_model
from tests.without_keras import tf

SETTINGS = DetectConfig(score_threshold=0.3, scaled_decode=True)
CELL = 16


def save_object_detection_api(folder, pad, batch=1, dtype="uint8"):
    """As the TF Object Detection API exports a detector with a `keep_aspect_ratio_resizer` of 128 to 192 pixels.

    Its network finds bright cells of 16 pixels; the box around each grows and moves with the light in and beside it. So another
    scale, or another aspect ratio, gives other boxes. The boxes are yxyx shares of the true image, without its padding.
    """

    def resized(image):
        hw = tf.cast(tf.shape(image)[:2], tf.float32)
        large, small = tf.round(hw * 128.0 / tf.reduce_min(hw)), tf.round(hw * 192.0 / tf.reduce_max(hw))
        size = tf.cast(tf.where(tf.reduce_max(large) > 192.0, small, large), tf.int32)
        new = tf.image.resize(image, size)
        return (tf.image.pad_to_bounding_box(new, 0, 0, 192, 192) if pad else new), size

    def predict(input_tensor):
        images, sizes = tf.map_fn(
            resized,
            tf.cast(input_tensor, tf.float32),
            fn_output_signature=(tf.TensorSpec((None, None, 3)), tf.TensorSpec((2,), tf.int32)),
        )
        light = tf.nn.avg_pool2d(tf.reduce_mean(images, -1, keepdims=True), CELL, CELL, "SAME")[0, :, :, 0] / 255.0
        beside = tf.nn.avg_pool2d(light[None, :, :, None], 3, 1, "SAME")[0, :, :, 0]
        y, x = tf.meshgrid(tf.range(tf.shape(light)[0]), tf.range(tf.shape(light)[1]), indexing="ij")
        cy, cx = (CELL * (tf.cast(place, tf.float32) + 0.5 + beside - light) for place in (y, x))
        h, w = CELL * (1.0 + light), CELL * (1.0 + 2 * beside)
        corners = tf.reshape(tf.stack([cy - h, cx - w, cy + h, cx + w], -1), [-1, 4])
        boxes = corners / tf.cast(tf.tile(sizes[0], [2]), tf.float32)
        scores = tf.reshape(light, [1, -1, 1])
        found = tf.image.combined_non_max_suppression(boxes[None, :, None], scores, 20, 20, 0.5, 0.1, clip_boxes=False)
        return {
            "detection_boxes": found.nmsed_boxes,
            "detection_scores": found.nmsed_scores,
            "detection_classes": found.nmsed_classes + 1.0,
            "num_detections": tf.cast(found.valid_detections, tf.float32),
        }

    return save_model(folder, predict, tf.TensorSpec((batch, None, None, 3), dtype, "input_tensor"))


def photo(size_wh, seed):
    """A picture with smooth and sharp places, and its pixels."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 255, (7, 9, 3), np.uint8)
    pixels = cv2.resize(coarse, size_wh, interpolation=cv2.INTER_CUBIC)
    cv2.circle(pixels, (size_wh[0] // 3, size_wh[1] // 2), min(size_wh) // 4, (250, 250, 250), -1)
    return png(f"{seed}.png", pixels), pixels


SIZES_WH = [(640, 480), (480, 640), (1000, 333), (333, 1001), (199, 200), (90, 61), (1280, 720), (317, 911)]
PHOTOS = [photo(size_wh, seed) for seed, size_wh in enumerate(SIZES_WH)]


def directly(signature, pixels):
    """Boxes (xyxy, pixels), scores and classes from 1 by TensorFlow itself, above the threshold."""
    (spec,) = signature.structured_input_signature[1].values()
    found = signature(input_tensor=tf.cast(pixels[None], spec.dtype))
    kept = found["detection_scores"].numpy()[0] >= SETTINGS.score_threshold
    boxes = found["detection_boxes"].numpy()[0][kept][:, [1, 0, 3, 2]] * np.array(pixels.shape[1::-1] * 2)
    return boxes, found["detection_scores"].numpy()[0][kept], found["detection_classes"].numpy()[0][kept].astype(int)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pad", "batch", "dtype"),
    [(True, 1, "uint8"), (False, None, "float32")],
    ids=["padded, one image", "not padded, any batch, floats of 0 to 255"],
)
def test_boxes_are_those_of_tensorflow_called_directly(tmp_path, pad, batch, dtype):
    """By the keep-aspect-ratio resizer of the model itself: at least .98 of the boxes have an IoU of .98, all the same score."""
    folder = save_object_detection_api(tmp_path / "model", pad, batch, dtype)
    results, detector = detected(folder, [image for image, _ in PHOTOS], SETTINGS)
    assert (detector.model.metadata.resize, detector.batch_sizes) == ("none", (1,))
    signature = tf.saved_model.load(folder).signatures["serving_default"]
    ious = []
    for (_, pixels), result in zip(PHOTOS, results, strict=True):
        boxes, scores, classes = directly(signature, pixels)
        found = result.detections
        assert (result.width, result.height) == pixels.shape[1::-1]
        assert len(found) == len(boxes) > 0
        np.testing.assert_allclose(found.confidences, scores, atol=1e-5)
        assert (found.class_ids + 1).tolist() == classes.tolist()
        ious += np.diag(iou_matrix(found.boxes_xyxy.astype(float), boxes)).tolist()
    assert np.mean(np.array(ious) >= 0.98) >= 0.98
    assert len(ious) > 60


@pytest.mark.slow
def test_a_large_jpeg_reaches_the_model_whole(tmp_path):
    """Without decoding at reduced scale, which other models allow: the model itself makes it smaller."""
    folder = save_object_detection_api(tmp_path / "model", pad=True)
    pixels = photo((2400, 1600), 5)[1]
    content = cv2.imencode(".jpg", pixels[..., ::-1])[1].tobytes()
    ((result,), _) = detected(folder, [EncodedImage(ImageRef("a.jpg"), content)], SETTINGS)
    signature = tf.saved_model.load(folder).signatures["serving_default"]
    decoded = cv2.cvtColor(cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
    boxes, scores, _ = directly(signature, decoded)
    np.testing.assert_allclose(result.detections.boxes_xyxy, boxes, rtol=1e-4, atol=0.05)
    np.testing.assert_allclose(result.detections.confidences, scores, atol=1e-5)
