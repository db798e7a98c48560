"""Draws detections on an image or on its thumbnail.

Pillow's own font draws the labels, so a report looks alike on every machine. That font has ASCII glyphs only: Latin names lose
their accents, and a name in another script becomes `#` and its class id. The report has the exact name next to the picture.
"""

from __future__ import annotations

import colorsys
import functools
import io
import math
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from pipeline.records import DetectedImage
from pipeline.results.layout import MADE_BY

_JPEG_QUALITY = 85
_SMALLEST_DRAWN_SIDE = 480  # pixels; on a 32-pixel icon a label would hide the icon
_LONGEST_LABEL = 28  # characters
_MOST_LABELS = 0.15  # of the picture: labels that cover more would hide it
_FURTHER = (1, -2, 2, -3, 3, -4)  # heights of a label from its box's upper edge, where another label has the better places
_LONGEST_SIDE = 65_500  # pixels of a JPEG
_GOLDEN_ANGLE = 0.61803398875  # of a turn; puts neighbouring class ids far apart on the colour wheel
Colour = tuple[int, int, int]
Rectangle = tuple[int, int, int, int]  # xyxy, both corners inside, as Pillow draws it
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class _Mark(NamedTuple):
    """A detection as it is drawn."""

    number: int
    box: Rectangle
    label: str
    colour: Colour


def annotate(image: DetectedImage, pixels_rgb: np.ndarray | None = None) -> bytes:
    """Draws an image's detections: a box and a label with class name and confidence, one colour for each class.

    In a crowd, whose labels would hide the picture, a label is the detection's number, from 1 on, in the order of the detections.
    Given pixels then get a list of the numbers beside them; the report has its own. A label that would cover one of a more
    confident detection moves to another place at its box. Boxes are scaled from the original's pixels to the drawn ones and
    clipped to the image.

    Args:
      image: A result.
      pixels_rgb: `(h, w, 3) uint8`, upright; default: those of the thumbnail.

    Returns:
      A JPEG of the size of the pixels, enlarged if that is too small for labels, and wider by a list; empty if there is no
      picture to draw on.
    """
    rgb = _thumbnail(image) if pixels_rgb is None else pixels_rgb
    if rgb is None:
        return b""
    canvas = _canvas(rgb)
    pen = ImageDraw.Draw(canvas)
    line = max(2, round(max(canvas.size) / 320))
    marks = list(_marks(image, canvas.size))
    font, is_crowd = _readable(marks, canvas.size, line)
    for mark in marks[::-1]:  # the most confident lies on top
        pen.rectangle(mark.box, outline=mark.colour, width=line)
    labels = [str(mark.number) if is_crowd else mark.label for mark in marks]
    bounds = [font.getbbox(label) for label in labels]
    sizes = [(math.ceil(right - left) + 2 * line, math.ceil(bottom - top) + 2 * line) for left, top, right, bottom in bounds]
    places = _placed([mark.box for mark in marks], sizes, canvas.size)
    for mark, label, (left, top, _, _), place in [*zip(marks, labels, bounds, places, strict=True)][::-1]:
        pen.rectangle(place, fill=mark.colour)
        pen.text((place[0] + line - left, place[1] + line - top), label, font=font, fill=text_colour(mark.colour))
    return marked_jpeg(_with_list(canvas, marks, font) if is_crowd and pixels_rgb is not None else canvas, _JPEG_QUALITY)


@functools.lru_cache(maxsize=32)
def picture(image: DetectedImage) -> bytes:
    """What `annotate` draws on an image's thumbnail. A job's samples, its report and each renewal of it show the same images."""
    return annotate(image)


