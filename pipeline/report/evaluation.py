"""`evaluation.html`: how good a model is on labelled images, on one page without scripts or references to other files."""

from __future__ import annotations

import collections
import io
import math
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from models.base.progress import shown as progress
from models.evaluate.average_precision import FIGURES, Measurement
from models.evaluate.coco_matching import RECALLS, Boxes, Floats
from models.evaluate.detection_rows import unpacked
from models.evaluate.mistakes import CONFIDENCES, Kind, Mistake, Mistakes, calibration, figures_at, threshold_curves, unsure_first
from pipeline.report.annotate import marked_jpeg
from pipeline.report.charts import Bar
from pipeline.report.page import environment, jpeg_url, page_style
from pipeline.report.texts import counted, number
from pipeline.storage.files import read_file

_KINDS: dict[Kind, tuple[str, str]] = {
    "miss": ("Misses", "Labelled objects that no detection overlaps by half; the largest of their image first."),
    "false positive": ("False positives", "Detections where nothing of the kind is labelled; the most confident first."),
    "wrong class": ("Wrong class", "The box fits a labelled object of another class; the most confident first."),
    "poorly placed": (
        "Poorly placed",
        "The class is right and the box overlaps the object by less than half; the most confident first.",
    ),
}
_HEADLINE = ("AP", "AP50", "AR_100")
_SHOWN_OF_A_KIND = 8
_SHOWN_CLASSES = 30
_SHOWN_CONFUSED = 10
_SHOWN_NEXT = 20
_LONGEST_SIDE = 380  # pixels of a picture
_JPEG_QUALITY = 72
_CONTEXT = 2.2  # sides of what is shown around a box, in sides of the box
_LEAST_SHARE = 0.3  # of the image's shorter side


def render_evaluation(
    measured: Measurement,
    figures: Mapping[str, Any],
    mistakes: Mistakes,
    *,
    names: tuple[str, str],
    notes: Sequence[str] = (),
    images: str = "",
) -> str:
    """The page as a complete HTML document, of the figures of `models.evaluate.evaluate` and of the mistakes at a threshold.

    `names` are of the output and of its labels; the images are read from a folder, or by their URIs.
    """
    curves = threshold_curves(measured.matches)
    kinds = collections.Counter(one.kind for one in mistakes.mistakes)
    bins, error = calibration(measured.matches)
    template = environment().get_template("evaluation.html")
    return template.render(
        **page_style("evaluation.css"),
        names=names,
        notes=notes,
        threshold=f"{mistakes.threshold:.2f}",
        mark=(100 * mistakes.threshold, f"threshold {mistakes.threshold:.2f}"),
        headline=[(FIGURES[key], figures[key], figures["intervals"].get(key)) for key in _HEADLINE],
        facts=[(FIGURES[key], figures[key]) for key in FIGURES if key not in _HEADLINE],
        operating=[*figures_at(measured.matches, mistakes.threshold).items()],
        precision_recall=_precision_recall(measured),
        threshold_curves=[(name, _points(CONFIDENCES, curves[name.lower()])) for name in ("F1", "precision", "recall")],
        confidences=_confidences(bins),
        calibration=[("right", _points([mean for mean, _, _ in bins], [right for _, right, _ in bins]))],
        calibration_error=f"{error:.3f}",
        **_classes(measured, figures),
        confusion=_confusion(measured, mistakes),
        kinds=[(title, number(kinds[kind]), note) for kind, (title, note) in _KINDS.items()],
        gallery=_gallery(measured, mistakes, images),
        unsure=_unsure(measured, mistakes.threshold),
        suspicious=_suspicious(measured, mistakes),
    )


def _points(xs: Any, ys: Any) -> str:
    """A polyline in a square of 100 x 100 from values in 0..1; what is NaN is left out."""
    return " ".join(f"{100 * x:.2f},{100 - 100 * y:.2f}" for x, y in zip(xs, ys, strict=True) if math.isfinite(x + y))


def _precision_recall(measured: Measurement) -> list[tuple[str, str]]:
    precision = measured.matches.curves()[0]
    present = np.isfinite(precision[0, :, 0])
    if not present.any():
        return []
    means: Floats = precision[:, present].mean(axis=1)
    return [(f"IoU {iou}", _points(RECALLS, means[t])) for iou, t in (("0.50", 0), ("0.75", 5))]


