"""`reconcile.html`: which images of a listing have a result, by day, on one page without references to other files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.report.page import environment, page_style

_MOST_BARS = 100  # days; more are shown as months
_MEANING = {
    "done": "a row of the version that is there now",
    "dead": "a dead letter, and no row",
    "stale": "rows of an older version only",
    "missing": "neither row nor dead letter",
    "doubled": "several rows of one version by one model version; python -m pipeline.compact leaves one",
    "orphaned": "a row, but no image any more",
}


def render_reconciliation(
    output: str,
    inputs: Sequence[str],
    *,
    counts: Mapping[str, int],
    days: Mapping[tuple[str, str], int],
    examples: Mapping[str, Sequence[tuple[str, str]]],
    when: str,
) -> str:
    """Renders the page.

    Args:
      output: The results folder.
      inputs: The listed patterns.
      counts: Images by status; listed images have one of the first four of `_MEANING`.
      days: Images by (day, status), the day as `2026-11-20` or empty.
      examples: A few images of each status: (URI, reason or version).
      when: The time of the reconciliation, in ISO 8601.

    Returns:
      A complete HTML document, to be written as UTF-8.
    """
    statuses = list(_MEANING)[:4]
    bars, unit = _bars(days, statuses)
    return (
        environment()
        .get_template("reconciliation.html")
        .render(
            **page_style(),
            output=output,
            inputs=inputs,
            when=when,
            listed=sum(counts.get(status, 0) for status in statuses),
            parts=[(status, counts.get(status, 0), _MEANING[status]) for status in statuses],
            beside=[(status, counts.get(status, 0), _MEANING[status]) for status in list(_MEANING)[4:]],
            bars=bars,
            unit=unit,
            longest=max((total for _, _, total, _ in bars), default=1),
            examples=[(status, meaning, examples[status]) for status, meaning in _MEANING.items() if examples.get(status)],
        )
    )


def _bars(days: Mapping[tuple[str, str], int], statuses: Sequence[str]) -> tuple[list[tuple[str, Any, int, int]], str]:
    """A bar for each day, or each month or year if there are many: its name, its parts, its length, and how many are not done."""
    known = {day for day, _ in days}
    characters, unit = (10, "day") if len(known) <= _MOST_BARS else (7, "month")
    if len({day[:characters] for day in known}) > _MOST_BARS:
        characters, unit = 4, "year"
    sums: dict[str, dict[str, int]] = {}
    for (day, status), count in days.items():
        of_day = sums.setdefault(day[:characters], dict.fromkeys(statuses, 0))
        of_day[status] += count
    bars = [
        (day or "unknown", list(parts.items()), sum(parts.values()), sum(parts.values()) - parts["done"])
        for day, parts in sorted(sums.items())
    ]
    return bars, unit