def marked_jpeg(picture: Image.Image, quality: int) -> bytes:
    """A JPEG with the mark of this program, by which a later run knows that it may replace the file."""
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", quality=quality, comment=MADE_BY)
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

    >>> label_text("café au lait", 3), label_text("猫", 3)
    ('cafe au lait', '#3')
    """
    plain = unicodedata.normalize("NFKD", class_name)
    plain = "".join(character for character in plain if not unicodedata.combining(character))
    if not plain.strip() or not plain.isascii() or not plain.isprintable():
        return f"#{class_id}"
    return plain if len(plain) <= _LONGEST_LABEL else plain[: _LONGEST_LABEL - 3] + "..."


def _thumbnail(image: DetectedImage) -> np.ndarray | None:
    """Its pixels; None if it is no picture: the bytes of one that was read from storage may be anything."""
    content = np.frombuffer(image.thumbnail, np.uint8)
    bgr = cv2.imdecode(content, cv2.IMREAD_COLOR) if content.size else None
    return None if bgr is None else cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB)


def _canvas(rgb: np.ndarray) -> Image.Image:
    factor = math.ceil(_SMALLEST_DRAWN_SIDE / max(rgb.shape[:2]))
    if factor > 1:
        rgb = cv2.resize(rgb, None, fx=factor, fy=factor, interpolation=cv2.INTER_NEAREST)
    return Image.fromarray(rgb)


def _marks(image: DetectedImage, size_wh: tuple[int, int]) -> Iterator[_Mark]:
    """Each detection, in pixels of the drawn picture, without boxes that are not finite."""
    width, height = size_wh
    scale_xyxy = np.array([width / image.width, height / image.height] * 2)
    found = image.detections
    columns = (found.boxes_xyxy, found.class_ids.tolist(), found.class_names, found.confidences)
    for place, (box, class_id, name, confidence) in enumerate(zip(*columns, strict=True), 1):
        scaled = box.astype(np.float64) * scale_xyxy
        if np.isfinite(scaled).all():
            x0, y0, x1, y1 = (int(edge) for edge in np.clip(np.rint(scaled), 0, [width, height, width, height]))
            x0, y0 = min(x0, width - 1), min(y0, height - 1)
            label = f"{label_text(name, class_id)} {float(confidence):.2f}"
            yield _Mark(place, (x0, y0, max(x0, x1 - 1), max(y0, y1 - 1)), label, class_colour(class_id))


def _readable(marks: Sequence[_Mark], size_wh: tuple[int, int], line: int) -> tuple[Font, bool]:
    """The font of the labels, smaller where there are many, and whether even so they would hide the picture."""
    longest = max(size_wh)
    small = ImageFont.load_default(max(11, round(longest / 60)))
    for font in (ImageFont.load_default(max(13, round(longest / 36))), small):
        boxes = [font.getbbox(mark.label) for mark in marks]
        covered = sum((right - left + 2 * line) * (bottom - top + 2 * line) for left, top, right, bottom in boxes)
        if covered <= _MOST_LABELS * size_wh[0] * size_wh[1] or len(marks) == 1:
            return font, False
    return small, True


def _with_list(canvas: Image.Image, marks: Sequence[_Mark], font: Font) -> Image.Image:
    """The picture with its numbers, classes and confidences at its right side, in as many columns as it takes."""
    lines = [f"{mark.number}  {mark.label}" for mark in marks]
    _, top, _, bottom = font.getbbox("Ag")
    step, pad = math.ceil((bottom - top) * 1.5), math.ceil(bottom - top)
    rows = max(1, (canvas.height - pad) // step)
    column = pad + math.ceil(max(font.getlength(line) for line in lines))
    width = canvas.width + column * math.ceil(len(lines) / rows) + pad
    if width > _LONGEST_SIDE:
        return canvas
    wider = Image.new("RGB", (width, canvas.height), (255, 255, 255))
    wider.paste(canvas)
    pen = ImageDraw.Draw(wider)
    for place, line in enumerate(lines):
        pen.text((canvas.width + pad + place // rows * column, pad // 2 + place % rows * step), line, font=font, fill=(0, 0, 0))
    return wider


def _placed(boxes: Sequence[Rectangle], sizes: Sequence[tuple[int, int]], size_wh: tuple[int, int]) -> list[Rectangle]:
    """Where each label is: the best place at its box that covers no label before it, or the best of all if each does."""
    taken: list[Rectangle] = []
    for box, (width, height) in zip(boxes, sizes, strict=True):
        places = [(x, y, x + width - 1, y + height - 1) for x, y in _label_places(box, (width, height), size_wh)]
        taken.append(next((each for each in places if not any(_overlap(each, other) for other in taken)), places[0]))
    return taken


def _label_places(box: Rectangle, label_wh: tuple[int, int], size_wh: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The left and upper edges that a label may have within the picture, the best first.

    They are above its box, or inside where the picture has no room above; then at the other corners, and further up and down.
    """
    (x0, y0, x1, y1), (width, height) = box, label_wh
    above = y0 - height if y0 >= height else y0
    tops = [above, y0, y1 + 1, y1 + 1 - height]
    for top in (*tops, *(y0 + step * height for step in _FURTHER)):
        for left in (x0, x1 + 1 - width):
            yield max(0, min(left, size_wh[0] - width)), max(0, min(top, size_wh[1] - height))


def _overlap(one: Rectangle, other: Rectangle) -> bool:
    return one[0] <= other[2] and other[0] <= one[2] and one[1] <= other[3] and other[1] <= one[3]
