"""The part of a report that compares a canary with the version in use, and says in words which is better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.report.formats import MISSING, duration, number

_ENOUGH_IMAGES = 1000  # for a verdict
_MORE_FAILURES = 0.01  # a canary may fail on this share of images more than the version in use


def canary_values(canary: Any, detect: Any) -> dict[str, Any] | None:
    """A canary and the version in use, as rows of (name, the canary's figure, the other's, what it means)."""
    if not canary:
        return None
    times = [ms / 1000 if number(ms) != MISSING else None for ms in (canary.get("mean_ms"), canary.get("stable_mean_ms"))]
    return {
        **{key: canary.get(key) for key in ("version", "stable", "why_no_images")},
        "verdict": "" if canary.get("why_no_images") else _verdict(canary, detect if isinstance(detect, Mapping) else {}),
        "rows": [
            ("Images", number(canary.get("images")), "", "that the canary received"),
            (
                "Failed",
                _percent(canary, "failure_rate"),
                _percent(canary, "stable_failure_rate"),
                "of the images of each version",
            ),
            ("Mean time in the model", *map(duration, times), "for an image"),
            ("Same objects", _percent(canary, "agreement"), "", "of all objects of both versions, those that both find"),
            (
                "Change of confidence",
                number(canary.get("score_shift"), 3),
                "",
                "mean, for an object that both find; from -1 to 1",
            ),
            ("Skipped", number(canary.get("skipped")), "", "images of its share that came while it was behind"),
        ],
    }


def _percent(figures: Mapping[str, Any], key: str) -> str:
    """A share in percent, or a dash."""
    return MISSING if number(figures.get(key)) == MISSING else f"{100 * figures[key]:.1f} %"


def _verdict(canary: Mapping[str, Any], detect: Mapping[str, Any]) -> str:
    """What the figures say about the canary, by its number of images, failures and agreement."""
    images, agreement, least = (_figure(*of) for of in ((canary, "images"), (canary, "agreement"), (detect, "min_agreement")))
    rates = [_figure(canary, f"{of}failure_rate") for of in ("", "stable_")]
    if images is None or images < _ENOUGH_IMAGES:
        return f"Too early to tell: it has received {number(images)} of the {_ENOUGH_IMAGES} images that a decision needs."
    if rates[0] is not None and rates[1] is not None and rates[0] > rates[1] + _MORE_FAILURES:
        return "Not as good: it fails on more of its images than the version in use."
    if agreement is None or least is None:
        return "Not compared: no version found an object in the images that both received."
    if agreement < least:
        return f"It differs: both find {100 * agreement:.1f} % of the objects; {100 * least:.1f} % or more is expected."
    return f"It agrees: both find {100 * agreement:.1f} % of the objects, and it fails about as often or less."


def _figure(figures: Mapping[str, Any], key: str) -> float | None:
    value = figures.get(key)
    return None if number(value) == MISSING else float(str(value))
