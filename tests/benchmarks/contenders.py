"""Who takes part, and the command that runs each."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.images import BENCH

REFERENCE = "plain loop, float32"
PLAIN_BF16 = "plain loop, bfloat16"
OURS, OURS_BF16 = "ours, float32", "ours, bfloat16"
CONFIG = "tests/benchmarks/ours.yaml"


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to do the work.

    Attributes:
      command: (images, output) -> the command; it writes rows below `output`.
      is_ours: Whether it is the pipeline, whose times are in its summary.json; others print theirs.
      against: The contender whose rate its own is compared with.
      large: Whether it also does the 12-megapixel images.
    """

    command: Callable[[Path, Path], list[str]]
    is_ours: bool = False
    against: str = REFERENCE
    large: bool = True


def own_contenders() -> dict[str, Contender]:
    """Those that live in the project's own environment."""
    return {
        REFERENCE: _module("plain_loop"),
        "Beam as documented": _module("beam_documented"),
        OURS: ours(),
        PLAIN_BF16: _module("plain_loop", "--precision", "bfloat16"),
        OURS_BF16: dataclasses.replace(ours("--precision", "bfloat16"), against=PLAIN_BF16),
    }


def earlier_contenders(checkout: Path) -> dict[str, Contender]:
    """The pipeline as it is in another checkout of the project, in the same environment."""
    return {
        "before, float32": ours(checkout=checkout),
        "before, bfloat16": dataclasses.replace(ours("--precision", "bfloat16", checkout=checkout), against=PLAIN_BF16),
    }


def ours(*flags: str, checkout: Path | None = None, config: str = CONFIG, model: Path = BENCH / "model") -> Contender:
    """The pipeline as a user runs it; from another checkout of the project where one is given."""

    def command(images: Path, output: Path) -> list[str]:
        there = ["env", "--chdir", str(checkout)] if checkout else []
        described = ["--config", config] if config else []
        places = ["--input", images.resolve(), "--output", output.resolve(), "--model", model.resolve()]
        return [*there, sys.executable, "-m", "pipeline.run", *described, *map(str, places), *flags]

    return Contender(command, is_ours=True)


def _module(name: str, *flags: str) -> Contender:
    def command(images: Path, output: Path) -> list[str]:
        places = ["--images", str(images), "--model", str(BENCH / "model"), "--output", str(output / "detections")]
        return [sys.executable, "-m", f"tests.benchmarks.{name}", *places, *flags]

    return Contender(command)
