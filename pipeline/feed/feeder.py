"""`Feeder` prepares images for a model in processes of its own, so that the process that detects never touches a pixel.

    start(images) -> waiting chunks -> a process reads, decodes and fits them into a slot of shared memory -> FedChunk
                                                                                       ^                        | release()
                                                                                       +----- free slots <------+

Names of images and their sizes travel; pixels do not. A chunk whose process dies is tried again image by image, so that exactly
the image at fault fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pipeline.errors import ModelError
from pipeline.failures import ImageError
from pipeline.feed.bounds import TIMED_OUT
from pipeline.feed.decode import most_seconds
from pipeline.feed.fit import ModelInput
from pipeline.feed.shared_memory import SharedMemory, size_of
from pipeline.feed.work import AskRoom, Coming, Failure, GiveRoom, Limits, Prepared, RoomFree, StoreAway, StoreFails, ToRead, Work
from pipeline.limits import MEMORY
from pipeline.records import EncodedImage, ImageRef
from pipeline.stats.process import PROCESS

# with this process's own path, not with the current folder
_CODE = "import sys; sys.path[:] = {path!r}; from pipeline.feed.process import serve; serve({memory})"
_CHUNKS = 2  # of a process: one in work, and one whose images it reads meanwhile
_STARTS = 3  # failed ones in a row, after which the feeder gives up
_KEPT_BYTES = 64 << 20  # of a slot of images of any size; more is given back to the system
_THUMBNAIL_ONLY = ModelInput((8, 8), "stretch", "darknet", 0)

_log = logging.getLogger(__name__)
_feeders: weakref.WeakSet[Feeder] = weakref.WeakSet()


@dataclasses.dataclass
class FedChunk:
    """Images that are ready for the model.

    Attributes:
      images: All images of the chunk.
      model_input: How they were fitted.
      pixels: `(n, H, W, 3) uint8`, in shared memory until `release`, of the images at `places`.
      places: Place in `images` of each of these.
      image_whs: `(n, 2)`, width and height of these images, upright, at full size.
      seconds: `(n, 2)`: of reading, and of decoding and fitting.
      received_at: `(n,)`: when reading began, seconds since the epoch; 0 where the bytes were there.
      generations: The generation that was read, of each; empty where the bytes were there.
      fed_at: When the chunk was ready, by the monotonic clock.
      thumbnails: Place in `images` -> JPEG.
      failures: Place in `images` -> why it has no pixels, of all other images.
    """

    images: Sequence[ImageRef | EncodedImage]
    model_input: ModelInput
    pixels: np.ndarray
    places: list[int]
    image_whs: np.ndarray
    seconds: np.ndarray
    received_at: np.ndarray
    generations: list[str]
    fed_at: float
    thumbnails: dict[int, bytes]
    failures: dict[int, ImageError]
    _free: _Free | None

    def release(self) -> None:
        """Lets other images have the shared memory, when nobody uses the pixels any more; further calls do nothing."""
        free, self._free = self._free, None
        if free:
            free.feeder._order(free)


@dataclasses.dataclass
class _Free:
    """The order to free a slot."""

    feeder: Feeder
    slot: int
    used_bytes: int


class _Chunk:
    """Images that are not ready yet."""

    def __init__(self, images: Sequence[ImageRef | EncodedImage], to: ModelInput, sample_below: int, thumbnails: frozenset[int]):
        self.images = images
        self.result: Future[FedChunk] = Future()
        self.result.set_running_or_notify_cancel()  # nobody cancels it
        self.slot = -1
        self.used_bytes = 0
        self.singles: deque[int] = deque()  # places to try one by one, since a process died of the chunk
        self._to = to
        self._sample_below = sample_below
        self._thumbnails = thumbnails
        self._parts: list[Prepared] = []
        self._failures: dict[int, Failure] = {}

    def next_work(self) -> Work:
        """What a process shall do next."""
        places = [self.singles[0]] if self.singles else range(len(self.images))
        images = {place: _to_send(self.images[place]) for place in places}
        return Work(self.slot, self.used_bytes, self._to, images, self._sample_below, self._thumbnails)

    def add(self, part: Prepared) -> bool:
        """Adds what a process has prepared; returns whether that was all."""
        self._parts.append(part)
        self._failures |= part.failures
        self.used_bytes += len(part.places) * part.pixels_hw[0] * part.pixels_hw[1] * 3
        if self.singles:
            self.singles.popleft()
        return not self.singles

    def process_died(self, failure: Failure) -> bool:
        """Blames the image that was tried alone, if one was; returns whether nothing is left to try."""
        if not self.singles:
            self.singles.extend(range(len(self.images)))
            return False
        self._failures[self.singles.popleft()] = failure
        return not self.singles

    def finish(self, feeder: Feeder, memory: SharedMemory) -> None:
        """Sets the result."""
        parts = [part for part in self._parts if part.places]
        count = sum(len(part.places) for part in parts)
        shape = (count, *(parts[0].pixels_hw if parts else (0, 0)), 3)
        fed = FedChunk(
            self.images,
            self._to,
            memory.view(self.slot, self.used_bytes).reshape(shape),
            [place for part in parts for place in part.places],
            np.concatenate([part.image_whs for part in parts]) if parts else np.zeros((0, 2), np.int32),
            np.concatenate([part.seconds for part in parts]) if parts else np.zeros((0, 2)),
            np.concatenate([part.received_at for part in parts]) if parts else np.zeros(0),
            [generation for part in parts for generation in part.generations],
            time.monotonic(),
            {place: jpeg for part in self._parts for place, jpeg in part.thumbnails.items()},
            {place: ImageError(*failure) for place, failure in self._failures.items()},
            _Free(feeder, self.slot, self.used_bytes if self._to.resize == "none" else 0),
        )
        self.result.set_result(fed)


def _to_send(image: ImageRef | EncodedImage) -> ToRead | bytes:
    if isinstance(image, EncodedImage):
        return image.content
    return ToRead(image.uri, image.generation, image.size_bytes, image.signed_uri)


class _Process:
    """One feeder process, as the job sees it."""

    def __init__(self, memory: int, limits: Limits):
        ours, its = socket.socketpair()
        for end in (ours, its):
            end.settimeout(None)  # Beam's sign-in at Google sets a default for all sockets
        with its:
            self.process = _start([sys.executable, "-c", _CODE.format(path=sys.path, memory=memory)], its.fileno(), memory)
        self.channel = Connection(ours.detach())
        self.chunks: deque[_Chunk] = deque()  # in the order in which it works at them
        self.is_ready = False
        self.send(limits)

    def start(self, chunk: _Chunk) -> None:
        """Sends the work of a chunk, after that of those before it."""
        self.chunks.append(chunk)
        work = chunk.next_work()
        if size := sum(len(image) for image in work.images.values() if isinstance(image, bytes)):
            self.send(Coming(size))
        self.send(work)

    def send(self, message: Any) -> None:
        """Sends a message; that a process has died, its channel tells the one who receives from it."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def end(self) -> int:
        """Ends the process; returns its exit code."""
        self.channel.close()
        self.process.kill()
        return self.process.wait()


