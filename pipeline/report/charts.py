"""The report's charts: HTML tables with bars, and SVG whose text keeps its size at any width of the page.

The SVGs have no `viewBox`, so lengths in percent follow the page and font sizes do not; only curves sit in a stretched inner
`viewBox`. All colours come from the style sheet, which knows light and dark.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from pipeline.report.markup import Markup, count, duration, join, tag, text

_MAX_STEPS = 120  # steps of a curve that can still be told apart on a phone
_MAX_COLUMN_LABELS = 12
_TIME_STEPS_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_PLOT_TOP = 24  # pixels left above a plot for its topmost label
_PLOT_HEIGHT = 168  # pixels
_CHART_HEIGHT = _PLOT_TOP + _PLOT_HEIGHT + 24


def bar_table(rows: Sequence[tuple[object, float, object]], headings: tuple[str, str], caption: str) -> Markup:
    """One row for each `(name, length, figure)`: the name, a bar as long as `length` against the longest, the figure in words.

    A negative length means: no bar (for a sum of rows that are not shown).
    """
    longest = max((length for _, length, _ in rows), default=0.0)
    body = []
    for name, length, figure in rows:
        share = 100 * length / longest if longest > 0 else 0.0
        bar = (
            tag("svg", tag("rect", class_="mark", width=f"{share:.2f}%", height="100%"), class_="bar", aria_hidden="true")
            if length >= 0
            else ""
        )
        body.append(tag("tr", tag("th", name, scope="row"), tag("td", bar, class_="bar"), tag("td", figure, class_="figure")))
    head = tag("tr", tag("th", headings[0], scope="col"), tag("td"), tag("th", headings[1], scope="col", class_="figure"))
    return tag("table", tag("caption", caption, class_="quiet"), tag("thead", head), tag("tbody", join(*body)), class_="bars")


def share_bar(parts: Sequence[tuple[str, float]]) -> Markup:
    """One bar cut into parts; each part is `(css class, amount)`. Its meaning stands beside it in words."""
    total = sum(amount for _, amount in parts) or 1.0
    rects, start = [], 0.0
    for css_class, amount in parts:
        width = 100 * amount / total
        rects.append(tag("rect", class_=css_class, x=f"{start:.3f}%", width=f"{width:.3f}%", height="100%"))
        start += width
    return tag("svg", join(*rects), class_="share", aria_hidden="true")


def throughput_chart(points: Sequence[Sequence[float]], mean_per_second: float | None, unit: str) -> Markup:
    """Images per second over time, as steps.

    Args:
      points: `[second since start, images finished in the interval that begins there]`. The interval's length is the smallest
        distance between two points, or one second; intervals that are not listed had no images.
      mean_per_second: Drawn as a dotted line where known.
      unit: `images/s` or `messages/s`.
    """
    rates, step_seconds = _rates(points)
    end = len(rates) * step_seconds
    mean = mean_per_second if mean_per_second is not None and math.isfinite(mean_per_second) else None
    top, ticks = _scale(max([*rates, mean or 0.0]))
    line = " ".join(
        f"{100 * (i + side) / len(rates):.3f},{100 - 100 * rate / top:.3f}" for i, rate in enumerate(rates) for side in (0, 1)
    )
    curve = tag(
        "svg",
        tag("polygon", class_="area", points=f"0,100 {line} 100,100"),
        tag("polyline", class_="line", points=line, vector_effect="non-scaling-stroke"),
        viewBox="0 0 100 100",
        preserveAspectRatio="none",
        width="100%",
        height="100%",
    )
    mean_line = None
    if mean:
        y = f"{100 - 100 * mean / top:.2f}%"
        mean_line = tag("line", class_="mean", x1="0", x2="100%", y1=y, y2=y)
    summary = f"{unit} over time: from {count(min(rates), 1)} to {count(max(rates), 1)} in {duration(end)}"
    return _chart(summary, join(_gridlines(top, ticks), curve, mean_line, _grid_labels(top, ticks, unit)), _time_axis(end))


def column_chart(columns: Mapping[int, int], summary: str, unit: str) -> Markup:
    """A column for each key in ascending order, as high as its value; `summary` says the same to who cannot see it."""
    ordered = sorted(columns.items())
    top, ticks = _scale(max(columns.values()))
    slot = 100 / max(len(ordered), 6)
    every = math.ceil(len(ordered) / _MAX_COLUMN_LABELS)
    rects, labels = [], []
    for index, (key, value) in enumerate(ordered):
        centre, height = slot * (index + 0.5), 100 * value / top
        tooltip = tag("title", f"{count(key)}: {count(value)} {unit}")
        x, width, y = f"{centre - 0.36 * slot:.3f}%", f"{0.72 * slot:.3f}%", f"{100 - height:.3f}%"
        rects.append(tag("rect", tooltip, class_="mark", x=x, width=width, y=y, height=f"{height:.3f}%"))
        if index % every == 0:
            labels.append(tag("text", count(key), x=f"{centre:.3f}%", y=_PLOT_HEIGHT, dy="18", text_anchor="middle"))
        if len(ordered) <= 8:
            rects.append(tag("text", count(value), class_="strong", x=f"{centre:.3f}%", y=y, dy="-5", text_anchor="middle"))
    if len(ordered) > 8:
        rects = [_gridlines(top, ticks), *rects, _grid_labels(top, ticks, unit)]
    return _chart(summary, join(*rects), join(*labels))


def _chart(summary: str, plot: Markup, axis: Markup) -> Markup:
    baseline = tag("line", class_="axis", x1="0", x2="100%", y1="100%", y2="100%")
    inner = tag("svg", plot, baseline, y=_PLOT_TOP, width="100%", height=_PLOT_HEIGHT, overflow="visible")
    labels = tag("svg", axis, y=_PLOT_TOP, width="100%", height=_PLOT_HEIGHT, overflow="visible")
    return tag("svg", inner, labels, class_="chart", width="100%", height=_CHART_HEIGHT, role="img", aria_label=text(summary))


def _gridlines(top: float, ticks: Sequence[float]) -> Markup:
    heights = (f"{100 - 100 * tick / top:.2f}%" for tick in ticks)
    return join(*(tag("line", class_="grid", x1="0", x2="100%", y1=y, y2=y) for y in heights))


def _grid_labels(top: float, ticks: Sequence[float], unit: str) -> Markup:
    digits = 0 if all(tick == int(tick) for tick in ticks) else 1
    labels = [count(tick, digits) for tick in ticks[:-1]] + [f"{count(ticks[-1], digits)} {unit}"]
    heights = (f"{100 - 100 * tick / top:.2f}%" for tick in ticks)
    return join(*(tag("text", label, x="0", y=y, dy="-5") for label, y in zip(labels, heights, strict=True)))


def _time_axis(end_seconds: float) -> Markup:
    step = next((seconds for seconds in _TIME_STEPS_SECONDS if seconds * 5 >= end_seconds), _TIME_STEPS_SECONDS[-1])
    step *= math.ceil(end_seconds / step / 5)
    labels = []
    for tick in (step * i for i in range(6)):
        share = 100 * tick / end_seconds
        if share <= 100:
            anchor = "start" if share < 4 else "end" if share > 92 else "middle"
            labels.append(tag("text", _time_label(tick), x=f"{share:.2f}%", y=_PLOT_HEIGHT, dy="18", text_anchor=anchor))
    return join(*labels)


def _time_label(seconds: float) -> str:
    """A round time, without the zeros that `duration` would add.

    >>> [_time_label(seconds) for seconds in (0, 0.5, 10, 90, 120, 5400, 7200)]
    ['0', '0.5 s', '10 s', '1.5 min', '2 min', '1.5 h', '2 h']
    """
    if seconds < 60:
        return f"{seconds:g} s" if seconds else "0"
    return f"{seconds / 60:g} min" if seconds < 3600 else f"{seconds / 3600:g} h"


def _scale(largest: float) -> tuple[float, list[float]]:
    """The end of an axis that holds `largest`, and its round ticks above zero."""
    if largest <= 0:
        return 1.0, [1.0]
    power = 10 ** math.floor(math.log10(largest / 4))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power * 4 >= largest)
    ticks = [step * i for i in range(1, max(1, math.floor(largest / step + 1e-9)) + 1)]
    return max(largest, ticks[-1]), ticks


def _rates(points: Sequence[Sequence[float]]) -> tuple[list[float], float]:
    """Images per second in equal steps that cover all points without a gap, and a step's length in seconds."""
    ordered = sorted((float(second), float(images)) for second, images in points)
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(ordered) if later[0] > earlier[0]]
    interval = min(gaps, default=1.0)
    first = ordered[0][0] if ordered[0][0] < 0 else 0.0
    intervals = round((ordered[-1][0] - first) / interval) + 1
    merged = math.ceil(intervals / _MAX_STEPS)
    images = [0.0] * math.ceil(intervals / merged)
    for second, amount in ordered:
        images[round((second - first) / interval) // merged] += amount
    widths = [merged] * (len(images) - 1) + [intervals - merged * (len(images) - 1)]
    return [amount / (width * interval) for amount, width in zip(images, widths, strict=True)], merged * interval
