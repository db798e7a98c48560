"""Estimates what a job of N images takes and costs: machine hours, storage operations, bytes of Pub/Sub and results.

    detect-objects cost --images 1e9 --images-per-second 400 --machines 20 --machine-hour 0.73

Arithmetic over measurements of one image. docs/COST.md has the measurements, the reasoning, and how far to trust it. Prices come
from you: they change, and customers pay different ones. A part without a price counts as free.

Exit code 0: done; 2: a wrong command.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, get_args, get_type_hints

from pipeline.errors import CommandParser

ORDERS = tuple(10.0**n for n in range(3, 10))
_LEAST_MESSAGE = 1000.0  # bytes that Pub/Sub bills at least: https://cloud.google.com/pubsub/pricing
_MORE_THAN_0 = ("machines", "cores", "bundle_images", "window_s", "shard_seconds")


@dataclasses.dataclass(frozen=True)
class Measured:
    """What an image and a job take; docs/COST.md describes each, and `python -m tests.benchmarks.cost` measures most."""

    cpu_ms: float = 46.3  # CPU time of an image with YOLOv4-tiny at 416x416, float32 (BENCHMARKS.md, machine B)
    row_bytes: float = 176.0  # a row of results without objects, as JSON in a message
    object_bytes: float = 92.7  # each object in it
    shard_row_bytes: float = 19.3  # the same row in a shard
    shard_object_bytes: float = 24.6  # each object in it
    attribute_bytes: float = 166.0  # what the message of a row has besides the row
    notice_bytes: float = 1500.0  # a notification of Cloud Storage, by its documentation
    class_b_an_image: float = 1.0  # reads of an image: its content, with which its generation comes
    class_b_unlisted: float = 1.0  # one more for an image that a message names, whose size no listing has given
    class_a_a_shard: float = 1.0  # a shard is written
    listed_at_once: float = 1000.0  # images in one listing operation (Cloud Storage's page)


@dataclasses.dataclass(frozen=True)
class Work:
    """A planned job; each field is a flag of the command."""

    images: float
    mode: Annotated[str, "batch or streaming"] = "batch"
    objects: Annotated[float, "objects in an image, on average"] = 5.0
    image_kb: Annotated[float, "size of an image, on average"] = 200.0
    machines: Annotated[float, "machines side by side"] = 1.0
    cores: Annotated[float, "busy cores of a machine; used without --images-per-second"] = 8.0
    images_per_second: Annotated[float, "rate of a machine with your model, from summary.json; 0: from cores and cpu_ms"] = 0.0
    startup_minutes: Annotated[float, "until a machine detects its first image"] = 5.0
    bundle_images: Annotated[float, "batch: images in a bundle of the runner; each bundle leaves a shard"] = 1000.0
    shard_seconds: Annotated[float, "batch: most seconds of rows in a shard"] = 30.0
    hours: Annotated[float, "streaming: how long the images take to come; 0: as long as the machines need"] = 0.0
    window_s: Annotated[float, "streaming: seconds of rows in one shard"] = 10.0


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a job takes; GB are 10^9 bytes."""

    hours: float  # from the first machine's start to the end
    machine_hours: float  # of all machines, with their start
    class_a: float  # storage operations that list or write
    class_b: float  # storage operations that read
    read_gb: float  # images read from storage
    results_gb: float  # rows that stay in storage
    pubsub_gb: float  # what Pub/Sub bills: published and delivered, each message as 1,000 bytes at least


# the flag of a price, the units that it is for, and their description
_PRICES = {
    "machine_hours": ("--machine-hour", 1.0, "an hour of one machine with its device and the runner's share"),
    "class_a": ("--class-a", 10_000.0, "10,000 operations of class A"),
    "class_b": ("--class-b", 10_000.0, "10,000 operations of class B"),
    "read_gb": ("--read-gb", 1.0, "a GB of images read; 0 within a region"),
    "results_gb": ("--results-gb", 1.0, "a GB of results kept for as long as you keep them"),
    "pubsub_gb": ("--pubsub-gb", 1.0, "a GB through Pub/Sub"),
}


