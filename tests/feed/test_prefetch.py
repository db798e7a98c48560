"""Reading ahead: order, windows, and bounds that hold for the bytes that are really there."""

import contextlib
import itertools
import threading
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.feed.prefetch import Prefetcher
from pipeline.limits import MEMORY
from pipeline.records import EncodedImage, ImageRef
from tests.memory import less_memory_than

MOST_BYTES = 64


class Held:
    """Reads images as large as their `extra` says, and counts the bytes that it holds."""

    def __init__(self):
        self.now = self.peak = 0
        self.lock = threading.Lock()

    def read(self, read):
        size = int(read.ref.extra)
        read.reserve(size)
        with self.lock:
            self.now += size
            self.peak = max(self.peak, self.now)
        return EncodedImage(read.ref, bytes(size))

    def take(self, ahead, read):
        size = len(read.result.result().content)
        with self.lock:
            self.now -= size
        ahead.done(read)
        return size


def refs_of(sizes, *schemes, listed=True):
    """Images of these sizes, which a listing knows or not, of these schemes in turn."""
    return [
        ImageRef(f"{scheme}{number}.jpg", size_bytes=size if listed else 0, extra=str(size))
        for number, (size, scheme) in enumerate(zip(sizes, itertools.cycle(schemes or [""])))
    ]


@pytest.fixture
def ahead():
    with contextlib.ExitStack() as stack:

        def make(read_image, threads=4, most_bytes=MOST_BYTES):
            return stack.enter_context(contextlib.closing(Prefetcher(read_image, threads, most_bytes)))

        yield make


@pytest.mark.parametrize("schemes", [("",), ("gs://b/",), ("", "gs://b/", "gs://b/")], ids=["in groups", "one by one", "mixed"])
@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 20), st.integers(0, 200)), max_size=60), st.integers(1, 8), st.booleans())
def test_all_images_come_in_their_order_and_no_more_bytes_are_held_than_allowed_and_one_image(schemes, sizes, threads, listed):
    """One larger than the bound comes all the same."""
    held = Held()
    with contextlib.closing(Prefetcher(held.read, threads, MOST_BYTES)) as ahead:
        assert [held.take(ahead, read) for read in ahead.begin(refs_of(sizes, *schemes, listed=listed))] == sizes
    assert held.now == 0 and held.peak <= MOST_BYTES + max(sizes, default=0)


def test_images_are_read_ahead_as_far_as_the_bounds_allow(ahead):
    """What fits is read before the first is taken, and the next when one is done."""
    held = Held()
    reads = (prefetcher := ahead(held.read)).begin(refs_of((10, 20, 30, 30), "gs://b/"))
    assert [len(read.result.result().content) for read in reads[:3]] == [10, 20, 30]
    assert not reads[3].result.done()
    assert [held.take(prefetcher, read) for read in reads] == [10, 20, 30, 30]


def test_images_are_read_one_by_one_when_memory_is_short(ahead):
    """Whatever the buffer's size is set to."""
    held = Held()
    try:
        MEMORY.narrow(1)
        reads = (prefetcher := ahead(held.read, most_bytes=64_000_000)).begin(refs_of([2_000_000] * 20, "gs://b/"))
        for number, read in enumerate(reads):
            assert held.take(prefetcher, read) == 2_000_000
            assert not any(later.result.done() for later in reads[number + 2 :])
    finally:
        MEMORY.narrow(None)


def test_a_thread_that_reads_several_files_keeps_none_that_is_done(ahead):
    """Each thread would keep the images before the one that waits for room."""
    held, prefetcher = Held(), ahead(Held().read, threads=1, most_bytes=2_500_000)
    with less_memory_than(4_000_000):
        reads = deque(prefetcher.begin(refs_of([1_000_000] * 16)))
        while reads:
            held.take(prefetcher, reads.popleft())


def test_reads_that_nobody_takes_give_their_room_to_others(ahead):
    prefetcher = ahead(Held().read, threads=2)
    prefetcher.abandon(prefetcher.begin(refs_of((60, 50, 40, 30, 20), "gs://b/")))
    (last, _) = prefetcher.begin(refs_of((1, MOST_BYTES - 1)))
    assert len(last.result.result().content) == 1
