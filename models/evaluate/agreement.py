"""Agreement of two outputs over the same images: shows what a lower precision, another decoder or another version changes."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from models.evaluate.detection_rows import ImageRow, RowsError, Source, one_of, read_rows
from models.geometry import greedy_pairs, iou_matrix

Match = Literal["name", "path"]


def compare(detections: Source, reference: Source, *, iou_threshold: float = 0.5, match: Match = "name") -> dict[str, Any]:
    """Matches the detections of two outputs one to one and measures their agreement.

    A pair has the same class and an IoU of at least `iou_threshold`. In each image pairs are taken by descending IoU, each
    detection at most once. Detections in images that only one output has count as not matched.

    Args:
      detections: An output; see `models.evaluate.detection_rows.read_rows`.
      reference: The output to compare it with.
      iou_threshold: In 0..1.
      match: `name` matches images by file name, `path` by the whole URI.

    Returns:
      `images` in both, `images_only_in_detections`, `images_only_in_reference`, `detections`, `reference_detections`, `matched`
      pairs, and `agreement`: 2 matched / all detections of both, None without any, since that shows nothing. Of the matched
      pairs, or None without any: `mean_iou`, `min_iou`, `mean_score_difference` (detections minus reference),
      `mean_abs_score_difference`, `max_abs_score_difference`.

    Raises:
      RowsError: An output cannot be read, names an image twice, or the two have no image in common.
    """
    ours, theirs = _by_image(read_rows(detections), match), _by_image(read_rows(reference), match)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise RowsError(
            f"the outputs have no image in common: the first has {_few(list(ours))}, the second {_few(list(theirs))}"
            + ("; try --match name" if match == "path" else "")
        )
    pairs = [pair for key in common for pair in _matched_pairs(ours[key], theirs[key], iou_threshold)]
    count_ours, count_theirs = (sum(len(row.scores) for row in rows.values()) for rows in (ours, theirs))
    total = count_ours + count_theirs
    return {
        "images": len(common),
        "images_only_in_detections": len(ours.keys() - theirs.keys()),
        "images_only_in_reference": len(theirs.keys() - ours.keys()),
        "detections": count_ours,
        "reference_detections": count_theirs,
        "iou_threshold": iou_threshold,
        "matched": len(pairs),
        "agreement": 2 * len(pairs) / total if total else None,
        **_pair_figures(pairs),
    }


def _pair_figures(pairs: list[tuple[float, float]]) -> dict[str, float | None]:
    names = ("mean_iou", "min_iou", "mean_score_difference", "mean_abs_score_difference", "max_abs_score_difference")
    if not pairs:
        return dict.fromkeys(names)
    iou, difference = np.array(pairs).T
    absolute = np.abs(difference)
    return dict(zip(names, map(float, (iou.mean(), iou.min(), difference.mean(), absolute.mean(), absolute.max())), strict=True))


def _by_image(rows: list[ImageRow], match: Match) -> dict[str, ImageRow]:
    by_key: dict[str, ImageRow] = {}
    for row in rows:
        key = f"image_id {row.image_id}" if row.image_id is not None else row.name if match == "name" else row.uri
        if key in by_key:
            other = by_key[key].uri
            hint = "try --match path" if match == "name" and other != row.uri else one_of(by_key[key], row)
            raise RowsError(f"two rows for {key}: {other or key} and {row.uri or key}; {hint}")
        by_key[key] = row
    return by_key


def _matched_pairs(ours: ImageRow, theirs: ImageRow, iou_threshold: float) -> list[tuple[float, float]]:
    """(IoU, our score minus theirs) of each pair; classes are compared by name, if all have one."""
    named = all((*ours.class_names, *theirs.class_names))
    a, b = (np.array(row.class_names if named else row.class_ids, object) for row in (ours, theirs))
    iou = np.where(a[:, None] == b, iou_matrix(ours.boxes_xyxy, theirs.boxes_xyxy), -1.0)
    pairs = greedy_pairs(iou, iou_threshold, set(range(len(a))), set(range(len(b))))
    return [(float(iou[i, j]), float(ours.scores[i] - theirs.scores[j])) for i, j in pairs]


def _few(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return f"{shown}, … ({len(names)} in all)" if len(names) > 3 else shown
