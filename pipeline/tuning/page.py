"""`tuned.html`: what each candidate of the tuner reached, and which of them no other beats in both rate and latency."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.report.formats import MISSING, number
from pipeline.report.page import environment, page_style
from pipeline.tuning.search import Result


def render_tuning(results: Sequence[Result], verdict: str, facts: Sequence[tuple[str, str]], config: str) -> str:
    """Renders the page.

    Args:
      results: All candidates, the start first.
      verdict: What was decided, in a sentence.
      facts: (Name, value) of what else a reader has to know, such as the machine.
      config: The config that was written.

    Returns:
      A complete HTML document, to be written as UTF-8.
    """
    drawn = [(place, one) for place, one in enumerate(results, 1) if one.half_load_ms]
    most_speed = 1.1 * max((one.speed for _, one in drawn), default=1.0)
    most_ms = 1.1 * max((one.half_load_ms for _, one in drawn), default=1.0)
    front = {place for place, one in drawn if not any(_beats(other, one) for _, other in drawn)}
    return (
        environment()
        .get_template("tuning.html")
        .render(
            **page_style("tuning.css"),
            verdict=verdict,
            facts=facts,
            config=config,
            points=[
                (place, 100 * one.speed / most_speed, 100 - 100 * one.half_load_ms / most_ms, place in front)
                for place, one in drawn
            ],
            speeds=[(100 * share, f"{share * most_speed:.2f}") for share in (0.25, 0.5, 0.75)],
            times=[(100 - 100 * share, f"{share * most_ms:.0f} ms") for share in (0.25, 0.5, 0.75, 1.0)],
            rows=[(place, one.name, one.refused, place in front, _figures(one)) for place, one in enumerate(results, 1)],
        )
    )


def _beats(other: Result, one: Result) -> bool:
    """Whether it is better in one respect and no worse in the other."""
    no_worse = other.speed >= one.speed and other.half_load_ms <= one.half_load_ms
    return no_worse and (other.speed, other.half_load_ms) != (one.speed, one.half_load_ms)


def _figures(one: Result) -> list[str]:
    times = [number(ms) if ms else MISSING for ms in (one.alone_ms, one.half_load_ms)]
    return [f"{one.speed:.2f}", number(one.rate, 1), *times, number(one.memory_mb), f"{one.agreement:.3f}"]
