"""The tables."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata

from tests.benchmarks.contenders import Contender
from tests.benchmarks.rounds import Run

_SHOWN = ("startup_seconds", "peak_rss_mb", "cpu_seconds_per_image")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def runs_table(runs: Sequence[Run], contenders: Mapping[str, Contender], beside: str = "its plain loop") -> str:
    """One line for each contender: medians over its rounds, least and most behind them, beside what it is against."""
    of = f"of {beside}"
    header = ["", "images/s", of, "start-up s", "peak RSS MB", of, "CPU-ms per image", "rounds"]
    rows = []
    for name, contender in contenders.items():
        own = [run for run in runs if run.contender == name]
        median = {key: statistics.median(getattr(run, key) for run in own) for key in _SHOWN}
        is_other = name != contender.against
        rows.append(
            [
                name,
                spread([run.images_per_second for run in own], ".1f"),
                spread(ratios(runs, name, contender.against), ".2f") if is_other else "",
                f"{median['startup_seconds']:.1f}",
                f"{median['peak_rss_mb']:.0f}",
                spread(ratios(runs, name, contender.against, of="peak_rss_mb"), ".2f") if is_other else "",
                f"{1000 * median['cpu_seconds_per_image']:.1f}",
                str(len(own)),
            ]
        )
    return table(header, rows)


def ratios(runs: Sequence[Run], numerator: str, denominator: str, of: str = "images_per_second") -> list[float]:
    """One contender's figure over another's, within each round that has both."""
    above, below = ({run.round: getattr(run, of) for run in runs if run.contender == name} for name in (numerator, denominator))
    return [above[number] / below[number] for number in sorted(above.keys() & below.keys())]


def spread(values: Sequence[float], form: str) -> str:
    """Median, least and most."""
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def machine() -> str:
    """What the figures were taken on."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        lines = [line.partition(":")[2].strip() for line in file if line.startswith(("model name", "flags"))]
    bf16 = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in lines[1].split()] if len(lines) > 1 else []
    versions = [f"{name} {metadata.version(name)}" for name in ("tensorflow", "apache-beam", "tfx-bsl", "opencv-python-headless")]
    cores = len(os.sched_getaffinity(0))
    return ", ".join([f"{cores} cores {lines[0] if lines else platform.machine()}", *bf16, platform.python_version(), *versions])
