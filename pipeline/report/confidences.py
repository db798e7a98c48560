"""Places the bars of the report's histograms of confidence, which `charts.html` draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.report.formats import MISSING, counted, number

_PlacedBar = tuple[float, float, float, str]  # left edge and heights of two parts in percent, text


def confidence_values(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of confidences.

    Args:
      summary: The content of `summary.json`; the section is left out if it has no `confidences`.
    """
    found, config = summary.get("confidences"), summary.get("config") or {}
    detect = config.get("detect") or {}
    threshold: Any = detect.get("score_threshold")
    shown = number(threshold) != MISSING
    return {
        "confidences": {"all": _histogram(found["all"]), "by_class": _by_class(found["by_class"])} if found else None,
        "threshold": f"{threshold:g}" if shown else "",
        "threshold_at": 100 * threshold if shown else None,
    }


def _by_class(classes: Mapping[str, Sequence[int]]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, _histogram(bins)) for name, bins in classes.items()]


def _histogram(bins: Sequence[int]) -> dict[str, Any]:
    """The bars that are not empty, the height of the tallest, and all in words."""
    return {"bars": list(_bars(bins)), "peak": number(max(bins)), "total": counted(sum(bins), "detection")}


def _bars(bins: Sequence[int]) -> list[_PlacedBar]:
    width, top = 1 / len(bins), max(bins)
    return [
        (100 * n * width, 100 * amount / top, 0.0, f"confidence {n * width:.2f} to {(n + 1) * width:.2f}: {number(amount)}")
        for n, amount in enumerate(bins)
        if amount
    ]
