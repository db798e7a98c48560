"""Doubts about the detections of a whole job: signs of a model that is described wrongly, for the summary and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MOST_OBJECTS = 1000
_IMAGES_FULL, _IMAGES_EMPTY = 20, 200  # fewer images prove nothing
_SHARE_FULL, _SHARE_OUTSIDE = 0.9, 0.1


def doubts(objects: Mapping[int, int], outside: int, config: Mapping[str, Any]) -> Iterator[str]:
    """What looks wrong, a line each with the settings that may cause it.

    Args:
      objects: Images by number of objects; numbers above `MOST_OBJECTS` count as that.
      outside: Objects whose box lies for the most part outside of its image.
      config: The job's settings, nested.
    """
    images, total = sum(objects.values()), sum(number * amount for number, amount in objects.items())
    most = config.get("detect", {}).get("max_detections", MOST_OBJECTS + 1)
    full = objects.get(most, 0)
    if images >= _IMAGES_FULL and full >= _SHARE_FULL * images:
        yield f"{full} of {images} images have {most} objects, the most allowed; see max_detections and score_threshold"
    if outside and outside >= _SHARE_OUTSIDE * total:
        where = "lie for the most part outside of their images; see model.box_format, model.box_units and model.resize"
        yield f"{outside} of {total} boxes {where}"
    if images >= _IMAGES_EMPTY and not total:
        yield f"none of {images} images has an object; see score_threshold, model.value_range and model.box_units"
