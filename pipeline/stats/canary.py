"""`CanaryStats` compares a canary with the version in use: agreement, failures and time of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

import msgspec

from pipeline.records import DetectedImage

_Version = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,100}$")]  # `int` refuses thousands of digits
_PICTURES = 4


class Disagreement(NamedTuple):
    """An image in which two versions detect different objects.

    Attributes:
      different: Objects that only one of them detects.
      stable: The result of the version in use, with a thumbnail.
      canary: The result of the canary, without one.
    """

    different: int
    stable: DetectedImage
    canary: DetectedImage


@dataclasses.dataclass
class CanaryStats:
    """Counts of one canary in one process.

    Attributes:
      version: The canary.
      stable: The version in use.
      images: Images that the canary received.
      failed: Of these, the ones that it failed on.
      skipped: Images of its share that it did not receive, since it was behind.
      seconds: The canary's time, summed over images without a failure.
      stable_images: Images that the version in use received.
      stable_failed: Of these, the ones that it failed on.
      stable_seconds: Its time, summed over the others.
      matched: Objects that both versions have found in the same image.
      objects: Objects of both versions in the images that both received.
      score_shift_sum: Over the matched objects, the canary's confidence minus that of the version in use.
      not_up: Why the canary was never loaded; empty if it was.
      disagreements: A few images that the versions differ most on; see `add_disagreement`.
    """

    version: _Version
    stable: _Version
    images: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    stable_images: int = 0
    stable_failed: int = 0
    stable_seconds: float = 0.0
    matched: int = 0
    objects: int = 0
    score_shift_sum: float = 0.0
    not_up: str = ""
    disagreements: tuple[Disagreement, ...] = ()

    @property
    def why_no_images(self) -> str:
        """Why the canary has received no image; empty if it has received some."""
        if self.images:
            return ""
        of_share = f"none of the {self.stable_images} images that came was of its share"
        return self.not_up or (of_share if self.stable_images else "no image came while it was loaded")

    @property
    def agreement(self) -> float | None:
        """2 matched / all objects of both; None if no image with an object went to both."""
        return 2 * self.matched / self.objects if self.objects else None

    @property
    def failure_rate(self) -> float:
        """Share of its images that the canary failed on."""
        return self.failed / max(self.images, 1)

    @property
    def stable_failure_rate(self) -> float:
        """The same share of the version in use."""
        return self.stable_failed / max(self.stable_images, 1)

    def wants_picture(self, different: int) -> bool:
        """Whether an image with so many different objects may be among the few that are shown."""
        return different > 0 and (len(self.disagreements) < _PICTURES or different > self.disagreements[-1].different)

    def add_disagreement(self, *added: Disagreement) -> None:
        """Keeps the images with the most different objects, each one once."""
        kept: dict[str, Disagreement] = {}
        for each in sorted([*self.disagreements, *added], key=lambda each: -each.different):
            kept.setdefault(each.stable.ref.identity, each)
        self.disagreements = tuple(kept.values())[:_PICTURES]

    def pictures(self) -> list[tuple[str, DetectedImage]]:
        """For each disagreement the result of the version in use, then that of the canary, each with a title."""
        return [
            pair
            for _, stable, canary in self.disagreements
            for pair in (
                (f"version {stable.model_version}", stable),
                (f"canary {canary.model_version}", dataclasses.replace(canary, thumbnail=stable.thumbnail)),
            )
        ]

    def as_dict(self) -> dict[str, Any]:
        """The part `canary` of summary.json."""
        return {
            "version": self.version,
            "stable": self.stable,
            "images": self.images,
            "failed": self.failed,
            "skipped": self.skipped,
            "agreement": _rounded(self.agreement),
            "score_shift": _rounded(self.score_shift_sum / self.matched if self.matched else None),
            "failure_rate": _rounded(self.failure_rate),
            "stable_failure_rate": _rounded(self.stable_failure_rate),
            "mean_ms": _rounded(_mean_ms(self.seconds, self.images - self.failed), 3),
            "stable_mean_ms": _rounded(_mean_ms(self.stable_seconds, self.stable_images - self.stable_failed), 3),
            **({"why_no_images": self.why_no_images} if self.why_no_images else {}),
        }

    def line(self) -> str:
        """The text of a progress line."""
        if self.why_no_images:
            return f"canary {self.version}: 0 images: {self.why_no_images}"
        shown = self.as_dict()
        agreement = "" if self.agreement is None else f", agreement {shown['agreement']:.3f}"
        shift = "" if shown["score_shift"] is None else f", scores {shown['score_shift']:+.3f}"
        times = [f"{ms:.0f}" if ms is not None else "-" for ms in (shown["mean_ms"], shown["stable_mean_ms"])]
        rates = f"failed {self.failure_rate:.1%} (stable {self.stable_failure_rate:.1%})"
        return f"canary {self.version}: {self.images} images{agreement}{shift}, {rates}, {times[0]} ms (stable {times[1]} ms)"


def merge_canaries(figures: Iterable[CanaryStats]) -> CanaryStats | None:
    """The sum over all processes for their newest canary; None if there is none."""
    merged: CanaryStats | None = None
    for each in sorted(figures, key=lambda each: (int(each.version), int(each.stable)), reverse=True):
        if merged is None:
            merged = dataclasses.replace(each)
        elif (each.version, each.stable) == (merged.version, merged.stable):
            for field in dataclasses.fields(each):
                if isinstance(amount := getattr(each, field.name), (int, float)):
                    setattr(merged, field.name, getattr(merged, field.name) + amount)
            merged.add_disagreement(*each.disagreements)
            merged.not_up = merged.not_up or each.not_up
    return merged


def _mean_ms(seconds: float, images: int) -> float | None:
    return seconds / images * 1e3 if images else None


def _rounded(value: float | None, digits: int = 5) -> float | None:
    return None if value is None else round(value, digits)
