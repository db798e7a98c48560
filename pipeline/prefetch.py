"""`Prefetcher` prefetches elements within bounds of count and bytes; `started_pool` starts a pool's threads before their work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pipeline.limits import MEMORY

if TYPE_CHECKING:
    from apache_beam.utils.windowed_value import WindowedValue

Element = TypeVar("Element")
Result = TypeVar("Result")


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads run already; starting a thread while others are busy takes milliseconds."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    all_there = threading.Barrier(threads)
    for task in [pool.submit(all_there.wait) for _ in range(threads)]:
        task.result()
    return pool


class NoRoomError(Exception):
    """There is no room for these bytes yet; the work must end, and is started again later."""


class Slot(Generic[Element, Result]):
    """One element in the queue of a `Prefetcher`.

    Attributes:
      element: The element.
      result: The result, which the work sets.
      held_bytes: The bytes that it holds or has reserved.
    """

    def __init__(self, ahead: Prefetcher[Element, Result], element: Element, timestamp: Any, window: Any):
        self.element = element
        self.result: Future[Result] = Future()
        self.held_bytes = 0
        self._ahead = ahead
        self._timestamp = timestamp
        self._window = window

    @property
    def abandoned(self) -> bool:
        """Whether nobody needs the result any more: the bundle has failed, or was stopped."""
        return self._ahead.abandoned

    def reserve(self, size_bytes: int) -> None:
        """Reserves bytes before the work allocates them.

        Raises:
          NoRoomError: Earlier elements hold too many. The work must end without a result; it is started again later.
        """
        self._ahead._reserve(self, size_bytes)

    def passed_on(self) -> WindowedValue:
        """Waits for the result; returns it in the window and at the time of the element."""
        from apache_beam.transforms.window import GlobalWindow
        from apache_beam.utils.windowed_value import WindowedValue

        return WindowedValue(self.result.result(), self._timestamp, (self._window or GlobalWindow(),))


class Prefetcher(Generic[Element, Result]):
    """Starts work on elements ahead of need, and yields the results in order, each in its window.

    Later steps run while a result is yielded, and the work continues meanwhile. Its bounds are the number of elements and the
    bytes that they hold. If a size is known only after the work begins, `Slot.reserve` ends the work until there is room. No
    thread blocks for room, so an abandoned bundle leaves none behind. The oldest element always has room, whatever its size, so
    at most `most_bytes` and one element are held.

    One thread uses it, as one thread runs a bundle; the work may run on any thread.

    Args:
      start: Starts (or does) the work on a slot's element.
      most: Most elements in progress.
      most_bytes: Most bytes held by them; less where the process nears its memory limit.

    Attributes:
      abandoned: Whether an exception has ended the iteration, so that nobody needs the other results.
    """

    def __init__(self, start: Callable[[Slot[Element, Result]], None], most: int, most_bytes: float):
        self.abandoned = False
        self._start = start
        self._most = most
        self._most_bytes = most_bytes
        self._places: deque[Slot[Element, Result]] = deque()
        self._waiting: dict[Slot[Element, Result], int] = {}  # bytes to reserve, first come first
        self._held_bytes = 0
        self._lock = threading.Lock()  # of the two above; work reserves on its own threads

    def add(self, element: Element, timestamp: Any = 0, window: Any = None) -> Iterator[WindowedValue]:
        """Starts work on one more element, then yields the oldest results while too many are in progress."""
        slot = Slot(self, element, timestamp, window)
        self._places.append(slot)
        self._start(slot)

        def is_full() -> bool:
            held_too_much = bool(self._waiting) or self._held_bytes > MEMORY.budget(self._most_bytes)
            return len(self._places) > self._most or (len(self._places) > 1 and held_too_much)

        return self._pass_on(is_full)

    def rest(self) -> Iterator[WindowedValue]:
        """Yields all remaining results."""
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

    def _reserve(self, slot: Slot[Element, Result], size_bytes: int) -> None:
        with self._lock:
            if size_bytes <= slot.held_bytes:
                return
            self._set_held(slot, 0)
            if slot is not self._places[0] and self._held_bytes + size_bytes > MEMORY.budget(self._most_bytes):
                self._waiting[slot] = size_bytes
                raise NoRoomError
            self._set_held(slot, size_bytes)

    def _take_ready(self) -> list[Slot[Element, Result]]:
        """The waiting slots that have room now, with their bytes reserved: the oldest slot first, then first come first."""
        ready = []
        if self._places and self._places[0] in self._waiting:
            ready.append(self._places[0])
            self._set_held(ready[0], self._waiting.pop(ready[0]))
        while self._waiting and self._held_bytes + next(iter(self._waiting.values())) <= MEMORY.budget(self._most_bytes):
            slot = next(iter(self._waiting))
            self._set_held(slot, self._waiting.pop(slot))
            ready.append(slot)
        return ready

    def _set_held(self, slot: Slot[Element, Result], size_bytes: int) -> None:
        self._held_bytes += size_bytes - slot.held_bytes
        slot.held_bytes = size_bytes
