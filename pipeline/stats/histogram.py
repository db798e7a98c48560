"""Histograms with a bounded number of buckets: times by Prometheus's bounds, and amounts by the time at which they occurred."""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import msgspec

_LONGEST_S = 1e8  # three years, even if an image's clock was wrong
BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0, 86_400.0),
    _LONGEST_S,
)
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_MOST_INTERVALS = 1024  # the report draws at most 120 of them


@dataclasses.dataclass
class Times:
    """A histogram of times in seconds.

    Attributes:
      counts: Times by bucket; bucket n holds those above `BOUNDS_S[n - 1]` and up to `BOUNDS_S[n]`.
      total_s: Their sum.
      longest_s: The longest of them.
    """

    counts: Counter[Annotated[int, msgspec.Meta(ge=0, lt=len(BOUNDS_S))]] = dataclasses.field(default_factory=Counter)
    total_s: float = 0.0
    longest_s: float = 0.0

    def add(self, seconds: Sequence[float]) -> None:
        """Counts times; a negative one or one that is not a number counts as 0."""
        within = [min(each, _LONGEST_S) if each > 0 else 0.0 for each in seconds]
        self.counts.update([bisect_left(BOUNDS_S, each) for each in within])  # NumPy takes as long for 32 times as for one
        self.total_s += sum(within)
        self.longest_s = max(self.longest_s, *within) if within else self.longest_s

    def __len__(self) -> int:
        """How many times were counted."""
        return self.counts.total()

    def __add__(self, other: Times) -> Times:
        """Both; shares nothing with them."""
        return Times(self.counts + other.counts, self.total_s + other.total_s, max(self.longest_s, other.longest_s))

    def since(self, earlier: Times) -> Times:
        """What was counted after an earlier copy of this histogram; its longest time is that of both."""
        return Times(self.counts - earlier.counts, self.total_s - earlier.total_s, self.longest_s)

    def percentiles_ms(self) -> dict[str, float]:
        """50th, 90th and 99th percentile, and the maximum, in milliseconds; empty if nothing was counted.

        Percentiles are interpolated within a bucket, as by Prometheus' `histogram_quantile`.
        """
        if not self.counts:
            return {}
        buckets = sorted(self.counts)
        below = list(itertools.accumulate(self.counts[bucket] for bucket in buckets))
        shown = {}
        for name, quantile in _QUANTILES.items():
            wanted = quantile * below[-1]
            bucket, seen = next(each for each in zip(buckets, below, strict=True) if each[1] >= wanted)
            start = BOUNDS_S[bucket - 1] if bucket else 0.0
            width = max(min(BOUNDS_S[bucket], self.longest_s) - start, 0.0)
            shown[name] = start + width * (1 - (seen - wanted) / self.counts[bucket])
        return {name: round(1e3 * seconds, 1) for name, seconds in {**shown, "max": self.longest_s}.items()}


@dataclasses.dataclass
class Intervals:
    """Images, or other amounts, by time, in intervals of equal length, which double when there are too many of them.

    Intervals begin at multiples of their length since the epoch. So the same images give the same intervals, in any order and
    grouping. A stream of 30 days ends with intervals of 4,096 seconds.

    Attributes:
      seconds: Length of an interval, a power of two.
      counts: Images by number of the interval; intervals without images have no entry.
      largest: Whether an interval keeps the largest of its amounts; else their sum.
    """

    seconds: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 1
    counts: Counter[int] = dataclasses.field(default_factory=Counter)
    largest: bool = False

    def add(self, time_s: float, amount: int = 1) -> None:
        """Counts one image, or adds another amount of 0 or more, at this time in seconds since the epoch."""
        self._put(int(time_s) // self.seconds, amount)
        while len(self.counts) > _MOST_INTERVALS:
            self._double()

    def __add__(self, other: Intervals) -> Intervals:
        """The amounts of both; shares nothing with them."""
        both = dataclasses.replace(self, counts=self.counts.copy())
        while both.seconds < other.seconds:
            both._double()
        for number, amount in other.counts.items():
            both.add(number * other.seconds, amount)
        return both

    def since_first(self) -> list[tuple[int, int]]:
        """`(second at which an interval begins, images in it)`, in order; seconds are counted from the first one."""
        first = min(self.counts, default=0)
        return [((number - first) * self.seconds, self.counts[number]) for number in sorted(self.counts)]

    def _put(self, number: int, amount: int) -> None:
        self.counts[number] = max(self.counts[number], amount) if self.largest else self.counts[number] + amount

    def _double(self) -> None:
        halves, self.counts = self.counts, Counter()
        self.seconds *= 2
        for number, amount in halves.items():
            self._put(number // 2, amount)
