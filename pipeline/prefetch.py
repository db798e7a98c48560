"""Work that is under way ahead of the steps behind it, and pools of threads that are all running before there is work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

Element = TypeVar("Element")
Result = TypeVar("Result")


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads run already: beside busy threads, starting one holds its starter up for milliseconds."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    all_there = threading.Barrier(threads)
    for task in [pool.submit(all_there.wait) for _ in range(threads)]:
        task.result()
    return pool


class NoRoomError(Exception):
    """There is no room for these bytes yet; the work ends here, and is started again when there is."""


class Slot(Generic[Element, Result]):
    """One element's slot in the queue of a `Prefetcher`.

    Attributes:
      element: What is worked on.
      result: What comes of it; whoever does the work sets it.
      held_bytes: How many bytes it may hold, or holds.
    """

    def __init__(self, ahead: Prefetcher[Element, Result], element: Element, timestamp: Any, window: Any):
        self.element = element
        self.result: Future[Result] = Future()
        self.held_bytes = 0
        self._ahead = ahead
        self._timestamp = timestamp
        self._window = window or GlobalWindow()

    @property
    def abandoned(self) -> bool:
        """Whether nobody will ask for the result: what is around has failed, or was stopped."""
        return self._ahead.abandoned

    def reserve(self, size_bytes: int) -> None:
        """Says how many bytes the work is about to take, before it takes them.

        Raises:
          NoRoomError: Elements before this one hold too many. The work must end without a result; it is started again.
        """
        self._ahead._reserve(self, size_bytes)

    def hold(self, size_bytes: int) -> None:
        """Says how many bytes are held already."""
        self._ahead._hold(self, size_bytes)

    def passed_on(self) -> WindowedValue:
        """The result, waited for, in the window and at the time of the element."""
        return WindowedValue(self.result.result(), self._timestamp, (self._window,))


class Prefetcher(Generic[Element, Result]):
    """Starts work on elements before it passes earlier ones on, in their order, each in its window.

    The steps behind run while one is passed on, and the work goes on meanwhile. It is bounded by count and by the bytes that
    are really held: where a size shows only when the work has begun, `Slot.reserve` ends it until there is room. Nobody waits
    for room while holding a thread, so an abandoned bundle leaves none behind. The oldest always has room, so it goes on
    however large it is: what is held, with the one that is being passed on, is at most `most_bytes` and one element.

    To be used by one thread, like a bundle; the work itself may run on any.

    Args:
      start: Starts (or does) the work on a slot's element.
      most: Most elements under way.
      most_bytes: Most bytes held by them.

    Attributes:
      abandoned: Whether an exception has ended the passing on, so that nobody asks for the other results.
    """

    def __init__(self, start: Callable[[Slot[Element, Result]], None], most: int, most_bytes: float):
        self.abandoned = False
        self._start = start
        self._most = most
        self._most_bytes = most_bytes
        self._places: deque[Slot[Element, Result]] = deque()
        self._waiting: dict[Slot[Element, Result], int] = {}  # bytes wanted, in the order of asking
        self._held_bytes = 0
        self._lock = threading.Lock()  # of what changes these; work reserves on threads of its own

    def add(self, element: Element, timestamp: Any = 0, window: Any = None) -> Iterator[WindowedValue]:
        """Starts work on one more, then gives the oldest results while there is too much under way."""
        slot = Slot(self, element, timestamp, window)
        self._places.append(slot)
        self._start(slot)
        return self._pass_on(lambda: len(self._places) > self._most or (len(self._places) > 1 and self._is_full()))

    def rest(self) -> Iterator[WindowedValue]:
        """All results that are left."""
        return self._pass_on(lambda: bool(self._places))

    def _pass_on(self, wanted: Callable[[], bool]) -> Iterator[WindowedValue]:
        try:
            while wanted():
                yield self._places[0].passed_on()
                self._release_oldest()
        except BaseException:
            self.abandoned = True
            raise

    def _release_oldest(self) -> None:
        with self._lock:
            self._held_bytes -= self._places.popleft().held_bytes
            ready = self._take_ready()
        for slot in ready:
            self._start(slot)

    def _is_full(self) -> bool:
        return bool(self._waiting) or self._held_bytes > self._most_bytes

    def _hold(self, slot: Slot[Element, Result], size_bytes: int) -> None:
        with self._lock:
            self._set_held(slot, size_bytes)

    def _reserve(self, slot: Slot[Element, Result], size_bytes: int) -> None:
        with self._lock:
            if size_bytes <= slot.held_bytes:
                return
            self._set_held(slot, 0)
            if slot is not self._places[0] and self._held_bytes + size_bytes > self._most_bytes:
                self._waiting[slot] = size_bytes
                raise NoRoomError
            self._set_held(slot, size_bytes)

    def _take_ready(self) -> list[Slot[Element, Result]]:
        """Those that waited and have room now, with their bytes reserved: the oldest of all, then whoever asked first."""
        ready = []
        if self._places and self._places[0] in self._waiting:
            ready.append(self._places[0])
            self._set_held(ready[0], self._waiting.pop(ready[0]))
        while self._waiting and self._held_bytes + next(iter(self._waiting.values())) <= self._most_bytes:
            slot = next(iter(self._waiting))
            self._set_held(slot, self._waiting.pop(slot))
            ready.append(slot)
        return ready

    def _set_held(self, slot: Slot[Element, Result], size_bytes: int) -> None:
        self._held_bytes += size_bytes - slot.held_bytes
        slot.held_bytes = size_bytes