def _confidences(bins: Sequence[tuple[float, float, int]]) -> list[Bar]:
    """Detections by confidence, the highest first; a bar is a square root, of which the right ones take their share."""
    longest = math.sqrt(max((n for _, _, n in bins), default=0) or 1)
    return [
        (
            *(f"{mean:.2f}", [("bar", math.sqrt(n) / longest * right), ("bad", math.sqrt(n) / longest * (1 - right))]),
            *(number(n), f"{100 * right:.0f} % right"),
        )
        for mean, right, n in reversed(bins)
        if n
    ]


def _classes(measured: Measurement, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Classes with objects, the lowest AP first, and what the figures mean."""
    objects = np.bincount(measured.matches.objects.classes[measured.matches.counts[0]], minlength=measured.matches.n_classes)
    rows = [
        (name, [("bar", ap)], f"{ap:.3f}", f"recall {number(figures['recall_per_class'][name], 3)}, {counted(int(n), 'object')}")
        for (name, ap), n in zip(figures["per_class"].items(), objects, strict=True)
        if ap is not None
    ]
    left_out = f"; the lowest {_SHOWN_CLASSES} of {len(rows)} classes" if len(rows) > _SHOWN_CLASSES else ""
    return {
        "classes": sorted(rows, key=lambda row: (row[1], row[0]))[:_SHOWN_CLASSES],
        "classes_caption": f"AP, and recall at IoU 0.50 over all confidences{left_out}",
    }


def _confusion(measured: Measurement, mistakes: Mistakes) -> dict[str, Any]:
    """The rows and columns of the classes that are confused most, and of the background."""
    matrix = mistakes.confusion
    wrong = matrix.sum(axis=0) + matrix.sum(axis=1) - 2 * np.diag(matrix)
    present = [c for c in np.argsort(-wrong[:-1], kind="stable").tolist() if matrix[c].any() or matrix[:, c].any()]
    chosen = present[:_SHOWN_CONFUSED]
    names = [*(measured.pairing.labels.class_names[c] for c in chosen), "background"]
    cells = matrix[np.ix_([*chosen, -1], [*chosen, -1])]
    of_row = np.maximum(cells.sum(axis=1, keepdims=True), 1)
    rows = [
        (name, [(number(int(n)) if n else "", f"{0.7 * n / total:.2f}", row == column) for column, n in enumerate(line)])
        for row, (name, line, total) in enumerate(zip(names, cells, of_row[:, 0], strict=True))
    ]
    return {"names": names, "rows": rows, "left_out": len(present) - len(chosen)}


def _gallery(measured: Measurement, mistakes: Mistakes, folder: str) -> list[tuple[str, str, list[dict[str, Any]], str]]:
    """(Title, note, pictures, how many there are) of each kind; different images come first."""
    by_kind: dict[str, list[Mistake]] = collections.defaultdict(list)
    for one in sorted(mistakes.mistakes, key=lambda one: (-one.weight, one.image)):
        by_kind[one.kind].append(one)
    chosen = [(kind, one) for kind in _KINDS for one in _varied(by_kind[kind])]
    pictures: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for n, (kind, one) in enumerate(progress(chosen, "pictures", "images")):
        pictures[kind].append({"id": f"picture-{n}", **_picture(measured, mistakes, one, folder)})
    return [(title, note, pictures[kind], number(len(by_kind[kind]))) for kind, (title, note) in _KINDS.items()]


def _varied(ordered: Sequence[Mistake]) -> list[Mistake]:
    """The first few, one of each image before a second of any."""
    seen: collections.Counter[int] = collections.Counter()
    turns = []
    for place, one in enumerate(ordered):
        turns.append((seen[one.image], place))
        seen[one.image] += 1
    return [ordered[place] for _, place in sorted(turns)[:_SHOWN_OF_A_KIND]]


def _picture(measured: Measurement, mistakes: Mistakes, one: Mistake, folder: str) -> dict[str, Any]:
    """The part of the image around a mistake, with the boxes of objects and of detections in pixels of the picture."""
    names = measured.pairing.labels.class_names
    boxes = [(mistakes.objects, one.object, "not labelled"), (mistakes.detections, one.detection, "not detected")]
    of_mistake = np.array([each.xyxy[index] for each, index, _ in boxes if index >= 0])
    uri, row = _uri(measured, one.image), measured.pairing.rows.get(one.image)
    opened = _opened(uri, folder) if row else None
    right, bottom = np.ceil(of_mistake[:, 2:].max(axis=0)).clip(1).astype(int).tolist()
    size_wh = opened.size if opened else (row.width, row.height) if row and row.width else (right, bottom)
    scale = size_wh[0] / row.width if opened and row and row.width else 1.0
    left, top, right, bottom = _window(of_mistake * scale, size_wh)
    factor = _LONGEST_SIDE / max(right - left, bottom - top)
    drawn = [
        [(*_placed(box * scale, (left, top), factor), index == chosen) for index, box in _of_one_image(each, one.image)]
        for each, chosen, _ in boxes
    ]
    said = [names[each.classes[index]] if index >= 0 else missing for each, index, missing in boxes]
    if one.detection >= 0:
        said[1] += f" {mistakes.detections.scores[one.detection]:.2f}"
    return {
        "uri": uri,
        "name": posixpath.basename(uri),
        "size_wh": (f"{(right - left) * factor:.0f}", f"{(bottom - top) * factor:.0f}"),
        "url": _jpeg(opened.crop((left, top, right, bottom))) if opened else "",
        "labelled": drawn[0],
        "detected": drawn[1],
        "said": said,
        "iou": f"IoU {one.iou:.2f}" if one.iou else "",
    }


def _of_one_image(boxes: Boxes, image: int) -> list[tuple[int, Floats]]:
    first, last = np.searchsorted(boxes.images, [image, image + 1]).tolist()
    return [(index, boxes.xyxy[index]) for index in range(first, last)]


def _placed(box: Floats, origin: tuple[int, int], factor: float) -> tuple[str, str, str, str]:
    """x, y, width and height."""
    x0, y0, x1, y1 = ((edge - origin[n % 2]) * factor for n, edge in enumerate(box.tolist()))
    return (f"{x0:.1f}", f"{y0:.1f}", f"{max(x1 - x0, 0):.1f}", f"{max(y1 - y0, 0):.1f}")


def _window(boxes: Floats, size_wh: tuple[int, int]) -> tuple[int, int, int, int]:
    """The part of the image to show: the boxes with some context, inside the image."""
    low, high = boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)
    side = max(float((high - low).max()) * _CONTEXT, _LEAST_SHARE * min(size_wh))
    edges = []
    for middle, length in zip(((low + high) / 2).tolist(), size_wh, strict=True):
        extent = min(side, length)
        first = min(max(middle - extent / 2, 0), length - extent)
        edges.append((int(first), max(int(first) + 1, min(length, math.ceil(first + extent)))))
    (left, right), (top, bottom) = edges
    return left, top, right, bottom


def _opened(uri: str, folder: str) -> Image.Image | None:
    """The upright image; None if it cannot be read. Its size may be a fraction of the original's."""
    parts = unpacked(uri.removeprefix("file://")).split("/")
    places = [posixpath.join(folder, *parts[n:]) for n in range(len(parts)) if parts[n]] if folder else [uri]
    for place in places:
        try:
            image = Image.open(io.BytesIO(read_file(place)))
            image.draft("RGB", (2 * _LONGEST_SIDE, 2 * _LONGEST_SIDE))
            return ImageOps.exif_transpose(image).convert("RGB")
        except Exception:  # noqa: BLE001, S112  a picture is an illustration: whatever its file holds, the page goes on
            continue
    return None


def _jpeg(image: Image.Image) -> str:
    image.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    return jpeg_url(marked_jpeg(image, _JPEG_QUALITY))


def _unsure(measured: Measurement, threshold: float) -> list[tuple[str, str, str]]:
    listed = unsure_first(measured, threshold)[:_SHOWN_NEXT]
    return [(uri, number(unsure), number(lowest, 3)) for uri, unsure, lowest in listed]


def _suspicious(measured: Measurement, mistakes: Mistakes) -> list[tuple[str, str, str]]:
    """Labelled images on which model and labels disagree most: the labels may be wrong."""
    sure = (1 + mistakes.threshold) / 2
    total = collections.Counter(one.image for one in mistakes.mistakes)
    confident = collections.Counter(one.image for one in mistakes.mistakes if one.kind != "miss" and one.weight >= sure)
    ordered = sorted(total, key=lambda image: (-confident[image], -total[image], image))[:_SHOWN_NEXT]
    return [(_uri(measured, image), number(confident[image]), number(total[image])) for image in ordered]


def _uri(measured: Measurement, image: int) -> str:
    """The URI of an image as its row has it, else its name in the labels."""
    row = measured.pairing.rows.get(image)
    return row.uri if row else measured.pairing.labels.file_names[image]
