"""`CanaryStats` compares a canary with the version in use: agreement, failures and time of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from pipeline.log_lines import plural
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
    def agreement(self) -> float | None:
        """2 matched / all objects of both; None if no image with an object went to both."""
        return _ratio(2 * self.matched, self.objects)

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
                (f"canary {canary.model_version}", replace(canary, thumbnail=stable.thumbnail)),
            )
        ]

    def as_dict(self) -> dict[str, Any]:
        """The part `canary` of summary.json."""
        figures = {
            "agreement": self.agreement,
            "score_shift": _ratio(self.score_shift_sum, self.matched),
            "failure_rate": self.failed / max(self.images, 1),
            "stable_failure_rate": self.stable_failed / max(self.stable_images, 1),
            "mean_ms": _ratio(1e3 * self.seconds, self.images - self.failed),
            "stable_mean_ms": _ratio(1e3 * self.stable_seconds, self.stable_images - self.stable_failed),
        }
        of_share = f"none of {plural(self.stable_images, 'image')} that came was of its share"
        why_not = self.not_up or (of_share if self.stable_images else "no image came while it was loaded")
        return {
            **{name: getattr(self, name) for name in ("version", "stable", "images", "failed", "skipped")},
            **{name: None if figure is None else round(figure, 5) for name, figure in figures.items()},
            **({} if self.images else {"why_no_images": why_not}),
        }

    def line(self) -> str:
        """The text of a progress line."""
        shown = self.as_dict()
        if "why_no_images" in shown:
            return f"canary {self.version}: 0 images: {shown['why_no_images']}"
        agreement = "" if self.agreement is None else f", agreement {self.agreement:.3f}"
        shift = "" if shown["score_shift"] is None else f", scores {shown['score_shift']:+.3f}"
        times = [f"{ms:.0f}" if ms is not None else "-" for ms in (shown["mean_ms"], shown["stable_mean_ms"])]
        rates = f"failed {shown['failure_rate']:.1%} (stable {shown['stable_failure_rate']:.1%})"
        images = plural(self.images, "image")
        return f"canary {self.version}: {images}{agreement}{shift}, {rates}, {times[0]} ms (stable {times[1]} ms)"


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


def _ratio(amount: float, count: int) -> float | None:
    return amount / count if count else None
