"""What a job takes and costs: machine-hours, storage operations, bytes through Pub/Sub and shuffles, bytes of results.

    python -m pipeline.cost --images 1e9 --images-per-second 400 --machines 20 --machine-hour 0.73

Arithmetic over what was measured for one image; docs/COST.md says how, and how far it can be trusted. Prices are yours: they
change, and no two customers pay the same. What has no price costs nothing here.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

ORDERS = tuple(10.0**n for n in range(3, 10))


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one image takes, and what each job takes once.

    `python -m tests.benchmarks.cost` measures all but `cpu_ms` and `page_s`.

    Attributes:
      cpu_ms: CPU time of an image with the model, milliseconds: YOLOv4-tiny's size at 416x416, float32 (`make bench`).
      row_bytes: A row of results without objects.
      object_bytes: Each object in it.
      attribute_bytes: What the message of a row has beside the row.
      notice_bytes: A notification of Cloud Storage with its attributes and JSON, as its documentation shows one.
      shuffled_bytes: What an image brings into the shuffles of a batch job: its name, never itself.
      class_b_an_image: Reading operations: its content, with which its generation comes.
      class_b_unlisted: More of them for an image that a message names, whose size no listing has told.
      class_a_a_job: Writing and listing operations of a job's own files.
      class_b_a_job: Reading operations of the same.
      class_a_a_spill: Writing operations of each spill of rows.
      class_b_a_spill: Reading operations of the same, when it is merged.
      class_a_an_hour: Writing operations in an hour of a machine beside others, which tells its launcher how far it is.
      class_b_an_hour: Reading operations of the same, the launcher's share in it.
      listed_at_once: Images in one listing operation (Cloud Storage's page).
      page_s: Seconds of one listing operation: what a page of Cloud Storage is said to take; never measured.
      merge_us: Time of a worker for each row that it merges and indexes, microseconds.
    """

    cpu_ms: float = 40.3
    row_bytes: float = 191.0
    object_bytes: float = 104.0
    attribute_bytes: float = 166.0
    notice_bytes: float = 1500.0
    shuffled_bytes: float = 90.0
    class_b_an_image: float = 1.0
    class_b_unlisted: float = 1.0
    class_a_a_job: float = 40.0
    class_b_a_job: float = 67.0
    class_a_a_spill: float = 1.0
    class_b_a_spill: float = 3.0
    class_a_an_hour: float = 1200.0
    class_b_an_hour: float = 4700.0
    listed_at_once: float = 1000.0
    page_s: float = 0.13
    merge_us: float = 13.0


