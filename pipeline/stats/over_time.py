"""Latencies and backlog of a stream over time, in a bounded number of intervals."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from pipeline.stats.histogram import Intervals


@dataclasses.dataclass
class OverTime:
    """Latencies and backlog by the time at which a result was published, or a message read.

    Attributes:
      results: Detected images.
      in_hand_ms: Milliseconds from the bytes in memory to the result, summed.
      publish_ms: Milliseconds from the event time to the publishing of the result, summed.
      backlog_ms: Age of the oldest message read, milliseconds.
    """

    results: Intervals = dataclasses.field(default_factory=Intervals)
    in_hand_ms: Intervals = dataclasses.field(default_factory=Intervals)
    publish_ms: Intervals = dataclasses.field(default_factory=Intervals)
    backlog_ms: Intervals = dataclasses.field(default_factory=lambda: Intervals(largest=True))

    def add_result(self, now: float, in_hand_ms: float, publish_ms: float) -> None:
        """Counts an image whose result is published now; seconds since the epoch, and milliseconds."""
        for intervals, amount in ((self.results, 1), (self.in_hand_ms, in_hand_ms), (self.publish_ms, publish_ms)):
            intervals.add(now, round(amount))

    def add_backlog(self, now: float, age_ms: float) -> None:
        """Notes the age of a message that is read now."""
        self.backlog_ms.add(now, round(age_ms))

    def merge(self, other: OverTime) -> None:
        """Adds what another part of the stream saw."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).merge(getattr(other, field.name))

    def as_dict(self) -> dict[str, Any]:
        """For summary.json: means of an interval, and for the backlog its largest; seconds since the first, and milliseconds."""
        means = {"in_hand_to_result_ms": self._mean(self.in_hand_ms), "event_to_publish_ms": self._mean(self.publish_ms)}
        return {
            name: {"interval_s": each.seconds, "points": each.since_first()}
            for name, each in {**means, "backlog_age_ms": self.backlog_ms}.items()
            if each.counts
        }

    def _mean(self, sums: Intervals) -> Intervals:
        """Of intervals that are those of `results`, since both were added at the same times."""
        means = {number: round(total / self.results.counts[number]) for number, total in sums.counts.items()}
        return Intervals(sums.seconds, Counter(means))
