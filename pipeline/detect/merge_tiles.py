"""Merges what a model finds in the tiles of an image, so that an object which several of them show counts once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from models.geometry import nmm, nms
from pipeline.config import DetectConfig
from pipeline.records import DetectedImage, Detections


def merge_tiles(tiles: Sequence[DetectedImage], detect: DetectConfig) -> DetectedImage:
    """The result of an image from those of its tiles.

    Args:
      tiles: At least one, in the order in which they were detected, with boxes in pixels of the image.
      detect: The overlap above which boxes of one class are one object, and how many detections an image may have.

    Returns:
      The last one, with the detections of all, and the time that all took. A single one as it is.
    """
    if len(tiles) == 1:
        return tiles[0]
    first, last = tiles[0].timing, tiles[-1].timing
    batches = [batch for tile in tiles for batch in tile.timing.batches] or [(0, 0.0)]
    timing = replace(
        last,
        predict=first.predict + last.finished_at - first.finished_at,
        postprocess=sum(tile.timing.postprocess for tile in tiles),
        led_batch=batches[0][0],
        model=batches[0][1],
        further_batches=tuple(batches[1:]),
    )
    return replace(tiles[-1], detections=_merged([tile.detections for tile in tiles], detect), timing=timing)


def _merged(found: Sequence[Detections], detect: DetectConfig) -> Detections:
    """The detections of all tiles as those of one image: of equal confidences the earlier tile's come first."""
    boxes, class_ids, confidences = (
        np.concatenate([getattr(each, name) for each in found]) for name in ("boxes_xyxy", "class_ids", "confidences")
    )
    names = [name for each in found for name in each.class_names]
    if detect.tile_merge == "nms":
        stays = nms(boxes.astype(np.float64), confidences, class_ids, detect.iou_threshold)
        order = np.argsort(-confidences, kind="stable")
        kept = order[stays[order]][: detect.max_detections]
        boxes = boxes[kept]
    else:
        kept, boxes = nmm(boxes, confidences, class_ids, detect.iou_threshold, detect.max_detections)
    return Detections(boxes, class_ids[kept], confidences[kept], tuple(names[n] for n in kept))
