"""What `charts.html` draws: rows of tables with bars, and lines over time, in percent of the plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.report.formats import duration, number

Parts = list[tuple[str, float]]  # of a bar: css class and share of the longest bar
Bar = tuple[str, Parts, str, str]  # name, parts, figure, note beside it


def bars(rows: Sequence[tuple[str, float, str, str]]) -> list[Bar]:
    """Rows of a table with bars, from (name, length, figure, note)."""
    longest = max((length for _, length, _, _ in rows), default=0.0) or 1.0
    return [(name, [("bar", length / longest)], figure, note) for name, length, figure, note in rows]


def line_over_time(points: Sequence[Sequence[float]], interval_s: float, unit: str) -> dict[str, Any] | None:
    """The arguments of the macro `plot` for a line over time, a step for each interval.

    Args:
      points: `[second since start, amount]` of each interval in order; a missing one had none.
      interval_s: Length of an interval in seconds.
      unit: Of the values, which are amounts a second.

    Returns:
      None if there are too few intervals for a line: the first and the last are only partly filled.
    """
    intervals = int(points[-1][0] // interval_s) + 1 if points else 0
    if intervals < 3:
        return None
    amounts = {second // interval_s: amount for second, amount in points}
    values = [amounts.get(number, 0.0) / interval_s for number in range(intervals)]
    top, mean, end_s = max(values) or 1.0, sum(values) / len(values), len(values) * interval_s
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
