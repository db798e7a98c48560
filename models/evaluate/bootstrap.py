"""How sure a figure is: bootstrap intervals over images, and a paired test of two outputs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from models.evaluate.coco_matching import Floats, Matches
from models.progress import shown

RESAMPLES = 1000
_LEVEL = (2.5, 97.5)  # percentiles of a 95 % interval


def mean_figures(matches: Matches, weights: Floats | None = None) -> Floats:
    """AP, AP50, AP75 and AR_100; NaN without objects."""
    precision, recall = matches.curves(weights=weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of no class is NaN
        return np.array([np.nanmean(each) for each in (precision, precision[0], precision[5], recall)])


def resample(outputs: Sequence[Matches], resamples: int = RESAMPLES, seed: int = 0) -> Floats:
    """The figures of `mean_figures` on images drawn with replacement: `(outputs, resamples, 4)`; outputs get the same draws."""
    generator = np.random.default_rng(seed)
    n = outputs[0].n_images
    draws = shown(range(resamples), "bootstrap", "resamples")
    weights = (np.bincount(generator.integers(0, n, n), minlength=n).astype(np.float64) for _ in draws)
    return np.array([[mean_figures(each, weight) for each in outputs] for weight in weights]).transpose(1, 0, 2)


def interval(values: Floats) -> tuple[float, float] | None:
    """The 95 % percentile interval of resampled figures; None without any."""
    known = values[np.isfinite(values)]
    return (float(np.percentile(known, _LEVEL[0])), float(np.percentile(known, _LEVEL[1]))) if len(known) else None


def difference(value: float, ours: Floats, theirs: Floats) -> dict[str, float]:
    """The paired bootstrap test of two outputs; empty without resamples that have objects.

    Args:
      value: The difference of their figures.
      ours: The figures of one output in each resample.
      theirs: Those of the other in the same resamples.

    Returns:
      `difference`, its 95 % interval `low` and `high`, and `p`: twice the share of resamples on the other side of zero, at least
      2 / (resamples + 1).
    """
    differences = (ours - theirs)[np.isfinite(ours - theirs)]
    ends = interval(differences)
    if ends is None:
        return {}
    tail = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    return {"difference": value, "low": ends[0], "high": ends[1], "p": min(1.0, 2 * (tail + 1) / (len(differences) + 1))}
