"""Exports a detector's network as a batched SavedModel for the pipeline, TF Serving, Vertex AI and tfx_bsl.

    <output>/saved_model.pb, variables/         four or five signatures over one set of weights
    <output>/assets.extra/detector.json         the description of the model (`models.metadata`)
    <output>/assets.extra/tf_serving_warmup_requests
    <output>/assets.extra/files.json            the files and their sizes (`models.manifest`)

| signature            | inputs                                              | boxes                                       |
|----------------------|-----------------------------------------------------|---------------------------------------------|
| `detect`             | `images` uint8 `(N, H, W, 3)` RGB, the thresholds    | xyxy, 0..1 of the model's input             |
| `serving_default`    | `image_bytes` string `(N,)`: JPEG, PNG, GIF, BMP     | xyxy, pixels of the image as it is stored   |
| `serving_thresholds` | `image_bytes`, the thresholds                       | as `serving_default`                        |
| `candidates`         | `images` as `detect`                                | as `detect`, all of them, not suppressed    |
| `candidates_float16` | as `candidates`; of Darknet models                  | as `candidates`, computed in float16        |

The thresholds are `score_threshold` 0.25, `iou_threshold` 0.45 and `max_detections` 100 by default. TF Serving, the TF1 loader
and, in Python, `loaded.detect(images)` fill in defaults; `loaded.signatures["detect"]` needs every input by name.
`candidates` returns `boxes` `(N, M, 4)` and `scores` `(N, M, C)`.
All others return `boxes` `(N, max_detections, 4)`, `scores` `(N, max_detections)`, `classes` `(N, max_detections)` int32 and
`num_detections` `(N,)` int32, confidence descending, zeros after the last detection; boxes are not clipped.

Serving signatures ignore EXIF orientation, and an image that TensorFlow cannot decode fails its whole request.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from models.manifest import write_manifest
from models.metadata import DetectorMetadata, write_metadata

if TYPE_CHECKING:
    import tensorflow as tf

    Predict = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]

SCORE_THRESHOLD = 0.25
IOU_THRESHOLD = 0.45
MAX_DETECTIONS = 100
CANDIDATES, CANDIDATES_FLOAT16 = "candidates", "candidates_float16"


def export_detector(
    predict: Predict,
    metadata: DetectorMetadata,
    output_dir: str,
    *,
    variables: Sequence[tf.Variable] = (),
    predict_float16: Predict | None = None,
) -> None:
    """Writes a detector's SavedModel; it appears under `output_dir` whole or not at all.

    Args:
      predict: The network: float32 RGB images `(N, H, W, 3)` in 0..1 to boxes `(N, M, 4)` (xyxy, 0..1 of the input) and
        the classes' confidences `(N, M, C)`, both float32. It is traced without autograph, N unknown.
      metadata: `name`, `input_hw`, `resize`, `letterbox_value` and `class_names`; the other fields must have their defaults,
        since every exported detector has the same signatures.
      output_dir: Local directory that does not exist yet, best `<model>/<integer version>`, as TF Serving expects it.
      variables: The `tf.Variable`s that `predict` uses.
      predict_float16: The same network computed in float16, whose boxes are decoded in float32.

    Raises:
      FileExistsError: `output_dir` exists.
      OSError: `output_dir` cannot be written.
      ValueError: `metadata` describes another kind of detector, or does not fit the output of `predict`.
    """
    import tensorflow as tf

    exported = DetectorMetadata(
        metadata.name, metadata.input_hw, metadata.resize, metadata.class_names, letterbox_value=metadata.letterbox_value
    )
    if metadata != exported or metadata.resize == "none":
        raise ValueError(f"an exported detector is described by {exported}, got {metadata}")
    with written_whole(output_dir) as saved_model_dir:
        module = _detector_module(predict, metadata, variables, predict_float16)
        names = [
            "detect",
            "serving_default",
            "serving_thresholds",
            CANDIDATES,
            *([CANDIDATES_FLOAT16] if predict_float16 else []),
        ]
        signatures = {name: getattr(module, name) for name in names}
        try:
            tf.saved_model.save(module, saved_model_dir, signatures=signatures)
        except tf.errors.OpError as err:  # TensorFlow raises no OSError for a full disk
            raise OSError(f"{output_dir} cannot be written: {err.message.splitlines()[0]}") from err
        write_metadata(saved_model_dir, metadata)
        _write_warmup(saved_model_dir, metadata)


@contextlib.contextmanager
def written_whole(output_dir: str) -> Iterator[str]:
    """A path for a new version, which becomes `output_dir` with a manifest at the end of the block, or is deleted on an error.

    Raises:
      OSError: `output_dir` exists, or cannot be created.
    """
    check_output_dir(output_dir)
    parents = Path(os.path.abspath(output_dir)).parents
    nearest = next(folder for folder in parents if os.path.lexists(folder))
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=nearest) as scratch:
        unfinished = os.path.join(scratch, "1")
        yield unfinished
        write_manifest(unfinished)
        os.makedirs(parents[0], exist_ok=True)
        try:
            os.rename(unfinished, output_dir)
        except OSError:
            check_output_dir(output_dir)  # another process has written it meanwhile
            raise


def check_output_dir(output_dir: str) -> None:
    """Raises OSError if a new version cannot be called so."""
    if "://" in output_dir:
        raise OSError(f"{output_dir}: expected a local directory; copy the finished directory to where it is served from")
    if os.path.lexists(output_dir):
        raise FileExistsError(f"{output_dir} exists already; remove it, or choose the next version number")


def _detector_module(
    predict: Predict, metadata: DetectorMetadata, variables: Sequence[tf.Variable], predict_float16: Predict | None
) -> tf.Module:
    """A plain module (no Keras: the TF1 loader must find its variables) with one function for each signature."""
    import tensorflow as tf

    images_spec = tf.TensorSpec((None, *metadata.input_hw, 3), tf.uint8, name="images")
    bytes_spec = tf.TensorSpec((None,), tf.string, name="image_bytes")
    threshold_specs = [
        tf.TensorSpec((), tf.float32, name="score_threshold"),
        tf.TensorSpec((), tf.float32, name="iou_threshold"),
        tf.TensorSpec((), tf.int32, name="max_detections"),
    ]
    # tensors, since only these become defaults of the SavedModel's signatures
    score_default, iou_default, max_default = map(tf.constant, (SCORE_THRESHOLD, IOU_THRESHOLD, MAX_DETECTIONS))

    def detect(
        images: tf.Tensor,
        score_threshold: tf.Tensor = score_default,
        iou_threshold: tf.Tensor = iou_default,
        max_detections: tf.Tensor = max_default,
    ) -> dict[str, tf.Tensor]:
        found = candidates(images)
        return suppress(found["boxes"], found["scores"], score_threshold, iou_threshold, max_detections)

    def candidates(images: tf.Tensor) -> dict[str, tf.Tensor]:
        boxes, scores = predict(tf.cast(images, tf.float32) * (1 / 255))
        if scores.shape[-1] != len(metadata.class_names):
            raise ValueError(f"the network answers {scores.shape[-1]} classes, the metadata names {len(metadata.class_names)}")
        return {"boxes": boxes, "scores": scores}

    def serving_thresholds(
        image_bytes: tf.Tensor,
        score_threshold: tf.Tensor = score_default,
        iou_threshold: tf.Tensor = iou_default,
        max_detections: tf.Tensor = max_default,
    ) -> dict[str, tf.Tensor]:
        images, image_hw = _decode_and_fit(image_bytes, metadata)
        found = module.detect(images, score_threshold, iou_threshold, max_detections)
        return {**found, "boxes": _to_stored_image(found["boxes"], image_hw, metadata)}

    def serving_default(image_bytes: tf.Tensor) -> dict[str, tf.Tensor]:
        return serving_thresholds(image_bytes)

    module = tf.Module(name="detector")
    module.weights = list(variables)
    module.detect = tf.function(detect, autograph=False, input_signature=[images_spec, *threshold_specs])
    module.candidates = tf.function(candidates, autograph=False, input_signature=[images_spec])
    if predict_float16:

        def candidates_float16(images: tf.Tensor) -> dict[str, tf.Tensor]:
            boxes, scores = predict_float16(tf.cast(images, tf.float32) * (1 / 255))
            return {"boxes": boxes, "scores": scores}

        module.candidates_float16 = tf.function(candidates_float16, autograph=False, input_signature=[images_spec])
    module.serving_thresholds = tf.function(serving_thresholds, autograph=False, input_signature=[bytes_spec, *threshold_specs])
    module.serving_default = tf.function(serving_default, autograph=False, input_signature=[bytes_spec])
    return module


def suppress(
    boxes: tf.Tensor,
    scores: tf.Tensor,
    score_threshold: tf.Tensor,
    iou_threshold: tf.Tensor,
    max_detections: tf.Tensor,
    *,
    several_labels: bool = False,
) -> dict[str, tf.Tensor]:
    """Score threshold and greedy per-class NMS for a whole batch; each box counts for its best class only, by default.

    Args:
      boxes: `(N, M, 4)` float32.
      scores: `(N, M, C)` float32 confidences.
      score_threshold: Confidences must be above it.
      iou_threshold: A box is dropped if its IoU with a better one of its class is above it.
      max_detections: Length of the output for each image.
      several_labels: Whether a box counts for each class above the threshold.

    Returns:
      The outputs that the docstring of this module describes.
    """
    import tensorflow as tf

    confidences = tf.reduce_max(scores, axis=-1)
    # No fixed limit: the number of candidates is that of the fullest image of the batch, mostly a few dozen of thousands.
    candidates = tf.math.count_nonzero(confidences > score_threshold, axis=1, dtype=tf.int32)
    most = tf.minimum(tf.maximum(tf.reduce_max(candidates), 1), tf.shape(confidences)[1])  # there may be no boxes at all
    confidences, kept = tf.math.top_k(confidences, k=most)
    scores = tf.gather(scores, kept, batch_dims=1)
    if not several_labels:
        scores = tf.one_hot(tf.argmax(scores, axis=-1), scores.shape[-1]) * confidences[..., None]
    found = tf.image.combined_non_max_suppression(
        tf.gather(boxes, kept, batch_dims=1)[:, :, None],
        scores,
        max_output_size_per_class=max_detections,
        max_total_size=max_detections,
        iou_threshold=iou_threshold,
        score_threshold=score_threshold,
        clip_boxes=False,
    )
    return {
        "boxes": found.nmsed_boxes,
        "scores": found.nmsed_scores,
        "classes": tf.cast(found.nmsed_classes, tf.int32),
        "num_detections": found.valid_detections,
    }


def _decode_and_fit(image_bytes: tf.Tensor, metadata: DetectorMetadata) -> tuple[tf.Tensor, tf.Tensor]:
    """Encoded images `(N,)` to the model's input `(N, H, W, 3) uint8` and their sizes `(N, 2)`, as `geometry.fit_image`."""
    import tensorflow as tf

    def decode_one(content: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        pixels = tf.io.decode_image(content, channels=3, expand_animations=False)
        image_hw = tf.shape(pixels)[:2]
        resized_hw, offset_hw = _placement(image_hw, metadata)
        resized = tf.cast(tf.round(tf.image.resize(pixels, resized_hw)), tf.uint8)
        margins = tf.stack([offset_hw, metadata.input_hw - resized_hw - offset_hw], axis=1)
        padded = tf.pad(resized, tf.concat([margins, [[0, 0]]], axis=0), constant_values=metadata.letterbox_value)
        return tf.ensure_shape(padded, (*metadata.input_hw, 3)), image_hw

    # Only this runs image by image (several at a time), since the images of a request differ in size until here.
    signature = (tf.TensorSpec((*metadata.input_hw, 3), tf.uint8), tf.TensorSpec((2,), tf.int32))
    images, image_hw = tf.map_fn(decode_one, image_bytes, fn_output_signature=signature)
    return images, image_hw


def _placement(image_hw: tf.Tensor, metadata: DetectorMetadata) -> tuple[tf.Tensor, tf.Tensor]:
    """`geometry.resize_plan` in TensorFlow: sizes `(..., 2)` to resized sizes and offsets in the input, both `(..., 2)`."""
    import tensorflow as tf

    input_hw = tf.constant(metadata.input_hw)
    resized_hw = tf.broadcast_to(input_hw, tf.shape(image_hw))
    if metadata.resize == "letterbox":
        resized_hw = tf.minimum(input_hw, tf.maximum(image_hw * tf.reverse(input_hw, [-1]) // tf.reverse(image_hw, [-1]), 1))
    return resized_hw, (input_hw - resized_hw) // 2


def _to_stored_image(boxes_norm: tf.Tensor, image_hw: tf.Tensor, metadata: DetectorMetadata) -> tf.Tensor:
    """Boxes `(N, M, 4)` in 0..1 of the model's input to pixels of images of size `(N, 2)`; unused rows stay zero."""
    import tensorflow as tf

    resized_hw, offset_hw = _placement(image_hw, metadata)
    scale_hw = tf.cast(image_hw, tf.float32) / tf.cast(resized_hw, tf.float32)
    scale, offset = (tf.tile(tf.reverse(x, [-1])[:, None], [1, 1, 2]) for x in (scale_hw, tf.cast(offset_hw, tf.float32)))
    input_h, input_w = metadata.input_hw
    boxes = (boxes_norm * tf.constant([input_w, input_h] * 2, tf.float32) - offset) * scale
    return tf.where(tf.reduce_any(boxes_norm != 0, axis=-1, keepdims=True), boxes, 0.0)


def _write_warmup(saved_model_dir: str, metadata: DetectorMetadata) -> None:
    """Writes TF Serving's warm-up file: a `serving_default` request with a grey ramp, which it runs before it takes traffic."""
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_log_pb2

    h, w = metadata.input_hw
    ramp = tf.cast(tf.range(w) * 255 // w, tf.uint8)
    image = tf.io.encode_jpeg(tf.tile(ramp[None, :, None], [h, 1, 3]))
    request = predict_pb2.PredictRequest(inputs={"image_bytes": tf.make_tensor_proto(image[None])})
    request.model_spec.name = metadata.name
    request.model_spec.signature_name = "serving_default"
    log = prediction_log_pb2.PredictionLog(predict_log=prediction_log_pb2.PredictLog(request=request))
    with tf.io.TFRecordWriter(os.path.join(saved_model_dir, "assets.extra", "tf_serving_warmup_requests")) as writer:
        writer.write(log.SerializeToString())
