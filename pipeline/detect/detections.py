"""Turns a model's outputs for a batch into boxes on the original, upright images."""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from models.geometry import InputTransform, boxes_to_xyxy, descending, nms
from models.metadata import DetectorMetadata
from pipeline.config import DetectConfig
from pipeline.detect.engine import BadOutput
from pipeline.errors import ModelError
from pipeline.failures import Failure, ImageError
from pipeline.records import Detections

_NO_CLASS = -(2**31)
_GROUPS = 2**32  # of each image: one for each class
_FAR = 1e29  # pixels of the input; on the image, what is farther away may be infinite in `float32`


def to_detections(
    outputs: Mapping[str, np.ndarray], metadata: DetectorMetadata, transforms: Sequence[InputTransform], detect: DetectConfig
) -> list[Detections | Failure]:
    """Applies thresholds and suppression (unless the model does), and maps boxes back to the images.

    Args:
      outputs: For n images `boxes (n, M, 4)`, `scores (n, M)` or `(n, M, C)`, and where the model has them `classes (n, M)` and
        `count (n,)`. Without `classes`, the best of the scores' last axis is the class, or several (`labels_per_box`); without
        that axis, class 0.
      metadata: What these numbers mean.
      transforms: How each image was fitted to the model's input.
      detect: Thresholds, class filter and limit.

    Returns:
      For each image its detections by descending confidence. Boxes are not clipped to the image: an object may reach beyond it.
      Objects with an edge, a score or a class that is not finite are left out; confidences above 1 become 1. Or a failure: the
      output is not a detector's, but has wrong shapes, a count that is no number, or texts.
    """
    images = len(transforms)
    try:
        boxes, scores, classes = _arrays(outputs, images)
        counts = _counts(outputs, images, boxes.shape[1])
    except ImageError as err:
        return [err.failure] * images
    places, confidences, class_ids = _candidates(scores, classes, counts, metadata, detect)
    of = places // boxes.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):
        fitted = boxes_to_xyxy(boxes.reshape(-1, 4).take(places, axis=0).astype(np.float64), metadata.box_format)
        if metadata.box_units == "norm":
            fitted *= np.array([_input_wh(metadata, each) * 2 for each in transforms], np.float64).take(of, axis=0)
        is_near = np.abs(fitted) < _FAR
    if not is_near.all():
        of, fitted, confidences, class_ids = _taken(np.flatnonzero(is_near.all(axis=1)), of, fitted, confidences, class_ids)
    if detect.classes:
        is_wanted = np.isin(class_ids, [metadata.class_names.index(name) for name in detect.classes])
        of, fitted, confidences, class_ids = _taken(np.flatnonzero(is_wanted), of, fitted, confidences, class_ids)
    if metadata.nms == "pipeline":
        stays = np.flatnonzero(nms(fitted, confidences, of * _GROUPS + class_ids, detect.iou_threshold))
        of, fitted, confidences, class_ids = _taken(stays, of, fitted, confidences, class_ids)
    of, fitted, confidences, class_ids = _taken(descending(of, confidences), of, fitted, confidences, class_ids)
    fits = [(each.offset_x, each.offset_y, each.scale_x, each.scale_y, each.left, each.top) for each in transforms]
    offsets, scales, corners = _of_corners(np.array(fits, np.float64).reshape(-1, 3, 2)).take(of, axis=1)
    on_image = ((fitted - offsets) / scales + corners).astype(np.float32)
    confidences = np.minimum(confidences, np.float32(1))
    names = [*map(functools.cache(functools.partial(class_name, metadata)), class_ids.tolist())]
    ends = np.searchsorted(of, np.arange(images + 1)).tolist()
    of_images = [slice(start, min(stop, start + detect.max_detections)) for start, stop in itertools.pairwise(ends)]
    return [
        Failure("detect", "bad_output", _bad_count(outputs, n))
        if counts[n] < 0
        else Detections(on_image[one], class_ids[one], confidences[one], tuple(names[one]))
        for n, one in enumerate(of_images)
    ]


def check_outputs(outputs: Mapping[str, np.ndarray], images: int) -> None:
    """Checks what a model returns for so many images; see `to_detections`.

    Raises:
      BadOutput: It cannot be detections.
    """
    try:
        boxes, _, _ = _arrays(outputs, images)
        bad = np.flatnonzero(_counts(outputs, images, boxes.shape[1]) < 0)
    except ImageError as err:
        raise BadOutput(err.failure.message) from err
    if len(bad):
        raise BadOutput(_bad_count(outputs, bad[0]))


def _taken(places: np.ndarray, *arrays: np.ndarray) -> Iterator[np.ndarray]:
    """What arrays have at these places."""
    return (array.take(places, axis=0) for array in arrays)


def _of_corners(of_x_and_y: np.ndarray) -> np.ndarray:
    """`(n, kinds, 2)` as `(kinds, n, 4)`, for both corners of boxes."""
    return np.concatenate([of_x_and_y, of_x_and_y], axis=2).swapaxes(0, 1)


