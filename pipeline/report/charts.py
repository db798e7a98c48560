"""Positions of the lines and labels of the report's curve, which `charts.html` draws.

Positions are percentages of the plot, from its left and from its top. The SVG has no `viewBox`, so lengths in percent follow the
page and font sizes do not; only the curve has a stretched inner `viewBox`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipeline.report.formats import duration, number

_MAX_STEPS = 120  # a phone can still show so many steps of a curve


class Label(NamedTuple):
    """A text on an axis.

    Attributes:
      at: Percent.
      text: The text.
      anchor: SVG's `text-anchor`: which part of the text is at that place.
    """

    at: float
    text: str
    anchor: str = "middle"


@dataclasses.dataclass(frozen=True)
class Curve:
    """Steps over time.

    Attributes:
      line: Points of an SVG polyline in a `viewBox` of 100 x 100.
      mean: The mean of the steps; its dotted line lies between the lowest and the highest of them.
      heights: Ticks of the vertical axis.
      times: Ticks of the horizontal axis.
      summary: The curve in words, for a screen reader.
    """

    line: str
    mean: Label
    heights: list[Label]
    times: list[Label]
    summary: str


def throughput_curve(points: Sequence[Sequence[float]], interval_s: float | None, unit: str) -> Curve | None:
    """Images per second over time.

    Args:
      points: `[second since start, images finished in the interval that begins there]`; a missing interval had no images.
      interval_s: Length of an interval in seconds; default: the smallest distance between two points.
      unit: `images/s` or `messages/s`.

    Returns:
      None if there are too few intervals for a curve: the first and the last are only partly filled.
    """
    return _curve(*_steps(points, interval_s, lambda amounts, seconds: sum(amounts) / seconds), unit, digits=1)


def latency_curve(points: Sequence[Sequence[float]], interval_s: float) -> Curve | None:
    """Seconds over time; of intervals that share a step the largest.

    Args:
      points: `[second since start, milliseconds]`; a missing interval had no results, and is drawn as zero.
      interval_s: Length of an interval in seconds.

    Returns:
      None if there are too few intervals for a curve.
    """
    return _curve(*_steps(points, interval_s, lambda amounts, _: max(amounts, default=0.0) / 1e3), "s", digits=3)


def _curve(values: Sequence[float], step_s: float, unit: str, digits: int) -> Curve | None:
    if len(values) < 3:
        return None
    end_s, mean, top = len(values) * step_s, sum(values) / len(values), max(values) or 1.0
    line = " ".join(
        f"{100 * (i + side) / len(values):.3f},{100 - 100 * value / top:.3f}" for i, value in enumerate(values) for side in (0, 1)
    )
    summary = f"{unit} over time: from {number(min(values), digits)} to {number(max(values), digits)} in {duration(end_s)}"
    return Curve(
        line,
        Label(100 - 100 * mean / top, number(mean, digits)),
        [Label(0.0, f"{number(top, digits)} {unit}", "start"), Label(50.0, number(top / 2, digits), "start")],
        [Label(0.0, "0", "start"), Label(50.0, duration(end_s / 2)), Label(100.0, duration(end_s), "end")],
        summary,
    )


def _steps(
    points: Sequence[Sequence[float]], interval_s: float | None, combined: Callable[[list[float], float], float]
) -> tuple[list[float], float]:
    """Values in equal steps without gaps, and the length of a step in seconds.

    Args:
      points: `[second since start, amount]`.
      interval_s: Length of an interval in seconds; None: the smallest distance between two points.
      combined: Makes a step's value from the amounts in it and its length in seconds.
    """
    ordered = sorted((float(second), float(images)) for second, images in points)
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(ordered) if later[0] > earlier[0]]
    interval = interval_s or min(gaps, default=1.0)
    first = ordered[0][0] if ordered[0][0] < 0 else 0.0
    intervals = round((ordered[-1][0] - first) / interval) + 1
    merged = math.ceil(intervals / _MAX_STEPS)
    steps: list[list[float]] = [[] for _ in range(math.ceil(intervals / merged))]
    for second, amount in ordered:
        steps[round((second - first) / interval) // merged].append(amount)
    widths = [merged] * (len(steps) - 1) + [intervals - merged * (len(steps) - 1)]
    return [combined(amounts, width * interval) for amounts, width in zip(steps, widths, strict=True)], merged * interval
