"""The memory that a block of a test takes."""

import contextlib
import tracemalloc
from collections.abc import Iterator


@contextlib.contextmanager
def less_memory_than(most_bytes: int) -> Iterator[None]:
    """Fails if Python objects take more memory in its block."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()
