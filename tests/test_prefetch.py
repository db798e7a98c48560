"""Looking ahead: order, windows, and bounds that hold for the bytes that are really there."""

import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from apache_beam.transforms.window import GlobalWindow, IntervalWindow
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import ReadConfig
from pipeline.prefetch import NoRoomError, Prefetcher, started_pool
from pipeline.read.read_ahead import ReadAhead
from pipeline.records import ImageRef

MOST_BYTES = 64


class Held:
    """Counts the bytes that its work holds: taken once they are reserved, given back when they are passed on."""

    def __init__(self, pool):
        self.pool = pool
        self.now = self.peak = 0
        self.starts = 0
        self.lock = threading.Lock()

    def start(self, slot):
        self.pool.submit(self.work, slot)

    def work(self, slot):
        self.starts += 1
        try:
            slot.reserve(slot.element)
        except NoRoomError:
            return
        with self.lock:
            self.now += slot.element
            self.peak = max(self.peak, self.now)
        slot.result.set_result(slot.element)

    def pass_on(self, passed_on):
        with self.lock:
            self.now -= passed_on.value
        return passed_on.value


class Inline:
    """A pool that works at once; so what is under way is the same in every run."""

    def submit(self, work, *arguments):
        work(*arguments)


def through(ahead, held, elements):
    return [held.pass_on(done) for element in elements for done in ahead.add(element)] + [
        held.pass_on(done) for done in ahead.rest()
    ]


@pytest.fixture(scope="module")
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.mark.parametrize("on_threads", [False, True], ids=["in turn", "on threads"])
@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 20), st.integers(0, 200)), max_size=60), st.integers(1, 8))
def test_all_elements_come_in_their_order_and_no_more_bytes_are_held_than_allowed_and_one_element(
    threads, on_threads, sizes, most
):
    """Sizes show only when the work has begun; one larger than the bound comes all the same."""
    held = Held(threads if on_threads else Inline())
    assert through(Prefetcher(held.start, most, MOST_BYTES), held, sizes) == sizes
    assert held.peak <= MOST_BYTES + max(sizes, default=0)
    assert held.now == 0


def test_work_goes_on_ahead_as_far_as_the_bounds_allow():
    """What fits is done before the first is asked for, and the next begins when one is passed on."""
    held = Held(Inline())
    ahead = Prefetcher(held.start, 3, MOST_BYTES)
    assert [list(ahead.add(size)) for size in (10, 20, 30)] == [[], [], []]
    assert held.now == 60
    assert [held.pass_on(done) for done in ahead.add(30)] == [10, 20], "until the fourth fits"
    assert (held.now, held.starts) == (60, 5)


def test_the_bound_on_the_count_holds_for_elements_without_bytes():
    held = Held(Inline())
    ahead = Prefetcher(held.start, 3, MOST_BYTES)
    assert [len(list(ahead.add(0))) for _ in range(5)] == [0, 0, 0, 1, 1]


def test_each_result_keeps_window_and_timestamp():
    held = Held(Inline())
    ahead = Prefetcher(held.start, 1, MOST_BYTES)
    window = IntervalWindow(0, 10)
    given_places = [(5, 3, window), (6, 4, None)]
    passed_on = [done for slot in given_places for done in ahead.add(*slot)] + list(ahead.rest())
    assert [(done.value, done.timestamp, done.windows) for done in passed_on] == [(5, 3, (window,)), (6, 4, (GlobalWindow(),))]


def test_a_failure_reaches_whoever_waits_for_the_result():
    def start(slot):
        slot.result.set_exception(OSError(f"no {slot.element}"))

    ahead = Prefetcher(start, 1, MOST_BYTES)
    assert list(ahead.add(1)) == []
    with pytest.raises(OSError, match="no 1"):
        list(ahead.add(2))


def test_an_abandoned_bundle_leaves_no_thread_waiting():
    """A bundle that fails is not finished; its reads must not hold the pool, or the process would never end."""
    with ThreadPoolExecutor(2) as pool:
        held = Held(pool)
        ahead = Prefetcher(held.start, 100, MOST_BYTES)
        for size in (10, 60, 50, 40, 30):
            next(ahead.add(size), None)
        assert pool.submit(lambda: "free").result() == "free"


@pytest.mark.parametrize("listed", [True, False], ids=["sizes listed", "sizes unknown"])
def test_reading_ahead_holds_few_bytes_of_large_files(tmp_path, listed):
    """32 files of 20 MB: at most the bound of 64 MB and one image are there, whatever is known before they are opened."""
    size = 20_000_000
    for n in range(32):
        with open(tmp_path / f"{n}.jpg", "wb") as file:
            file.truncate(size)
    read_ahead = ReadAhead(ReadConfig())
    read_ahead.setup()
    read_ahead.start_bundle()
    tracemalloc.start()
    try:
        read = 0
        for n in range(32):
            ref = ImageRef(str(tmp_path / f"{n}.jpg"), size_bytes=size if listed else 0)
            read += sum(len(done.value.content) for done in read_ahead.process(ref, 0, GlobalWindow()))
        read += sum(len(done.value.content) for done in read_ahead.finish_bundle())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        read_ahead.teardown()
    assert read == 32 * size
    assert peak < 64_000_000 + 2 * size, "the one that is passed on may still be held beside those under way"


def test_a_file_that_grew_since_it_was_listed_waits_for_room_like_others(tmp_path):
    """The size that counts is that of the file, not that of the listing."""
    for n in range(8):
        (tmp_path / f"{n}.jpg").write_bytes(b"%d" % n)
    refs = [ImageRef(str(tmp_path / f"{n}.jpg"), size_bytes=1) for n in range(8)]
    for n in range(8):
        with open(tmp_path / f"{n}.jpg", "ab") as file:
            file.truncate(30_000_000)
    read_ahead = ReadAhead(ReadConfig())
    read_ahead.setup()
    read_ahead.start_bundle()
    tracemalloc.start()
    try:
        order = [done.value.content[:1] for ref in refs for done in read_ahead.process(ref, 0, GlobalWindow())]
        order += [done.value.content[:1] for done in read_ahead.finish_bundle()]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        read_ahead.teardown()
    assert order == [b"%d" % n for n in range(8)]
    assert peak < 64_000_000 + 2 * 30_000_000


def test_all_threads_of_a_started_pool_run_already():
    with started_pool(3, "test") as pool:
        assert len(pool._threads) == 3
