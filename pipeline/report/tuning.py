"""`tuned.html`: what each candidate of the tuner reached, and which of them no other beats in both rate and latency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.report.formats import MISSING, number
from pipeline.report.page import environment, page_style


class Measured(NamedTuple):
    """A candidate of the tuner, as the page shows it.

    Attributes:
      name: Its settings, in words.
      speed: Its images per second, divided by those of the start; 0 if it was refused.
      rate: Images per second.
      alone_ms: 99th percentile of the latency of images that come one at a time; 0 if not measured.
      half_load_ms: The same while images arrive at half the rate.
      memory_mb: Resident memory.
      agreement: Share of objects that it and the start both find.
      refused: Why it cannot be used; empty if it can.
    """

    name: str
    speed: float
    rate: float
    alone_ms: float
    half_load_ms: float
    memory_mb: float
    agreement: float
    refused: str


def render_tuning(measured: Sequence[Measured], verdict: str, facts: Sequence[tuple[str, str]], config: str) -> str:
    """Renders the page.

    Args:
      measured: All candidates, the start first.
      verdict: What was decided, in a sentence.
      facts: (Name, value) of what else a reader has to know, such as the machine.
      config: The config that was written.

    Returns:
      A complete HTML document, to be written as UTF-8.
    """
    drawn = [one for one in measured if one.half_load_ms]
    most_speed, most_ms = (
        max((getattr(one, key) for one in drawn), default=0.0) * 1.1 or 1.0 for key in ("speed", "half_load_ms")
    )
    front = {one.name for one in drawn if not any(_beats(other, one) for other in drawn)}
    numbers = {one.name: place for place, one in enumerate(measured, 1)}
    return (
        environment()
        .get_template("tuning.html")
        .render(
            **page_style("tuning.css"),
            verdict=verdict,
            facts=facts,
            config=config,
            points=[
                (numbers[one.name], 100 * one.speed / most_speed, 100 - 100 * one.half_load_ms / most_ms, one.name in front)
                for one in drawn
            ],
            speeds=[(100 * share, f"{share * most_speed:.2f}") for share in (0.25, 0.5, 0.75)],
            times=[(100 - 100 * share, f"{share * most_ms:.0f} ms") for share in (0.25, 0.5, 0.75, 1.0)],
            rows=[(numbers[one.name], one.name, one.refused, one.name in front, _figures(one)) for one in measured],
        )
    )


def _beats(other: Measured, one: Measured) -> bool:
    """Whether it is better in one respect and no worse in the other."""
    no_worse = other.speed >= one.speed and other.half_load_ms <= one.half_load_ms
    return no_worse and (other.speed, other.half_load_ms) != (one.speed, one.half_load_ms)


def _figures(one: Measured) -> list[str]:
    times = [number(ms) if ms else MISSING for ms in (one.alone_ms, one.half_load_ms)]
    return [f"{one.speed:.2f}", number(one.rate, 1), *times, number(one.memory_mb), f"{one.agreement:.3f}"]
