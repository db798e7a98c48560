"""Draws detections on the thumbnail of an image.

Pillow's own font draws the labels, so a report looks alike on every machine. That font has ASCII glyphs only: Latin names lose
their accents, and a name in another script becomes `#` and its class id. The report has the exact name next to the picture.
"""

from __future__ import annotations

import colorsys
import io
import math
import unicodedata
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from pipeline.records import DetectedImage
from pipeline.storage.results import MADE_BY

_JPEG_QUALITY = 85
_SMALLEST_DRAWN_SIDE = 480  # pixels; on a 32-pixel icon a label would hide the icon
_LONGEST_LABEL = 28  # characters
_GOLDEN_ANGLE = 0.61803398875  # of a turn; puts neighbouring class ids far apart on the colour wheel
# Latin letters that Unicode does not decompose into a base letter and an accent
_PLAIN_LATIN = str.maketrans(
    dict(zip("øØłŁđĐı", "oOlLdDi", strict=True)) | {"ß": "ss", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE"}
)

Colour = tuple[int, int, int]
Rectangle = tuple[int, int, int, int]  # xyxy, both corners inside, as Pillow draws it


class _Mark(NamedTuple):
    box: Rectangle
    label: str
    colour: Colour
    label_at: Rectangle = (0, 0, 0, 0)


def can_be_drawn(image: DetectedImage) -> bool:
    """Whether the thumbnail is a picture; the bytes of one that was read from storage may be anything."""
    return _decoded(image) is not None


def annotate(image: DetectedImage) -> bytes:
    """Draws an image's detections on its thumbnail: a box and a label with class name and confidence, one colour for each class.

    Boxes are scaled from the original's pixels to the thumbnail's and clipped to the image.

    Args:
      image: A result with a thumbnail.

    Returns:
      A JPEG of the thumbnail's size, enlarged if that is too small for labels.

    Raises:
      ValueError: The image has no thumbnail, or the thumbnail is no picture.
    """
    canvas = _canvas(image)
    pen = ImageDraw.Draw(canvas)
    line = max(2, round(max(canvas.size) / 320))
    font = ImageFont.load_default(size=max(13, round(max(canvas.size) / 36)))
    marks: list[_Mark] = []
    for mark in _marks(image, canvas.size):  # most confident first: these get the best places for their labels
        left, top, right, bottom = font.getbbox(mark.label)
        label_wh = (math.ceil(right - left) + 2 * line, math.ceil(bottom - top) + 2 * line)
        marks.append(mark._replace(label_at=_place_label(mark.box, label_wh, canvas.size, [m.label_at for m in marks])))
    for mark in reversed(marks):  # the most confident lies on top
        pen.rectangle(mark.box, outline=mark.colour, width=line)
    for mark in reversed(marks):
        left, top = font.getbbox(mark.label)[:2]
        pen.rectangle(mark.label_at, fill=mark.colour)
        pen.text(
            (mark.label_at[0] + line - left, mark.label_at[1] + line - top), mark.label, font=font, fill=text_colour(mark.colour)
        )
    jpeg = io.BytesIO()
    canvas.save(jpeg, "JPEG", quality=_JPEG_QUALITY, comment=MADE_BY)
    return jpeg.getvalue()


def class_colour(class_id: int) -> Colour:
    """The RGB colour of a class, 0..255: the same in every picture of every run."""
    hue = (0.56 + class_id * _GOLDEN_ANGLE) % 1.0
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, 0.95 if class_id % 2 == 0 else 0.72)
    return round(red * 255), round(green * 255), round(blue * 255)


def text_colour(background: Colour) -> Colour:
    """Black or white, whichever has the higher WCAG contrast on `background`."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in background)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (0, 0, 0) if (luminance + 0.05) ** 2 > 1.05 * 0.05 else (255, 255, 255)


def label_text(class_name: str, class_id: int) -> str:
    """The class name in printable ASCII, shortened if it is too long; `#<class id>` if that is not readable.

    >>> label_text("café au lait", 3), label_text("Straße", 3), label_text("猫", 3)
    ('cafe au lait', 'Strasse', '#3')
    """
    plain = unicodedata.normalize("NFKD", class_name.translate(_PLAIN_LATIN))
    plain = "".join(character for character in plain if not unicodedata.combining(character))
    if not plain.strip() or not plain.isascii() or not plain.isprintable():
        return f"#{class_id}"
    return plain if len(plain) <= _LONGEST_LABEL else plain[: _LONGEST_LABEL - 3] + "..."


def _decoded(image: DetectedImage) -> np.ndarray | None:
    pixels = np.frombuffer(image.thumbnail, np.uint8)
    return cv2.imdecode(pixels, cv2.IMREAD_COLOR) if pixels.size else None


def _canvas(image: DetectedImage) -> Image.Image:
    bgr = _decoded(image)
    if bgr is None:
        raise ValueError(f"{image.ref.uri!r} has no thumbnail that could be drawn on ({len(image.thumbnail)} bytes)")
    factor = math.ceil(_SMALLEST_DRAWN_SIDE / max(bgr.shape[:2]))
    if factor > 1:
        bgr = cv2.resize(bgr, None, fx=factor, fy=factor, interpolation=cv2.INTER_NEAREST)
    return Image.fromarray(cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB))


def _marks(image: DetectedImage, size_wh: tuple[int, int]) -> list[_Mark]:
    """The detections in pixels of the drawn picture, without boxes that are not finite."""
    width, height = size_wh
    scale_xyxy = np.array([width / image.width, height / image.height] * 2)
    found = image.detections
    marks = []
    for box, class_id, name, confidence in zip(
        found.boxes_xyxy, found.class_ids.tolist(), found.class_names, found.confidences, strict=True
    ):
        scaled = box.astype(np.float64) * scale_xyxy
        if not np.isfinite(scaled).all():
            continue
        x0, y0, x1, y1 = (int(edge) for edge in np.clip(np.rint(scaled), 0, [width, height, width, height]))
        x0, y0 = min(x0, width - 1), min(y0, height - 1)
        label = f"{label_text(name, class_id)} {float(confidence):.2f}"
        marks.append(_Mark((x0, y0, max(x0, x1 - 1), max(y0, y1 - 1)), label, class_colour(class_id)))
    return marks


def _place_label(box: Rectangle, label_wh: tuple[int, int], size_wh: tuple[int, int], taken: list[Rectangle]) -> Rectangle:
    """The first place at the box that is inside the picture and covers no other label; else the first inside the picture."""
    (label_w, label_h), (width, height) = label_wh, size_wh
    x0, y0, x1, y1 = box
    corners = [
        (x0, y0 - label_h),
        (x0, y0),
        (x0, y1 + 1),
        (x0, y1 - label_h + 1),
        (x1 - label_w + 1, y0),
        (x1 - label_w + 1, y1 - label_h + 1),
    ]
    inside = [(max(0, min(x, width - label_w)), y) for x, y in corners if 0 <= y <= height - label_h] or [(0, 0)]
    places = [(x, y, x + label_w - 1, y + label_h - 1) for x, y in inside]
    return next((place for place in places if not any(_overlap(place, other) for other in taken)), places[0])


def _overlap(a: Rectangle, b: Rectangle) -> bool:
    return a[0] <= b[2] and b[0] <= a[2] and a[1] <= b[3] and b[1] <= a[3]
