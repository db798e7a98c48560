"""The bytes that cross the shuffles of a job on Flink."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.flink.cluster import FlinkCluster

_FORWARD = "forward"
_COUNTS = "MergeStats"


class Shuffled(NamedTuple):
    """What a step of a job got from other machines, or might have got.

    Attributes:
      step: Its name, as the job's dashboard shows it.
      how: `hash` or `rebalance`; `broadcast` to all slots.
      received_bytes: With all that Flink and Beam add to an element.
    """

    step: str
    how: str
    received_bytes: int

    @property
    def is_of_images(self) -> bool:
        """Whether it grows with the number of images; a job's counts, and thumbnails for its report, come once a bundle."""
        return self.how in ("hash", "rebalance") and _COUNTS not in self.step


def shuffled(flink: FlinkCluster, job: str) -> Iterator[Shuffled]:
    """What crosses the shuffles of a job, once it is over: what no step hands to the next one where it is itself."""
    found = flink.ask(f"/jobs/{job}")
    inputs = {node["id"]: [each["ship_strategy"].lower() for each in node.get("inputs", ())] for node in found["plan"]["nodes"]}
    for vertex in found["vertices"]:
        ways = {way.split()[0] for way in inputs[vertex["id"]]} - {_FORWARD}
        if ways:
            yield Shuffled(vertex["name"], "/".join(sorted(ways)), vertex["metrics"]["read-bytes"])
