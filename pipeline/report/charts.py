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
_HOUR, _DAY = 3600, 86_400
_TIME_STEPS_SECONDS = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(_HOUR, 2 * _HOUR, 4 * _HOUR, 6 * _HOUR, 12 * _HOUR, _DAY),
)


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
    end_s, mean = len(values) * step_s, sum(values) / len(values)
    top, ticks = _scale(max(values))
    line = " ".join(
        f"{100 * (i + side) / len(values):.3f},{100 - 100 * value / top:.3f}" for i, value in enumerate(values) for side in (0, 1)
    )
    summary = f"{unit} over time: from {number(min(values), digits)} to {number(max(values), digits)} in {duration(end_s)}"
    mean_label = Label(_height(mean, top), number(mean, digits))
    return Curve(line, mean_label, _height_labels(top, ticks, unit), _time_labels(end_s), summary)


def _height(value: float, top: float) -> float:
    return 100 - 100 * value / top


def _height_labels(top: float, ticks: Sequence[float], unit: str) -> list[Label]:
    digits = next((places for places in range(3) if all(abs(tick - round(tick, places)) < 1e-9 for tick in ticks)), 3)
    texts = [number(tick, digits) for tick in ticks[:-1]] + [f"{number(ticks[-1], digits)} {unit}"]
    return [Label(_height(tick, top), text, "start") for tick, text in zip(ticks, texts, strict=True)]


def _time_labels(end_s: float) -> list[Label]:
    step = next((seconds for seconds in _TIME_STEPS_SECONDS if seconds * 5 >= end_s), _TIME_STEPS_SECONDS[-1])
    step *= math.ceil(end_s / step / 5)
    labels = []
    for tick in (step * i for i in range(6)):
        at = 100 * tick / end_s
        if at <= 100:
            labels.append(Label(at, _time(tick), "start" if at < 4 else "end" if at > 92 else "middle"))
    return labels


def _time(seconds: float) -> str:
    """A round time, without the zeros that `duration` adds.

    >>> [_time(seconds) for seconds in (0, 0.5, 10, 90, 120, 5400, 7200, 518400)]
    ['0', '0.5 s', '10 s', '1.5 min', '2 min', '1.5 h', '2 h', '6 d']
    """
    for least, length, unit in ((2 * _DAY, _DAY, "d"), (_HOUR, _HOUR, "h"), (60, 60, "min")):
        if seconds >= least:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s" if seconds else "0"


def _scale(largest: float) -> tuple[float, list[float]]:
    """The end of an axis up to `largest`, and its round ticks above zero."""
    if largest <= 0:
        return 1.0, [1.0]
    power = 10 ** math.floor(math.log10(largest / 4))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power * 4 >= largest)
    ticks = [step * i for i in range(1, max(1, math.floor(largest / step + 1e-9)) + 1)]
    return max(largest, ticks[-1]), ticks


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