@dataclasses.dataclass(frozen=True)
class Work:
    """A job to be.

    Attributes:
      images: How many.
      mode: `batch` or `streaming`.
      objects: Found in an image, on average.
      image_kb: An image's size, on average.
      machines: Side by side.
      cores: Of one machine, all of them busy; counts where `images_per_second` is not given.
      images_per_second: Of one machine, as measured with your model (summary.json); 0: from `cores` and the CPU time of an image.
      startup_minutes: Until a machine detects its first image.
      ramp_minutes: Batch: from then until all machines are there, one after the other.
      bundle_images: Images in a bundle of the runner: each leaves a spill.
      hours: Streaming: how long the images take to come; 0: as long as the machines take for them.
      window_s: Streaming: seconds of rows in one archive file.
      inline: Streaming: share of the images that come within their messages; the others are named.
    """

    images: float
    mode: str = "batch"
    objects: float = 5.0
    image_kb: float = 200.0
    machines: float = 1.0
    cores: float = 8.0
    images_per_second: float = 0.0
    startup_minutes: float = 5.0
    ramp_minutes: float = 10.0
    bundle_images: float = 1000.0
    hours: float = 0.0
    window_s: float = 60.0
    inline: float = 0.0


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a job takes.

    Attributes:
      hours: From the first machine's start to the end.
      machine_hours: Over all machines, their start included.
      class_a: Storage operations that list or write.
      class_b: Storage operations that read.
      read_gb: Bytes of images that leave storage, 10^9.
      results_gb: Bytes of rows that stay in storage.
      pubsub_gb: Bytes that Pub/Sub bills: published and delivered, each message as 1,000 bytes at least.
      shuffle_gb: Bytes that go into the runner's shuffles and state.
    """

    hours: float
    machine_hours: float
    class_a: float
    class_b: float
    read_gb: float
    results_gb: float
    pubsub_gb: float
    shuffle_gb: float


# flag: what it is the price of, and of how many
_PRICES = {
    "machine_hours": ("--machine-hour", 1.0, "an hour of one machine with its device and the runner's share"),
    "class_a": ("--class-a", 10_000.0, "10,000 operations of class A"),
    "class_b": ("--class-b", 10_000.0, "10,000 operations of class B"),
    "read_gb": ("--read-gb", 1.0, "a GB of images read; 0 within a region"),
    "results_gb": ("--results-gb", 1.0, "a GB of results kept for as long as you keep them"),
    "pubsub_gb": ("--pubsub-gb", 1.0, "a GB through Pub/Sub"),
    "shuffle_gb": ("--shuffle-gb", 1.0, "a GB through the runner's shuffle or streaming service"),
}
# what steps do at once: a worker's listings, all listings, ranges, rows of one; here too, so that Beam need not be imported
LISTINGS, ALL_LISTINGS, RANGES, RANGE_ROWS = 16, 1024, 256, 1_000_000
_LEAST_MESSAGE = 1000.0  # https://cloud.google.com/pubsub/pricing


def estimate(work: Work, measured: Measured | None = None) -> Usage:
    """What a job takes.

    Raises:
      ValueError: Its mode is neither `batch` nor `streaming`, or a number is no amount.
    """
    each = measured or Measured()
    if work.mode not in ("batch", "streaming"):
        raise ValueError(f"mode: expected batch or streaming, got {work.mode!r}")
    if not 0 <= work.images < math.inf or min(work.machines, work.cores, work.bundle_images, work.window_s) <= 0:
        raise ValueError("images: expected 0 or more; machines, cores, bundle_images and window_s: expected more than 0")
    if not 0 <= work.inline <= (1 if work.mode == "streaming" else 0):
        raise ValueError("inline: expected a share of a stream's images, 0 to 1")
    rate = work.images_per_second or work.cores * 1000.0 / each.cpu_ms
    startup = work.startup_minutes / 60.0
    busy = work.images / rate / 3600.0
    beside = _beside(work, each, busy) if work.mode == "batch" else _Beside()
    hours = max(work.hours, busy / work.machines + beside.hours) + startup
    row = each.row_bytes + work.objects * each.object_bytes
    by_mode = _batch(work, each) if work.mode == "batch" else _streaming(work, each, hours, row)
    told_hours = work.machines * hours if work.machines > 1 else 0.0  # alone it is the launcher's, which asks itself
    return Usage(
        hours=hours,
        machine_hours=work.machines * hours if work.hours else busy + beside.machine_hours + work.machines * startup,
        read_gb=work.images * (1 - work.inline) * work.image_kb * 1e3 / 1e9,
        results_gb=work.images * row / 1e9,
        class_a=by_mode["class_a"] + told_hours * each.class_a_an_hour,
        class_b=by_mode["class_b"] + told_hours * each.class_b_an_hour,
        pubsub_gb=by_mode["pubsub_gb"],
        shuffle_gb=by_mode["shuffle_gb"],
    )


class _Beside(NamedTuple):
    """What a batch job takes beside detecting."""

    hours: float = 0.0
    machine_hours: float = 0.0


def _beside(work: Work, each: Measured, busy: float) -> _Beside:
    """Listing, merging, and the wait for machines that come one after the other.

    Listing is done by many requests side by side. More rows than one worker shall merge are merged by several, and pass them
    three times. Machines that are not there yet cost nothing but time: on average half of them are missing, though never for
    longer than the work takes one machine.
    """
    listing = work.images / each.listed_at_once * each.page_s / 3600.0
    ranges = max(1.0, min(RANGES, work.images // RANGE_ROWS)) if work.machines > 1 else 1.0
    merging = work.images * each.merge_us / 1e6 / 3600.0 * (3.0 if ranges > 1 else 1.0)
    missing = 1.0 - 1.0 / work.machines
    ramp = min(work.ramp_minutes / 60.0 / 2.0, busy) * max(0.0, missing)
    return _Beside(
        listing / min(work.machines * LISTINGS, ALL_LISTINGS) + merging / min(work.machines, ranges) + ramp,
        listing / LISTINGS + merging,
    )


def _batch(work: Work, each: Measured) -> dict[str, float]:
    spills = work.images / work.bundle_images
    return {
        "class_a": each.class_a_a_job + work.images / each.listed_at_once + spills * each.class_a_a_spill,
        "class_b": each.class_b_a_job + work.images * each.class_b_an_image + spills * each.class_b_a_spill,
        "pubsub_gb": 0.0,
        "shuffle_gb": work.images * each.shuffled_bytes / 1e9,
    }


def _streaming(work: Work, each: Measured, hours: float, row: float) -> dict[str, float]:
    """Each image is asked for and answered, each message published and delivered; its row waits in a window for its file."""
    image, notice = work.image_kb * 1e3, max(_LEAST_MESSAGE, each.notice_bytes)
    asked = work.inline * max(_LEAST_MESSAGE, image) + (1 - work.inline) * notice
    answered = max(_LEAST_MESSAGE, row + each.attribute_bytes)
    return {
        "class_a": each.class_a_a_job + hours * 3600.0 / work.window_s,
        "class_b": each.class_b_a_job + work.images * (1 - work.inline) * (each.class_b_an_image + each.class_b_unlisted),
        "pubsub_gb": work.images * 2 * (asked + answered) / 1e9,
        "shuffle_gb": work.images * (row + each.shuffled_bytes + work.inline * _INLINE_SHUFFLED * image) / 1e9,
    }


# how often the bytes of an image that came within its message pass the runner's shuffles, by identity; others never do
_INLINE_SHUFFLED = 1


def costs(usage: Usage, prices: Mapping[str, float]) -> dict[str, float]:
    """What each part costs, by the field of `Usage`, where it has a price.

    Args:
      usage: What the job takes.
      prices: Field of `Usage` to the price of its unit, in any currency.
    """
    return {name: getattr(usage, name) / _PRICES[name][1] * price for name, price in prices.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what the job takes and costs; returns the exit code."""
    flags = _parser().parse_args(argv)
    given = vars(flags)
    prices = {name: given[name] for name in _PRICES if given[name] is not None}
    wished = {field.name: given[field.name] for field in dataclasses.fields(Work) if field.name != "images"}
    try:
        usages = {images: estimate(Work(images, **wished)) for images in (flags.images or ORDERS)}
    except ValueError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    print("\n".join(_table(usages, prices)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.cost",
        description="What a job takes and costs; docs/COST.md says how it is known.",
        allow_abbrev=False,
    )
    parser.add_argument("--images", type=float, nargs="+", metavar="N", help="default: 10^3 to 10^9, each power of ten")
    what = {field.name: field for field in dataclasses.fields(Work) if field.name != "images"}
    helps = dict(line.strip().split(": ", 1) for line in (Work.__doc__ or "").splitlines() if line.startswith("      "))
    for name, field in what.items():
        kind = str if name == "mode" else float
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=field.default, help=f"{helps.get(name, name)} (%(default)s)"
        )
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


if __name__ == "__main__":
    sys.exit(main())