def estimate(work: Work, measured: Measured | None = None) -> Usage:
    """What a job takes.

    Raises:
      ValueError: Its mode is neither `batch` nor `streaming`, or a number is no amount.
    """
    _check(work)
    each, streaming = measured or Measured(), work.mode == "streaming"
    busy = work.images / (work.images_per_second or work.cores * 1000.0 / each.cpu_ms) / 3600.0
    startup = work.startup_minutes / 60.0
    hours = max(work.hours, busy / work.machines) + startup
    row = each.row_bytes + work.objects * each.object_bytes
    if streaming:
        listings, windows = 0.0, hours * 3600.0 / work.window_s
    else:  # a bundle leaves a shard when it ends, and before that one whenever it has worked for `shard_seconds`
        listings = work.images / each.listed_at_once
        windows = work.images / work.bundle_images + busy * 3600.0 / work.shard_seconds
    # a notification and a result for each image, each published and delivered
    messages = max(_LEAST_MESSAGE, each.notice_bytes) + max(_LEAST_MESSAGE, row + each.attribute_bytes)
    return Usage(
        hours=hours,
        machine_hours=work.machines * hours if work.hours else busy + work.machines * startup,
        class_a=listings + min(windows, work.images) * each.class_a_a_shard,
        class_b=work.images * (each.class_b_an_image + (each.class_b_unlisted if streaming else 0.0)),
        read_gb=work.images * work.image_kb / 1e6,
        results_gb=work.images * (each.shard_row_bytes + work.objects * each.shard_object_bytes) / 1e9,
        pubsub_gb=2 * work.images * messages / 1e9 if streaming else 0.0,
    )


def _check(work: Work) -> None:
    if work.mode not in ("batch", "streaming"):
        raise ValueError(f"mode: expected batch or streaming, got {work.mode!r}")
    for name, amount in vars(work).items():
        least = "more than 0" if name in _MORE_THAN_0 else "0 or more"
        if name != "mode" and (not 0 <= amount < math.inf or (amount == 0 and name in _MORE_THAN_0)):
            raise ValueError(f"{name}: expected {least}, got {amount:g}")


def costs(usage: Usage, prices: Mapping[str, float]) -> dict[str, float]:
    """What each part costs, by the field of `Usage`, where its unit has a price, in any currency."""
    return {name: getattr(usage, name) / _PRICES[name][1] * price for name, price in prices.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what the job takes and costs; returns the exit code."""
    given = vars(make_parser().parse_args(argv))
    prices = {name: given[name] for name in _PRICES if given[name] is not None}
    wanted = {field.name: given[field.name] for field in dataclasses.fields(Work) if field.name != "images"}
    try:
        if min(prices.values(), default=0.0) < 0:
            raise ValueError("prices: expected 0 or more")
        usages = {images: estimate(Work(images, **wanted)) for images in (given["images"] or ORDERS)}
    except ValueError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    print("\n".join(_table(usages, prices)))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog="detect-objects cost", description="What a job takes and costs; docs/COST.md says how it is known."
    )
    parser.add_argument("--images", type=float, nargs="+", metavar="N", help="default: 10^3 to 10^9, each power of ten")
    hints = get_type_hints(Work, include_extras=True)
    for field in dataclasses.fields(Work)[1:]:
        kind, what = get_args(hints[field.name])
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default, help=f"{what} (%(default)s)")
    for name, (flag, _, of_what) in _PRICES.items():
        parser.add_argument(flag, dest=name, type=float, metavar="PRICE", help=f"price of {of_what}")
    return parser


def _table(usages: Mapping[float, Usage], prices: Mapping[str, float]) -> list[str]:
    """A column for each field of `Usage`, a line for each number of images; with prices, a line of them below each."""
    names = [field.name for field in dataclasses.fields(Usage)]
    lines = [" ".join(f"{name:>13}" for name in ["images", *names, *(["cost"] if prices else [])])]
    for images, usage in usages.items():
        priced = costs(usage, prices)
        numbers = [images, *(getattr(usage, name) for name in names), *([sum(priced.values())] if prices else [])]
        lines.append(" ".join(f"{_short(number):>13}" for number in numbers))
        if prices:
            parts = ["", *(f"({_short(priced[name])})" if name in priced else "" for name in names), ""]
            lines.append(" ".join(f"{part:>13}" for part in parts).rstrip())
    return lines


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