def _input_wh(metadata: DetectorMetadata, transform: InputTransform) -> tuple[int, int]:
    return transform.resized_wh if metadata.resize == "none" else (metadata.input_hw[1], metadata.input_hw[0])


def _candidates(
    scores: np.ndarray, classes: np.ndarray | None, counts: np.ndarray, metadata: DetectorMetadata, detect: DetectConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of all boxes that are sure enough: (place among those of all images, ascending; confidence `float32`; class id `int32`)."""
    in_count = np.arange(scores.shape[1]) < counts[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        if scores.ndim == 3 and detect.labels_per_box == "several":
            sure = scores.astype(np.float32, copy=False)
            pairs = np.flatnonzero((sure >= detect.score_threshold) & in_count[..., None])
            places, ids = np.divmod(pairs, scores.shape[2])
            sure = sure.take(pairs)
        else:
            best = (scores.max(axis=-1) if scores.ndim == 3 else scores).astype(np.float32, copy=False)
            places = np.flatnonzero((best >= detect.score_threshold) & in_count)
            sure = best.take(places)
            if classes is not None:
                ids = _class_ids(classes.take(places), metadata.class_id_offset)
            elif scores.ndim == 3:
                ids = scores.reshape(-1, scores.shape[2]).take(places, axis=0).argmax(axis=-1)
            else:  # a model of one class
                ids = np.zeros(len(places), np.int32)
    is_known = np.isfinite(sure) & (ids != _NO_CLASS)
    if not is_known.all():
        places, sure, ids = _taken(np.flatnonzero(is_known), places, sure, ids)
    return places, sure, ids.astype(np.int32, copy=False)


def _arrays(outputs: Mapping[str, np.ndarray], images: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    boxes, scores = _numbers(outputs, "boxes"), _numbers(outputs, "scores")
    classes = _numbers(outputs, "classes") if "classes" in outputs else None
    most = boxes.shape[1] if boxes.ndim > 1 else 0
    of_classes = classes is None and scores.ndim == 3 and scores.shape[:2] == (images, most) and scores.shape[2] > 0
    scores_fit = scores.shape == (images, most) or of_classes
    if boxes.shape != (images, most, 4) or not scores_fit or (classes is not None and classes.shape != (images, most)):
        shapes = f"{boxes.shape[1:]} and {scores.shape[1:]}" + ("" if classes is None else f" and {classes.shape[1:]}")
        wanted = "(M, 4), scores (M,) or (M, C)" if classes is None else "(M, 4), scores (M,) and classes (M,)"
        raise ImageError("detect", "bad_output", f"expected boxes {wanted} from the model, got {shapes}")
    return boxes, scores, classes


def _numbers(outputs: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    try:
        array = np.asarray(outputs[name])
        return array if array.dtype.kind in "fiub" else array.astype(np.float64)
    except (KeyError, TypeError, ValueError) as err:
        got = f"{np.asarray(outputs[name]).dtype}" if name in outputs else "none"
        raise ImageError("detect", "bad_output", f"expected numbers as the model's {name}, got {got}") from err


def _counts(outputs: Mapping[str, np.ndarray], images: int, most: int) -> np.ndarray:
    """How many boxes of each image count; -1 where the model's count cannot be."""
    if "count" not in outputs:
        return np.full(images, most)
    counts = _numbers(outputs, "count").reshape(images, -1)
    if counts.shape[1] != 1:
        return np.full(images, -1)
    bad = ~np.isfinite(counts[:, 0]) | (counts[:, 0] < 0)
    return np.where(bad, -1, np.minimum(np.nan_to_num(counts[:, 0]), most)).astype(int)


def _bad_count(outputs: Mapping[str, np.ndarray], image: int) -> str:
    got = _numbers(outputs, "count")[image].ravel()[:3].tolist()
    return f"expected the number of boxes as the model's count, got {got}"


def _class_ids(classes: np.ndarray, offset: int) -> np.ndarray:
    """Class ids from 0; `_NO_CLASS` for NaN and for numbers beyond 32 bits."""
    if classes.dtype == np.int32 and not offset:
        return classes
    numbers = classes.astype(np.float64) - offset
    valid = np.abs(numbers) < -_NO_CLASS  # not so for NaN
    return np.where(valid, numbers, _NO_CLASS).astype(np.int32)


def class_name(metadata: DetectorMetadata, class_id: int) -> str:
    """The name of a class; `class <number>`, by the model's own number, if the model has no name for it."""
    if 0 <= class_id < len(metadata.class_names):
        return metadata.class_names[class_id]
    return f"class {class_id + metadata.class_id_offset}"


def check_classes(classes: tuple[str, ...], metadata: DetectorMetadata) -> None:
    """Checks the class filter.

    Raises:
      ModelError: The model lacks one of the classes; the message has the nearest name.
    """
    for name in classes:
        if name not in metadata.class_names:
            near = difflib.get_close_matches(name, metadata.class_names, n=1)
            known = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(metadata.class_names[:10]) or 'no class names'}"
            raise ModelError(f"classes: model {metadata.name} has no class '{name}'; {known}")
