"""Formats numbers, times and texts of the report page; a missing value is a dash."""

from __future__ import annotations

import math
import re
import urllib.parse

from markupsafe import Markup

from models.base.image_uris import archive_member, video_frame
from pipeline.log_lines import printable
from pipeline.records import path_bytes

MISSING = "—"


def breakable(value: object) -> Markup:
    """A path or another long name, escaped, which a narrow page breaks behind `/`, `_`, `-` and `.` between its words.

    >>> breakable("/a_b.jpg")
    Markup('/a_<wbr>b.<wbr>jpg')
    """
    return Markup("<wbr>").join(re.split(r"(?<=\w[/_.-])(?=\w)", printable(str(value))))


def link(uri: str) -> str:
    """The address at which a browser shows an image, or fetches its archive; empty for all but paths, `https` and `gs`.

    >>> link("/photos/clip.mp4#t=12.480"), link("/photos/a.zip#b.jpg")
    ('file:///photos/clip.mp4#t=12.480', 'file:///photos/a.zip')
    >>> link("/photos/a b.jpg"), link("gs://bucket/a#1.jpg"), link("javascript:alert(1)")
    ('file:///photos/a%20b.jpg', 'https://storage.cloud.google.com/bucket/a%231.jpg', '')
    """
    if uri.startswith("https://"):
        return urllib.parse.quote(uri, safe=":/?#[]@!$&'()*+,;=%", errors="surrogatepass")
    for start, address in (("/", "file:///"), ("gs://", "https://storage.cloud.google.com/")):
        if uri.startswith(start):
            uri = (archive_member(uri) or [uri])[0]
            file = (video_frame(uri) or [uri])[0]  # a browser shows a video from the time behind it
            return address + urllib.parse.quote(path_bytes(file.removeprefix(start).lstrip("/"))) + uri[len(file) :]
    return ""


def number(value: object, digits: int = 0) -> str:
    """A number with thousands separators, or a dash if there is none.

    >>> number(12345), number(39.46, 1), number(None), number(float("nan"))
    ('12,345', '39.5', '—', '—')
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return MISSING
    return f"{value:,.{digits}f}"


def counted(amount: int, singular: str, plural: str = "") -> str:
    """An amount with its noun.

    >>> counted(1, "detection"), counted(1200, "detection"), counted(0, "batch", "batches")
    ('1 detection', '1,200 detections', '0 batches')
    """
    return f"{number(amount)} {singular if amount == 1 else plural or singular + 's'}"


def share(value: float | None) -> str:
    """A share in percent, or a dash.

    >>> share(0.5), share(None)
    ('50.0 %', '—')
    """
    return MISSING if value is None else f"{100 * value:.1f} %"


def duration(amount: object, unit_s: float = 1.0) -> str:
    """A time in a readable unit, or a dash; `unit_s` is the unit of the amount in seconds.

    >>> [duration(s) for s in (0, 0.0042, 0.155, 12.34, 185, 7384, 2_592_000, None)]
    ['0 s', '4.2 ms', '155 ms', '12.3 s', '3 min 05 s', '2 h 03 min', '30 d 0 h', '—']
    """
    if number(amount) == MISSING:
        return MISSING
    value = float(str(amount)) * unit_s
    if value <= 0:
        return "0 s"
    if value < 1:
        return f"{value * 1000:.{1 if value < 0.01 else 0}f} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24:,} d {hours % 24} h"


def yaml_value(value: object) -> str:
    """A value as in the YAML file.

    >>> yaml_value(False), yaml_value([1, 2]), yaml_value(0.5), yaml_value(None), yaml_value([])
    ('false', '1, 2', '0.5', '—', '—')
    """
    if value is None or value in ("", [], {}, ()):
        return MISSING
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
