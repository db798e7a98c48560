"""HTML in which every value is text unless it was made here: the report's protection against hostile file names and messages.

`tag` escapes each child and attribute that is not `Markup`, and only this module makes `Markup`. So nothing that comes from a
file name, a class name, a message or a config can become a tag, an attribute or a script; nobody has to remember to escape it.
"""

from __future__ import annotations

import datetime
import html
import math

_VOID_TAGS = frozenset({"img", "link", "meta"})
_JOINERS = "\u200c\u200d"  # zero-width, but part of correctly written Persian, Hindi and emoji
MISSING = "—"


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


def text(value: object) -> Markup:
    r"""Any value as harmless HTML text, with control and bidirectional characters and lone surrogates shown as escapes.

    >>> text("<b>\u202egpj.exe")
    '&lt;b&gt;\\u202egpj.exe'
    """
    if isinstance(value, Markup):
        return value
    shown = "".join(c if c.isprintable() or c in _JOINERS else c.encode("unicode_escape").decode("ascii") for c in str(value))
    return Markup(html.escape(shown))


def tag(element: str, /, *children: object, **attributes: object) -> Markup:
    """An element; a child or attribute that is not `Markup` is shown as text.

    Args:
      element: Its name, a literal.
      children: What stands in it; None is left out.
      attributes: `class_` gives `class`, other underscores become hyphens; None and False leave an attribute out, True gives
        a bare one.

    >>> tag("td", "a & b", class_="name", title='"', hidden=None)
    '<td class="name" title="&quot;">a &amp; b</td>'
    """
    opening = element
    for key, value in attributes.items():
        if value is not None and value is not False:
            attribute = key.rstrip("_").replace("_", "-")
            opening += f" {attribute}" if value is True else f' {attribute}="{text(value)}"'
    if element in _VOID_TAGS:
        return Markup(f"<{opening}>")
    return Markup(f"<{opening}>{join(*children)}</{element}>")


def join(*children: object) -> Markup:
    """Children one after the other; None is left out."""
    return Markup("".join(text(child) for child in children if child is not None))


def stylesheet(css: str) -> Markup:
    """A style element around CSS that the project wrote; never give it a value."""
    return Markup(f"<style>{css}</style>")


def count(value: object, digits: int = 0) -> str:
    """A number with thousands separators, or a dash where there is none.

    >>> count(12345), count(39.46, 1), count(None), count(float("nan"))
    ('12,345', '39.5', '—', '—')
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return MISSING
    return f"{value:,.{digits}f}"


def duration(seconds: object) -> str:
    """Seconds in the unit that reads best, or a dash.

    >>> [duration(s) for s in (0, 0.0042, 0.155, 12.34, 185, 7384, None)]
    ['0 s', '4.2 ms', '155 ms', '12.3 s', '3 min 05 s', '2 h 03 min', '—']
    """
    if count(seconds) == MISSING:
        return MISSING
    value = float(str(seconds))
    if value <= 0:
        return "0 s"
    if value < 1:
        return f"{value * 1000:.{1 if value < 0.01 else 0}f} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def moment(value: object) -> str:
    """An ISO 8601 time to the second, as it came where it is none.

    >>> moment("2026-03-01T12:30:05.123+00:00"), moment("soon"), moment(None)
    ('2026-03-01 12:30:05 UTC', 'soon', '—')
    """
    if value is None:
        return MISSING
    try:
        return datetime.datetime.fromisoformat(str(value)).strftime("%Y-%m-%d %H:%M:%S %Z").strip()
    except ValueError:
        return str(value)
