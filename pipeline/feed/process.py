"""A feeder process: reads, decodes and fits images into shared memory; `feeder.py` starts it.

It imports neither Beam nor TensorFlow. Threads read ahead. The main thread decodes, one image at a time, within
limits that the kernel keeps (`bounds.py`). The process ends when the job's process has ended, in whatever way.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import math
import os
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from msgspec.structs import replace

from pipeline.errors import UserError
from pipeline.failures import Failure, ImageError
from pipeline.feed.bounds import bound_time, bounded, bytes_for, clock_stopped, expect, limit_memory, set_up, time_bounded
from pipeline.feed.decode import MORE_MEMORY, most_seconds
from pipeline.feed.fit import fit, fit_tile
from pipeline.feed.prefetch import Prefetcher, Read
from pipeline.feed.read_image import CircuitBreaker, read_image
from pipeline.feed.readable_formats import Size
from pipeline.feed.shared_memory import SharedMemory
from pipeline.feed.thumbnails import make_thumbnail
from pipeline.feed.work import (
    ANY_ROOM,
    Coming,
    Fitted,
    Limits,
    LookedUp,
    LookUp,
    Portion,
    PortionUsed,
    Prepared,
    StopWaiting,
    StoreAnswers,
    StoreAway,
    StoreFails,
    Work,
)
from pipeline.limits import MEMORY
from pipeline.records import EncodedImage, identity_hash
from pipeline.storage.store import FoundFile, retried
from pipeline.storage.stores import store_of
from pipeline.storage.web import is_web

_TURN, _ROOM = range(2)  # bytes of the file of locks, which the kernel frees when a process ends
_SHORT_SECONDS = 0.05  # until memory is asked for again
_STACK_BYTES = 1 << 20  # of a thread that reads; it counts where memory is bounded


def serve(memory: int, locks: int) -> None:
    """Works until the other end of standard input, a socket, closes.

    Args:
      memory: The descriptor of the shared memory.
      locks: That of a file for the locks of all feeder processes of a job.
    """
    set_up()
    warnings.simplefilter("ignore")  # of Pillow, for damaged Exif
    threading.stack_size(_STACK_BYTES)
    try:
        _Process(Connection(0), memory, locks).run()
    finally:
        os._exit(1)  # without waiting for threads that read


class _Process:
    def __init__(self, channel: Connection, memory: int, locks: int):
        self._channel = channel
        self._lock = functools.partial(fcntl.lockf, locks)
        self._sending = threading.Lock()
        self._limits: Limits = channel.recv()
        MEMORY.limit_bytes = self._limits.memory_bytes
        self._noted: queue.SimpleQueue[StoreFails] = queue.SimpleQueue()
        self._breaker = CircuitBreaker(
            self._limits.retry_seconds, self._limits.give_up_seconds, lambda *noted: self._noted.put(StoreFails(*noted))
        )
        self._memory = SharedMemory(memory)
        self._ahead = Prefetcher(self._read, self._limits.read_threads, self._limits.read_ahead_bytes)
        self._lookups = ThreadPoolExecutor(self._limits.read_threads, "look up")
        self._lookups.submit(int)  # one thread is there, also where an image that is decoded leaves no room for more
        self._works: queue.SimpleQueue[tuple[Work, deque[Read]]] = queue.SimpleQueue()
        self._used: queue.SimpleQueue[PortionUsed] = queue.SimpleQueue()

    def run(self) -> None:
        """Answers each `Work` with `Prepared`, in order."""
        self._send(None)  # is ready
        for work in (self._receive, self._send_notes):
            threading.Thread(target=work, daemon=True).start()
        while True:
            self._send(self._answer(*self._works.get()))  # keeps no image that is done

    def _answer(self, work: Work, reads: deque[Read]) -> Prepared | StoreAway:
        try:
            return self._prepare(work, reads)
        except UserError as err:
            self._ahead.abandon(reads)
            return StoreAway(err)

    def _receive(self) -> None:
        """Begins to read what is asked for; ends the process with the job's."""
        try:
            while True:
                message = self._channel.recv()
                if isinstance(message, Coming):
                    expect(message.size)
                elif isinstance(message, StoreAnswers):
                    self._breaker.succeeded(message.uri)
                elif isinstance(message, PortionUsed):
                    self._used.put(message)
                elif isinstance(message, StopWaiting):
                    self._breaker.stop.set()
                elif isinstance(message, LookUp):
                    self._look_up(message)
                else:
                    expect(0)
                    self._works.put((message, deque(self._ahead.begin(message.images.values()))))
        finally:
            os._exit(0)

    def _look_up(self, asked: LookUp) -> None:
        """Begins a `LookUp`, whose files are looked up side by side; the last one sends the answer."""
        found: list[FoundFile | None] = [None] * len(asked.locations)
        late, left = time.monotonic() + asked.seconds, itertools.count(len(found) - 1, -1)

        def look_up(place: int) -> None:
            found[place] = self._found(asked.locations[place], late)
            if next(left) == 0:
                self._send(LookedUp(asked.number, found))

        for place in range(len(found)):
            with contextlib.suppress(RuntimeError):  # no room for one more thread now: those that are there take it
                self._lookups.submit(look_up, place)

    def _found(self, location: str, late: float) -> FoundFile | None:
        seconds = 0.0 if is_web(location) else late - time.monotonic()  # anybody may name a web server that is away
        with contextlib.suppress(Exception):
            while True:
                try:
                    return retried(store_of(location).look_up, seconds, self._end_of_retries)(location)
                except MemoryError:  # an image is decoded within bounds meanwhile
                    if time.monotonic() >= late or self._breaker.stop.wait(_SHORT_SECONDS):
                        raise
        return None

    def _end_of_retries(self, failure: Exception) -> None:
        if self._breaker.stop.is_set():
            raise failure

    def _send_notes(self) -> None:
        """Sends what is noted of stores; the thread that receives never sends, since then neither side might read."""
        while True:
            self._send(self._noted.get())

    def _send(self, message: Any) -> None:
        with self._sending:
            self._channel.send(message)

    def _prepare(self, work: Work, reads: deque[Read]) -> Prepared:
        prepared = Prepared([], {})
        for place in work.images:
            read = reads.popleft()
            try:
                found = self._fit(place, read, work)
                if isinstance(found, Failure):
                    prepared.failures[place] = found
                else:
                    prepared.fitted.append(found)
            finally:
                self._ahead.done(read)
                self._lock(fcntl.LOCK_UN)  # once its pixels are freed: who waits measures what is free
        return prepared

    def _read(self, read: Read) -> EncodedImage | Failure:
        return read_image(read, self._limits.max_file_bytes, self._breaker)

    def _take(self, read: Read) -> EncodedImage | Failure:
        """Waits for an image; reads it again if its memory was short because another image was decoded within bounds."""
        try:
            return self._read(read) if isinstance(read.result.exception(), MemoryError) else read.result.result()
        except MemoryError:
            return Failure("decode", "no_room", "the process had no memory for the bytes of the image, nor when it read it again")

    def _fit(self, place: int, read: Read, work: Work) -> Fitted | Failure:
        """Waits for an image, and fits it; tells a lack of memory at this moment from an image that takes too much."""
        image = self._take(read)
        if isinstance(image, Failure):
            return image
        found: Fitted | Failure
        try:
            found = self._fit_within_bounds(place, image, work)
        except MemoryError:
            found = MORE_MEMORY
        if isinstance(found, Fitted):
            return found
        needed_bytes, room_bytes = bytes_for(len(image.content)), MEMORY.room_bytes(os.getppid())
        if found == MORE_MEMORY and room_bytes < needed_bytes:
            found = _no_room("a file whose decoding may take", needed_bytes, room_bytes).failure
        return replace(found, generation=image.ref.generation)

    def _fit_within_bounds(self, place: int, image: EncodedImage, work: Work) -> Fitted | Failure:
        """Decodes and fits an image into the shared memory, and makes its thumbnail, if it gets one."""
        began, content, limits, to = time.monotonic(), image.content, self._limits, work.model_input
        out = None if to.resize == "none" or to.tiles else self._pixels(work.slot, place, (*to.input_hw, 3))
        thumbnail = b""
        with bounded(most_seconds(limits.max_pixels), len(content)):
            fitted = fit(content, to, limits.max_pixels, scaled_decode=limits.scaled_decode, room=self._room, out=out)
            if isinstance(fitted, Failure):
                return fitted
            decoded, pixels = fitted
            if work.sample_below and identity_hash(image.ref.identity) < work.sample_below:
                thumbnail = make_thumbnail(decoded)
        if out is None and not to.tiles:
            self._pixels(work.slot, 0, pixels.shape)[:] = pixels
        decode_s, ref, (height, width, _) = time.monotonic() - began, image.ref, pixels.shape
        times = image.read_seconds, decode_s, image.received_at
        done = Fitted(place, decoded.image_wh, (height, width), *times, ref.generation, thumbnail)
        return self._cut(done, pixels, work) if to.tiles else done

    def _cut(self, fitted: Fitted, pixels: np.ndarray, work: Work) -> Fitted:
        """Cuts an image into tiles, in portions that take turns in the halves of the slot; sends all portions but the last."""
        to, tiles = work.model_input, work.model_input.tiles_of(fitted.image_wh)
        portions = [tiles[n : n + work.most_tiles] for n in range(0, len(tiles), work.most_tiles)]
        for number, portion in enumerate(portions):
            if number >= 2:
                self._used.get()
            began, first = time.monotonic(), number * work.most_tiles
            hw = to.input_hw if to.resize != "none" else portion[0].wh[::-1]
            out = self._pixels(work.slot, number % 2, (work.most_tiles, *hw, 3))
            try:
                with time_bounded(most_seconds(self._limits.max_pixels)):
                    for tile, where in zip(portion, out, strict=False):
                        fit_tile(pixels, tile, to, where)
            except MemoryError as err:  # ends this process, as other portions may be in the model
                raise RuntimeError("memory is short while the tiles of an image are cut") from err
            decode_s = fitted.decode_s + time.monotonic() - began
            fitted = replace(fitted, pixels_hw=hw, decode_s=decode_s, first_tile=first, tiles=len(portion))
            if following := len(portions) - number - 1:
                self._send(Portion(fitted, following))
        return fitted

    def _pixels(self, slot: int, place: int, shape: tuple[int, ...]) -> np.ndarray:
        size = math.prod(shape)
        return self._memory.view(slot, (place + 1) * size)[place * size :].reshape(shape)

    @contextlib.contextmanager
    def _room(self, needed_bytes: float, wh: Size, seconds: float) -> Iterator[None]:
        """Takes memory and time for decoding, until the image is done; waits until the job has room for a large image."""
        if seconds > most_seconds(self._limits.max_pixels):
            bound_time(seconds)
        if needed_bytes <= ANY_ROOM:
            yield
            return
        limit_memory(needed_bytes)
        with clock_stopped():
            room_bytes = self._wait_for_room(needed_bytes)
        if needed_bytes > room_bytes:
            raise _no_room(f"{wh[0]} x {wh[1]} pixels that take", needed_bytes, room_bytes)
        yield

    def _wait_for_room(self, needed_bytes: float) -> float:
        """Waits for a process's share of the job's memory, or for all of it where that is too little; returns what there is."""
        self._lock(fcntl.LOCK_EX, 1, _TURN)  # an image that waits for all comes before those that ask later
        self._lock(fcntl.LOCK_SH, 1, _ROOM)
        room_bytes = MEMORY.room_bytes(os.getppid())
        if needed_bytes > room_bytes / self._limits.processes:
            self._lock(fcntl.LOCK_EX, 1, _ROOM)
            room_bytes = MEMORY.room_bytes(os.getppid())
        self._lock(fcntl.LOCK_UN, 1, _TURN)
        return room_bytes


def _no_room(what: str, needed_bytes: float, room_bytes: float) -> ImageError:
    """The error for an image for which memory has no room at this moment."""
    most = f"the {max(room_bytes, 0) / 1e6:.0f} MB of memory that are free now"
    message = f"expected an image that fits into {most}, got {what} {needed_bytes / 1e6:.0f} MB to decode"
    return ImageError("decode", "no_room", message)
