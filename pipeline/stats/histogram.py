"""Histograms with a bounded number of buckets: latencies by their logarithm, results by their time."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np

_LATENCY_STEP = 1.1  # a bucket of latencies is 10 % wide
_SHORTEST_MS, _LONGEST_MS = 1e-3, 1e11  # 1 us to 3 years: 339 buckets, even if an image's clock was wrong
_MOST_INTERVALS = 1024  # the report draws at most 120 of them


def latency_bucket(milliseconds: float) -> int:
    """The bucket of a latency: bucket n holds latencies above 1.1**(n-1) and up to 1.1**n milliseconds.

    >>> latency_bucket(1.0), latency_bucket(1.05), latency_bucket(100.0), latency_bucket(-5.0), latency_bucket(float("inf"))
    (0, 1, 49, -72, 266)
    """
    return math.ceil(math.log(min(max(_SHORTEST_MS, milliseconds), _LONGEST_MS), _LATENCY_STEP))


def latency_buckets(seconds: Sequence[float]) -> list[int]:
    """The buckets of latencies in seconds; see `latency_bucket`."""
    milliseconds = np.clip(np.array(seconds, np.float64) * 1e3, _SHORTEST_MS, _LONGEST_MS)
    buckets: list[int] = np.ceil(np.log(milliseconds) / math.log(_LATENCY_STEP)).astype(int).tolist()
    return buckets


def bucket_end_ms(number: int) -> float:
    """The milliseconds up to which a bucket holds latencies."""
    return float(_LATENCY_STEP**number)


def percentiles_ms(latencies: Mapping[int, int]) -> dict[str, float]:
    """50th, 90th and 99th percentile and maximum in milliseconds, to within a bucket (10 %).

    Args:
      latencies: Images by bucket.
    """
    total, seen, result = sum(latencies.values()), 0, {}
    wanted = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)]
    for bucket in sorted(latencies):
        seen += latencies[bucket]
        while wanted and seen >= wanted[0][1] * total:
            result[wanted.pop(0)[0]] = round(bucket_end_ms(bucket), 1)
    return result


LatencyBucket = Annotated[int, msgspec.Meta(ge=latency_bucket(0.0), le=latency_bucket(math.inf))]
Latencies = Counter[LatencyBucket]  # images by `latency_bucket`


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
        """Counts one image, or adds another amount.

        Args:
          time_s: Seconds since the epoch.
          amount: 0 or more.
        """
        self._put(self.counts, int(time_s) // self.seconds, amount)
        self._bound()

    def merge(self, other: Intervals) -> None:
        """Adds the images of other intervals."""
        self._lengthen(max(self.seconds, other.seconds))
        for number, images in other.counts.items():
            self._put(self.counts, number * other.seconds // self.seconds, images)
        self._bound()

    def since_first(self) -> list[tuple[int, int]]:
        """`(second at which an interval begins, images in it)`, in order; seconds are counted from the first one."""
        first = min(self.counts, default=0)
        return [((number - first) * self.seconds, self.counts[number]) for number in sorted(self.counts)]

    def _put(self, counts: Counter[int], number: int, amount: int) -> None:
        counts[number] = max(counts[number], amount) if self.largest else counts[number] + amount

    def _bound(self) -> None:
        while len(self.counts) > _MOST_INTERVALS:
            self._lengthen(2 * self.seconds)

    def _lengthen(self, seconds: int) -> None:
        if seconds == self.seconds:
            return
        merged: Counter[int] = Counter()
        for number, images in self.counts.items():
            self._put(merged, number * self.seconds // seconds, images)
        self.seconds, self.counts = seconds, merged
