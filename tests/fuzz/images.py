"""Mutated images of every format, each decoded in a child process within bounds of memory and time.

    python -m tests.fuzz.images --minutes 30 --seed 1

Each case ends as pixels or as an `ImageError`, within the limit of CPU time and the memory that the limit of pixels allows. What
does not is kept in tests/fuzz/corpus/, which the tests replay, and named with its seed and number.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import random
import sys
import time
from pathlib import Path

from pipeline.failures import REASONS
from tests.decoding_process import DecodingProcess, Outcome
from tests.fuzz.image_seeds import seeds

CORPUS = Path(__file__).parent / "corpus"
MAX_PIXELS = 25e6
_BYTES_PER_PIXEL = 20.5
_EXPECTED_ENDS = {*REASONS["decode"], "pixels"} - {"too_much_work"}  # no damage makes a small image so
_POWERS = [2**n for n in (3, 4, 5, 6, 7, 8, 12, 14, 15, 16, 20, 24, 30, 31, 32)]
_EDGES = (*range(5), *(power + m for power in _POWERS for m in (-1, 0, 1)), 300, 5000, 10**5)
_MOST_BYTES = 4 << 20


def make_case(seed: int, number: int) -> tuple[str, bytes]:
    """(format, image) of a case; the same at each call."""
    rng = random.Random(f"{seed}-{number}")
    name = rng.choice(sorted(seeds()))
    return name, mutate(rng.choice(seeds()[name]), seeds()[name], rng)


def mutate(content: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """A changed image, into which parts of others of the same format may come."""
    changed = bytearray(content)
    for _ in range(1 + int(rng.expovariate(0.5))):
        _change(changed, rng.choice(others), rng)
    if rng.random() < 0.1:
        del changed[rng.randrange(len(changed) + 1) :]
    return bytes(changed[:_MOST_BYTES])


def _change(changed: bytearray, other: bytes, rng: random.Random) -> None:
    """Changes one place, half of the time among the first bytes: they mean most."""
    near = min(int(rng.expovariate(1 / 60)), len(changed))
    at = near if rng.random() < 0.5 else rng.randrange(len(changed) + 1)
    choice = rng.random()
    if choice < 0.5:
        width = min(rng.choice((1, 1, 2, 2, 4, 4, 8)), len(changed) - at)
        changed[at : at + width] = (rng.choice(_EDGES) % 256**width).to_bytes(width, rng.choice(("big", "little")))
    elif choice < 0.7 and at < len(changed):
        changed[at] ^= 1 << rng.randrange(8)
    elif choice < 0.8:
        del changed[at : at + rng.choice((1, 2, 4, 30, 400))]
    elif choice < 0.9:
        changed[at:at] = changed[at : at + rng.choice((1, 3, 16, 200))] * rng.choice((1, 2, 50, 1000))
    else:
        length = rng.choice((4, 30, 400))
        changed[at : at + length] = other[at : at + length]


def problem(content: bytes, outcome: Outcome) -> str:
    """What must not be about an outcome; "" where all is well."""
    if outcome.end not in _EXPECTED_ENDS:
        return f"ended as {outcome.end}: {outcome.message}"
    most = (MAX_PIXELS * _BYTES_PER_PIXEL + 4 * len(content)) / 1e6 + 100
    if outcome.megabytes > most:
        return f"took {outcome.megabytes:.0f} MB, at most {most:.0f} are allowed"
    return ""


def fuzz(seconds: float, seed: int) -> int:
    """Runs cases for so long; prints what it did and found, and returns how many it found."""
    ends: collections.Counter[tuple[str, str]] = collections.Counter()
    largest, found = 0.0, 0
    started, number = time.monotonic(), 0
    with DecodingProcess(MAX_PIXELS) as process:
        while time.monotonic() - started < seconds:
            name, content = make_case(seed, number)
            outcome = process.decode(content)
            ends[name, outcome.end] += 1
            largest = max(largest, outcome.megabytes)
            if complaint := problem(content, outcome):
                found += 1
                path = CORPUS / f"{name.lower()}-{hashlib.sha256(content).hexdigest()[:10]}.bin"
                path.write_bytes(content)
                print(f"FOUND with seed {seed}, number {number} ({path.name}): {complaint}", flush=True)
            number += 1
    for name in sorted(seeds()):
        print(f"{name:9s}", ", ".join(f"{count} {end}" for (of, end), count in sorted(ends.items()) if of == name))
    print(f"{number} images with seed {seed} in {time.monotonic() - started:.0f} s, at most {largest:.0f} MB, {found} findings")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    sys.exit(1 if fuzz(60 * args.minutes, args.seed) else 0)
