"""Memory that a job shares with its feeder processes: slots for the pixels of chunks.

It comes from `memfd_create`, since `/dev/shm` of a container mostly has 64 MB. Addresses are plentiful and cost nothing; memory
is taken for pixels that are there.
"""

from __future__ import annotations

import mmap

import numpy as np

_SLOT_BYTES = 1 << 36  # of addresses: no chunk has as many, nor the pixels of an image as large as `max_megapixels` may be


class SharedMemory:
    """The slots as one process sees them.

    Args:
      descriptor: The descriptor of the memory.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._mapped: dict[int, tuple[mmap.mmap, np.ndarray]] = {}

    def view(self, slot: int, size: int) -> np.ndarray:
        """The first bytes of a slot, `(size,) uint8`."""
        if slot not in self._mapped or len(self._mapped[slot][1]) < size:
            length = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(self._descriptor, length, offset=slot * _SLOT_BYTES)
            self._mapped[slot] = mapped, np.frombuffer(mapped, np.uint8)
        return self._mapped[slot][1][:size]

    def free(self, slot: int) -> None:
        """Gives the memory of a slot back to the system."""
        if slot in self._mapped:
            self._mapped[slot][0].madvise(mmap.MADV_REMOVE)


def size_of(slots: int) -> int:
    """The size of a file of so many slots."""
    return slots * _SLOT_BYTES
