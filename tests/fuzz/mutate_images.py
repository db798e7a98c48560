"""Damages images: numbers at the edges, flipped bits, parts that are gone, repeated, or of another image of the format."""

from __future__ import annotations

import random

_EDGES = (
    *range(5),
    *(2**n + m for n in (3, 4, 5, 6, 7, 8, 12, 14, 15, 16, 20, 24, 30, 31, 32) for m in (-1, 0, 1)),
    300,
    5000,
    10**5,
)
_MOST_BYTES = 4 << 20


def mutate(content: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """A changed image.

    Args:
      content: The image.
      others: More of the same format, from which parts may come.
      rng: Decides.
    """
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
