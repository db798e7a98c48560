"""What `charts.html` draws: rows of tables with bars, and lines over time, in percent of the plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pipeline.report.texts import duration, number

_MAX_STEPS = 120  # a phone can still show so many steps of a line

Parts = list[tuple[str, float]]  # of a bar: css class and share of the longest bar
Bar = tuple[str, Parts, str, str]  # name, parts, figure, note beside it


def bars(rows: Sequence[tuple[str, float, str, str]]) -> list[Bar]:
    """Rows of a table with bars, from (name, length, figure, note)."""
    longest = max((length for _, length, _, _ in rows), default=0.0) or 1.0
    return [(name, [("bar", length / longest)], figure, note) for name, length, figure, note in rows]


def line_over_time(
    points: Sequence[Sequence[float]], interval_s: float, unit: str, *, slowest: bool = False
) -> dict[str, Any] | None:
    """The arguments of the macro `plot` for a line over time, of at most 120 steps without gaps.

    Args:
      points: `[second since start, amount]` of each interval in order; a missing one had no amount.
      interval_s: Length of an interval in seconds.
      unit: Of the values.
      slowest: Whether amounts are milliseconds, and the largest of a step counts, in seconds; else it is their sum a second.

    Returns:
      None if there are too few intervals for a line: the first and the last are only partly filled.
    """
    intervals = int(points[-1][0] // interval_s) + 1 if points else 0
    if intervals < 3:
        return None
    merged = math.ceil(intervals / _MAX_STEPS)
    steps: list[list[float]] = [[] for _ in range(math.ceil(intervals / merged))]
    for second, amount in points:
        steps[int(second // interval_s) // merged].append(amount)
    widths = [merged] * (len(steps) - 1) + [intervals - merged * (len(steps) - 1)]
    values = [
        max(amounts, default=0.0) / 1e3 if slowest else sum(amounts) / (width * interval_s)
        for amounts, width in zip(steps, widths, strict=True)
    ]
    top, mean, end_s = max(values) or 1.0, sum(values) / len(values), len(values) * merged * interval_s
    edges = [(place + side, each) for place, each in enumerate(values) for side in (0, 1)]
    line = " ".join(f"{100 * edge / len(values):.3f},{100 - 100 * each / top:.3f}" for edge, each in edges)
    digits = 1 if top >= 10 else 3
    return {
        "lines": [("", line)],
        "heights": [(100, f"{number(top, digits)} {unit}"), (50, number(top / 2, digits))],
        "places": [(0, "0"), (50, duration(end_s / 2)), (100, duration(end_s))],
        "summary": f"{unit} over time: from {number(min(values), digits)} to {number(top, digits)} in {duration(end_s)}",
        "area": True,
        "mean": (100 * mean / top, number(mean, digits)),
    }