def _start(command: Sequence[str], channel: int, memory: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(  # noqa: S603  a command of ours
            command,
            stdin=channel,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # decoders print
            env=os.environ | {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"},  # more would reserve memory
            pass_fds=(memory,),
            start_new_session=True,  # Ctrl-C is for the job
        )
    except OSError as err:
        raise ModelError(f"the processes that decode images do not start: {err}") from err


class Feeder:
    """Processes that read, decode and fit images; thread-safe.

    One thread holds the state: it hands out chunks, takes them back, and starts a process in place of one that has died.

    Args:
      limits: The limits.
      processes: How many.
      slots: Most chunks in work, ready, or in the model at once.

    Attributes:
      slots: The same.
    """

    def __init__(self, limits: Limits, processes: int, slots: int):
        self.slots = slots
        self._limits = limits
        self._descriptor = os.memfd_create("feeder")
        os.ftruncate(self._descriptor, size_of(slots))
        self._memory = SharedMemory(self._descriptor)
        self._slots = list(range(slots))
        self._waiting: deque[_Chunk] = deque()
        self._decoding: dict[_Process, float] = {}  # bytes of the large images that are decoded now
        self._asking: deque[tuple[_Process, float]] = deque()
        self._failed_starts = 0
        self._failure: BaseException | None = None
        self._ordering = threading.Lock()  # of the failure
        self._orders: queue.SimpleQueue[_Chunk | _Free | None] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        self._events = selectors.DefaultSelector()
        self._events.register(self._woken, selectors.EVENT_READ)
        self._processes: list[_Process] = []
        _feeders.add(self)
        self._thread = threading.Thread(target=self._run, args=(processes,), name="feeder", daemon=True)
        self._thread.start()

    def start(
        self,
        images: Sequence[ImageRef | EncodedImage],
        to: ModelInput,
        sample_below: int = 0,
        thumbnails: frozenset[int] = frozenset(),
    ) -> Future[FedChunk]:
        """Starts on a chunk of images; they are in work once a slot is free.

        Args:
          images: At least one; a single one for a model that takes images of any size.
          to: How they are fitted.
          sample_below: An image to read whose identity has a smaller hash gets a thumbnail.
          thumbnails: Places of other images that get one.

        Returns:
          The future of the chunk. It raises `StorageAwayError` if the images' store is away, and `ModelError` after `close`.
        """
        chunk = _Chunk(images, to, sample_below, thumbnails)
        self._order(chunk)
        return chunk.result

    def thumbnail(self, image: ImageRef | EncodedImage) -> bytes:
        """A thumbnail of an image; empty if it cannot be read or decoded any more."""
        fed = self.start([image], _THUMBNAIL_ONLY, thumbnails=frozenset({0})).result()
        fed.release()
        return fed.thumbnails.get(0, b"")

    def close(self) -> None:
        """Ends the processes; chunks in work fail."""
        self._order(None)
        self._thread.join()

    def _order(self, order: _Chunk | _Free | None) -> None:
        with self._ordering:
            if self._failure:
                if isinstance(order, _Chunk):
                    order.result.set_exception(self._failure)
                return
            self._orders.put(order)
            os.write(self._wake, b".")

    def _run(self, processes: int) -> None:
        failure: BaseException = ModelError("the feeder is closed")
        try:
            for _ in range(processes):
                self._start_process()
            while self._take_orders():
                self._give_room()
                self._hand_out()
                for key, _ in self._events.select():
                    if key.data:
                        self._take_message(key.data)
                    else:
                        os.read(self._woken, 65536)
        except BaseException as err:  # noqa: BLE001  the futures pass it on
            failure = err
        self._end(failure)

    def _take_orders(self) -> bool:
        """Takes new chunks and free slots; returns whether the feeder goes on."""
        while not self._orders.empty():
            order = self._orders.get()
            if order is None:
                return False
            if isinstance(order, _Chunk):
                self._waiting.append(order)
                continue
            if order.used_bytes > _KEPT_BYTES:
                self._memory.free(order.slot)
            self._slots.append(order.slot)
        return True

    def _hand_out(self) -> None:
        """Gives waiting chunks, the oldest first, to the processes with the fewest."""
        while self._waiting and self._slots:
            process = min(self._processes, key=lambda each: len(each.chunks))
            if len(process.chunks) >= _CHUNKS:
                return
            chunk = self._waiting.popleft()
            chunk.slot = self._slots.pop()
            PROCESS.parts["read"].begin(len(chunk.images))
            process.start(chunk)

    def _take_message(self, process: _Process) -> None:
        try:
            message = process.channel.recv()
        except (OSError, EOFError):
            self._replace(process)
            return
        if isinstance(message, Prepared):
            chunk = process.chunks[0]
            if chunk.add(message):
                self._finish(chunk)
                process.chunks.popleft()
            else:
                process.chunks.popleft()
                process.start(chunk)  # behind a chunk that the process has already
        elif isinstance(message, AskRoom):
            self._asking.append((process, message.needed_bytes))
        elif isinstance(message, RoomFree):
            self._decoding.pop(process, None)
        elif isinstance(message, StoreFails):
            _note_store(message.text)
        elif isinstance(message, StoreAway):
            self._fail(process.chunks.popleft(), message.error)
        else:
            process.is_ready = True
            self._failed_starts = 0

    def _give_room(self) -> None:
        """Lets large images be decoded in turn, as far as memory allows; one that does not fit alone is refused."""
        while self._asking:
            process, needed_bytes = self._asking[0]
            room = MEMORY.room_bytes()
            if needed_bytes + sum(self._decoding.values()) > room and self._decoding:
                return
            self._asking.popleft()
            if needed_bytes <= room:
                self._decoding[process] = needed_bytes
            process.send(GiveRoom(needed_bytes <= room, room))

    def _replace(self, process: _Process) -> None:
        """Starts a process in place of one that has died, and tries its images again."""
        self._events.unregister(process.channel)
        failure = _death(process.end(), self._limits)
        self._decoding.pop(process, None)
        self._asking = deque(each for each in self._asking if each[0] is not process)
        PROCESS.failing.pop("storage", None)  # what it knew of a store is lost; one that still fails is noted again
        self._failed_starts += not process.is_ready
        if self._failed_starts >= _STARTS:
            raise ModelError(f"the processes that decode images do not start: {failure.message}")
        fresh, chunks = self._start_process(), process.chunks
        if chunks and process.is_ready and chunks[0].process_died(failure):
            self._finish(chunks[0])
            chunks.popleft()
        self._processes.remove(process)
        for chunk in chunks:
            fresh.start(chunk)

    def _start_process(self) -> _Process:
        process = _Process(self._descriptor, self._limits)
        self._processes.append(process)
        self._events.register(process.channel, selectors.EVENT_READ, process)
        return process

    def _finish(self, chunk: _Chunk) -> None:
        PROCESS.parts["read"].end(len(chunk.images))
        chunk.finish(self, self._memory)

    def _fail(self, chunk: _Chunk, failure: BaseException) -> None:
        PROCESS.parts["read"].end(len(chunk.images))
        self._slots.append(chunk.slot)
        chunk.result.set_exception(failure)

    def _end(self, failure: BaseException) -> None:
        with self._ordering:
            self._failure = failure
        for process in self._processes:
            process.end()
            for chunk in process.chunks:
                self._fail(chunk, failure)
        while not self._orders.empty():
            order = self._orders.get()
            if isinstance(order, _Chunk):
                self._waiting.append(order)
        for chunk in self._waiting:
            chunk.result.set_exception(failure)
        self._events.close()
        for descriptor in (self._woken, self._wake, self._descriptor):
            os.close(descriptor)

    def _forget(self) -> None:
        """Closes this process's ends of the channels, in a forked process: the feeder belongs to the other one."""
        for process in self._processes:
            process.channel.close()


def _note_store(text: str) -> None:
    """Notes that a store fails, or is back."""
    PROCESS.parts["read"].progressed()
    if not text and PROCESS.failing.pop("storage", ""):
        _log.warning("storage is back")
    elif text and "storage" not in PROCESS.failing:
        _log.warning("storage fails (%s); each image is tried again", text)
    if text:
        PROCESS.failing["storage"] = text


def _death(code: int, limits: Limits) -> Failure:
    """Why a process ended."""
    if -code in TIMED_OUT:
        most = f"{most_seconds(limits.max_pixels):g} s"
        message = f"expected at most {most} of decoding, got an image that takes longer; max_megapixels sets the limit"
        return Failure("decode", "too_much_work", message)
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Failure("decode", "decoder_died", f"the process that decodes it ended with {how}")


def _forget_all() -> None:
    """In a forked process: the feeders belong to the other one, and their processes end only when nobody else has a channel."""
    for feeder in _feeders:
        feeder._forget()
    _feeders.clear()


os.register_at_fork(after_in_child=_forget_all)
