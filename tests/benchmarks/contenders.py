"""Who takes part, and the command that runs each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.images import BENCH

REFERENCE = "plain loop, float32"
PLAIN_BF16 = "plain loop, bfloat16"
OURS, OURS_BF16 = "ours, float32", "ours, bfloat16"
CONFIG = "tests/benchmarks/ours.yaml"
PRISM = Path(".tools/prism")


class Contender(NamedTuple):
    """One way to do the work."""

    command: Callable[[Path, Path], list[str]]  # (images, output) -> the command; it writes rows below `output`
    is_ours: bool = False  # the pipeline, whose times are in its summary.json; others print theirs
    against: str = REFERENCE  # whose rate its own is compared with

    def with_flags(self, *flags: str) -> Contender:
        """The same with more flags."""
        return self._replace(command=lambda images, output: [*self.command(images, output), *flags])


def own_contenders() -> dict[str, Contender]:
    """Those that live in the project's own environment."""
    found = {
        REFERENCE: module("plain_loop"),
        OURS: ours(),
        PLAIN_BF16: module("plain_loop", "--precision", "bfloat16"),
        OURS_BF16: ours("--precision", "bfloat16")._replace(against=PLAIN_BF16),
    }
    if PRISM.exists():
        found["ours on Prism, float32"] = ours("--runner", "PrismRunner", "--prism_location", str(PRISM))
    return found


def ours(*flags: str, config: str = CONFIG, model: Path = BENCH / "model") -> Contender:
    """The pipeline as a user runs it."""

    def command(images: Path, output: Path) -> list[str]:
        described = ["--config", config] if config else []
        places = ["--input", images.resolve(), "--output", output.resolve(), "--model", model.resolve()]
        return [sys.executable, "-m", "pipeline.run", *described, *map(str, places), *flags]

    return Contender(command, is_ours=True)


def module(name: str, *flags: str, python: str = sys.executable, model: Path = BENCH / "model") -> Contender:
    """A program of this folder, in its own environment."""

    def command(images: Path, output: Path) -> list[str]:
        places = ["--images", str(images), "--model", str(model), "--output", str(output / "detections")]
        return [python, "-m", f"tests.benchmarks.{name}", *places, *flags]

    return Contender(command)
