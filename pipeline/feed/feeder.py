"""`Feeder` prepares images for a model in processes of its own, so that the process that detects never touches a pixel.

    start(images) -> waiting units of a few images -> processes read, decode and fit them into a slot of shared memory -> FedChunk
                                                                                                ^                      | release()
                                                                                                +----- free slots <----+

Names of images and their sizes travel; pixels do not. The images of a chunk lie one behind another in its slot, ready for the
model without a copy, and several processes fill it. A unit whose process dies is tried again image by image, so that exactly the
image at fault fails.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from pipeline.errors import ModelError
from pipeline.failures import Failure
from pipeline.feed.bounds import TIMED_OUT
from pipeline.feed.chunks import Chunk, FedChunk, Question, Unit
from pipeline.feed.decode import most_seconds
from pipeline.feed.feeder_process import FeederProcess
from pipeline.feed.fit import ModelInput
from pipeline.feed.read_image import note_storage
from pipeline.feed.shared_memory import SharedMemory, size_of
from pipeline.feed.work import (
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
)
from pipeline.process import PROCESS
from pipeline.records import Image
from pipeline.storage.store import FoundFile

_UNIT_IMAGES = 4  # at least, of larger chunks: each unit costs two messages
_ANY_SIZE_AHEAD = 2  # images of any size at a process: it works at one, and reads the next
_STARTS = 3  # failed ones in a row, after which the feeder gives up if no process is there
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 5.0  # after a failed start, doubled after each
_MOST_SLOTS = 4096
_KEPT_BYTES = 64 << 20  # of a slot of images of any size; more is given back to the system
_THUMBNAIL_ONLY = ModelInput((800, 800), "letterbox", "darknet", 0)


class Feeder:
    """Processes that read, decode and fit images; thread-safe.

    A thread for each process starts it, takes its messages, and starts another one in its place when it dies. The processes
    start at once, and import what they need, while the model loads; `open` lets them work.

    Args:
      processes: How many.

    Attributes:
      processes: The same.
      most_bytes: Most memory of pixels in work, ready, or in the model at once; two chunks always have room.
      waits: Whether images of messages wait for a store that is away.
    """

    def __init__(self, processes: int):
        self.processes = processes
        self.most_bytes = 0.0
        self.waits = True
        self._limits: Limits | None = None
        self._descriptor, self._locks = os.memfd_create("feeder"), os.memfd_create("locks")
        self._memory = SharedMemory(self._descriptor)
        os.ftruncate(self._descriptor, size_of(_MOST_SLOTS))
        self._free = list(reversed(range(_MOST_SLOTS)))  # the last one has been used last
        self._busy: set[int] = set()  # all other slots
        self._held: dict[int, int] = {}  # bytes that each slot keeps, also a free one
        self._any_size_bytes = 0  # of such an image, lately; 0: none is known yet
        self._waiting: deque[Unit] = deque()
        self._questions: deque[Question] = deque()  # that no process has
        self._numbers = itertools.count()
        self._retried: list[Unit] = []  # each by the process that takes the place of one that died of it
        self._running: list[FeederProcess] = []
        self._failed_starts = 0
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._lock = threading.RLock()  # of all of these
        self._threads = [threading.Thread(target=self._tend, name=f"feeder {n}", daemon=True) for n in range(processes)]
        for thread in self._threads:
            thread.start()

    def open(self, limits: Limits, most_bytes: float) -> None:
        """Lets the processes work.

        Args:
          limits: Of reading and decoding.
          most_bytes: See `Feeder`.
        """
        with self._lock:
            self._limits, self.most_bytes = limits, most_bytes
            self._tell_all(limits)
            self._hand_out()

    def images_ahead(self, to: ModelInput) -> int:
        """Most images at one process: it works at some, and reads the others meanwhile."""
        threads = self._limits.read_threads if self._limits else 1
        return _ANY_SIZE_AHEAD if to.is_any_size or to.tiles else _UNIT_IMAGES + 2 * threads

    def tiles_at_once(self, to: ModelInput, wanted: int) -> int:
        """How many tiles of an image are ready at once: as many as wanted, or as memory has room for in two images."""
        return max(1, min(wanted, int(self.most_bytes / (4 * 3 * math.prod(to.most_hw)))))

    def start(self, images: Sequence[Image], to: ModelInput, sample_below: int = 0, most_tiles: int = 1) -> Future[FedChunk]:
        """Starts on a chunk of images; they are in work once memory has room for their pixels.

        Args:
          images: At least one; exactly one for a model that takes images of any size, or if images are cut into tiles.
          to: How they are fitted.
          sample_below: An image whose identity has a smaller hash gets a thumbnail.
          most_tiles: The most tiles of a portion; there are two portions of an image in memory.

        Returns:
          The future of the chunk. It raises `AwayError` if the images' store is away, and `ModelError` after `close`.
        """
        chunk = Chunk(images, to, sample_below, most_tiles)
        with self._lock:
            if self._failure:
                chunk.result.set_exception(self._failure)
            else:
                self._waiting.append(Unit(chunk, range(len(images))))
                self._hand_out()
        return chunk.result

    def look_up(self, locations: Sequence[str], seconds: float) -> list[Future[list[FoundFile | None]]]:
        """Begins to ask stores for the sizes and generations of files, in all processes side by side.

        Args:
          locations: Paths or URIs.
          seconds: How long failures of a store are tried again.

        Returns:
          Futures of their parts, in their order; None stands for a file that could not be looked up.
        """
        size = -(-len(locations) // self.processes)
        parts = [locations[n : n + size] for n in range(0, len(locations), size or 1)]
        questions = [Question(LookUp(next(self._numbers), part, seconds)) for part in parts]
        with self._lock:
            if self._failure:
                for question in questions:
                    question.answer.set_exception(self._failure)
            else:
                self._questions.extend(questions)
                self._hand_out()
        return [question.answer for question in questions]

    def thumbnail(self, image: Image) -> bytes:
        """A thumbnail of an image; empty if it cannot be read or decoded any more."""
        fed = self.start([image], _THUMBNAIL_ONLY, sample_below=2**64).result()
        fed.release()
        return fed.fitted[0].thumbnail if fed.fitted else b""

    def stop_waiting(self) -> None:
        """Lets images whose store fails become dead letters at once, since the job ends."""
        with self._lock:
            self.waits = False
            self._tell_all(StopWaiting())

    def close(self) -> None:
        """Ends the processes; chunks in work fail."""
        self._fail(ModelError("the feeder is closed"))
        for thread in self._threads:
            thread.join()
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                os.close(self._locks)
            self._descriptor = -1

    def _tend(self) -> None:
        """Keeps one process running."""
        unit: Unit | None = None  # of which the last one died
        try:
            while not self._failure:
                try:
                    process = self._start_process(unit)
                except OSError as err:
                    with self._lock:
                        if unit:
                            self._retried.remove(unit)
                            self._waiting.appendleft(unit)  # for the processes that are there
                            unit = None
                            self._hand_out()
                        self._note_failed_start(str(err))
                    continue
                try:
                    for message in process.messages():
                        with self._lock:
                            self._take(process, message)
                            self._hand_out()
                finally:
                    with self._lock:  # nobody sends while the channel closes
                        code = process.bury()
                with self._lock:
                    unit = self._note_death(process, code)
        except BaseException as err:  # noqa: BLE001  the futures pass it on
            self._fail(err)

    def _start_process(self, unit: Unit | None) -> FeederProcess:
        """Starts a process; it is the one that tries a unit again, since others may be about to end, and not because of it."""
        self._ended.wait(min(_PAUSE_SECONDS * 2**self._failed_starts, _LONGEST_PAUSE_SECONDS) if self._failed_starts else 0)
        process = FeederProcess(self._descriptor, self._locks)
        with self._lock:
            self._running.append(process)
            if self._failure:
                process.kill()
            if self._limits:
                process.send(self._limits)
                if not self.waits:
                    process.send(StopWaiting())
            if unit:
                self._retried.remove(unit)
                process.start(unit)
            self._hand_out()
        return process

    def _hand_out(self) -> None:
        """Gives waiting questions to processes, and units, the oldest first, to those with the fewest images."""
        while self._questions and self._running and self._limits:
            asked_least = min(self._running, key=lambda each: len(each.asked))
            asked_least.ask(self._questions.popleft())
        while self._waiting and self._running and self._limits:
            unit, process = self._waiting[0], min(self._running, key=lambda each: each.images)
            chunk = unit.chunk
            if process.images >= self.images_ahead(chunk.to):
                return
            if chunk.slot < 0 and not self._take_slot(chunk):
                return
            self._waiting.popleft()
            if chunk.result.done():  # it has failed
                self._end(unit)
                continue
            if rest := unit.divided(self._fair_images(chunk)):
                self._waiting.appendleft(rest)
            if not unit.has_begun:
                unit.has_begun = True
                PROCESS.parts["read"].begin(len(unit.places))
            try:
                process.start(unit)
            except BaseException as err:  # noqa: BLE001  half a message may have gone; the futures pass it on
                self._fail(err)

    def _fair_images(self, chunk: Chunk) -> int:
        """A process's part of the images that may be handed out now, so that none takes all while others have nothing to do."""
        waiting = len(chunk.images) + sum(len(unit.places) for unit in self._waiting)
        free_bytes = max(self.most_bytes - sum(self._held[slot] for slot in self._busy), 0)
        with_room = len(chunk.images) + free_bytes / chunk.image_bytes
        return max(_UNIT_IMAGES, math.ceil(min(waiting, with_room) / len(self._running)))

    def _take_slot(self, chunk: Chunk) -> bool:
        """Takes the slot that was used last; False while memory has no room for the chunk's pixels."""
        is_unknown = chunk.to.is_any_size and not self._any_size_bytes
        if not self._free or (is_unknown and len(self._busy) >= 2):
            return False
        slot, needed = self._free[-1], self._any_size_bytes if chunk.to.is_any_size else len(chunk.images) * chunk.image_bytes
        held = sum(self._held.values()) + max(needed - self._held.get(slot, 0), 0)
        if held > self.most_bytes:
            idle = [each for each in self._free[:-1] if self._held.get(each)]
            held -= sum(map(self._forget, idle))  # of chunks of a model with another input
        if held > self.most_bytes and len(self._busy) >= 2:
            return False
        chunk.slot = self._free.pop()
        self._busy.add(slot)
        self._held[slot] = max(needed, self._held.get(slot, 0))
        return True

    def _give_back(self, slot: int) -> None:
        self._busy.discard(slot)
        self._free.append(slot)

    def _forget(self, slot: int) -> int:
        """Gives the memory of a free slot back to the system; returns how much that was."""
        held = self._held.pop(slot)
        self._memory.view(slot, held)
        self._memory.free(slot)
        return held

    def _take(self, process: FeederProcess, message: Any) -> None:
        """Takes a message of a process; the unit that it works at is its first one."""
        if self._failure:
            return
        if isinstance(message, Prepared):
            self._add(process, message)
        elif isinstance(message, Portion):
            self._deliver(process, message)
        elif isinstance(message, LookedUp):
            process.asked.pop(message.number).answer.set_result(message.found)
        elif isinstance(message, StoreFails):
            note_storage(*message)
        elif isinstance(message, StoreAway):
            unit = process.units.popleft()
            if not unit.chunk.result.done():
                unit.chunk.result.set_exception(message.error)
            self._end(unit)
        else:
            process.is_ready = True
            self._failed_starts = 0

    def _add(self, process: FeederProcess, prepared: Prepared) -> None:
        unit = process.units[0]
        if "storage" in PROCESS.failing:  # perhaps a process waits for a store that has answered this one
            for uri in unit.answered(prepared):
                self._tell_all(StoreAnswers(uri))
        is_whole = unit.add(prepared)
        if is_whole:
            self._end(unit)  # before it goes: `_fail` reaches the units that are there
        process.units.popleft()
        if not is_whole:
            process.start(unit)  # behind a unit that the process has already

    def _deliver(self, process: FeederProcess, portion: Portion) -> None:
        """Passes some tiles of an image on, which counts as read; the last ones end its unit."""
        unit = process.units[0]
        chunk, result = unit.chunk, unit.chunk.result
        if unit.has_begun:
            PROCESS.parts["read"].end(len(unit.places))
            unit.has_begun = False

        def release() -> None:
            with self._lock:
                if portion.following >= 2:  # the process waits for room for the second one of them
                    process.send(PortionUsed())

        chunk.is_begun, chunk.result = True, Future()
        pixels = self._tiles(chunk, portion.fitted)
        fitted, now = [portion.fitted] * portion.fitted.tiles, time.monotonic()
        result.set_result(FedChunk(chunk.images, chunk.to, pixels, fitted, {}, now, release, chunk.result))

    def _tell_all(self, message: Any) -> None:
        for process in self._running:
            process.send(message)

    def _note_death(self, process: FeederProcess, code: int) -> Unit | None:
        """Blames the image that a process died of, if it was tried alone; returns the unit to try again, if it died of one.

        Other processes go on with its other units.
        """
        if self._failure:
            return None
        PROCESS.failing.discard("storage")  # what it knew of a store is lost; one that still fails is noted again
        self._running.remove(process)
        failure = _death(code, self._limits)
        if process.units and process.is_ready and process.units[0].process_died(failure):
            self._end(process.units.popleft())
        unit = process.units.popleft() if process.units and process.is_ready else None
        self._retried += [unit] if unit else []
        self._waiting.extendleft(reversed(process.units))
        self._questions.extendleft(process.asked.values())
        if process.is_ready:
            self._hand_out()
        else:
            self._note_failed_start(str(failure))
        return unit

    def _note_failed_start(self, why: str) -> None:
        """Counts a start that failed; others are there, or the next one may succeed."""
        self._failed_starts += 1
        if self._failed_starts >= _STARTS and not self._running:
            raise ModelError(f"the processes that decode images do not start: {why}")

    def _end(self, unit: Unit) -> None:
        """Notes that nobody works at a unit any more; its chunk is ready with its last one."""
        chunk = unit.chunk
        PROCESS.parts["read"].end(len(unit.places) if unit.has_begun else 0)
        chunk.units -= 1
        if chunk.units:
            return
        if chunk.result.done():  # it has failed
            self._give_back(chunk.slot)
            return
        slot, fitted = chunk.slot, sorted(chunk.fitted, key=operator.attrgetter("place"))
        pixels = self._pixels(chunk, fitted)
        if chunk.to.tiles:
            fitted *= len(pixels)
        if chunk.to.is_any_size:
            self._held[slot] = max(pixels.nbytes, self._held[slot])
            self._any_size_bytes = max(pixels.nbytes, self._any_size_bytes * 9 // 10)

        def release() -> None:
            with self._lock:
                if chunk.to.is_any_size and self._held[slot] > _KEPT_BYTES:
                    self._forget(slot)
                self._give_back(slot)
                self._hand_out()

        chunk.result.set_result(FedChunk(chunk.images, chunk.to, pixels, fitted, chunk.failures, time.monotonic(), release))

    def _pixels(self, chunk: Chunk, fitted: Sequence[Fitted]) -> np.ndarray:
        """The pixels of the fitted images, without the gaps of those that failed."""
        if not fitted:
            return np.empty((0, *chunk.to.most_hw, 3), np.uint8)
        if chunk.to.tiles:
            return self._tiles(chunk, fitted[0])
        if chunk.to.resize == "none":
            height, width = fitted[0].pixels_hw
            return self._memory.view(chunk.slot, len(fitted) * height * width * 3).reshape(len(fitted), height, width, 3)
        pixels = self._memory.view(chunk.slot, len(chunk.images) * chunk.image_bytes)
        pixels = pixels.reshape(len(chunk.images), *chunk.to.input_hw, 3)
        for number, each in enumerate(fitted):
            if each.place != number:
                pixels[number] = pixels[each.place]
        return pixels[: len(fitted)]

    def _tiles(self, chunk: Chunk, fitted: Fitted) -> np.ndarray:
        """The pixels of the tiles that are ready, in the half of the slot that is theirs."""
        shape = (chunk.most_tiles, *fitted.pixels_hw, 3)
        half = math.prod(shape)
        halves = self._memory.view(chunk.slot, 2 * half).reshape(2, *shape)
        return halves[fitted.first_tile // chunk.most_tiles % 2, : fitted.tiles]

    def _fail(self, failure: BaseException) -> None:
        """Fails all chunks, now and later, and kills the processes."""
        with self._lock:
            if self._failure:
                return
            self._failure = failure
            self._ended.set()
            for process in self._running:
                process.kill()
            units = [*(unit for process in self._running for unit in process.units), *self._retried, *self._waiting]
            PROCESS.parts["read"].end(sum(len(unit.places) for unit in units if unit.has_begun))
            for unit in units:
                if not unit.chunk.result.done():
                    unit.chunk.result.set_exception(failure)
            self._waiting.clear()
            for question in [*(asked for process in self._running for asked in process.asked.values()), *self._questions]:
                question.answer.set_exception(failure)
            self._questions.clear()


def _death(code: int, limits: Limits | None) -> Failure:
    """Why a process ended."""
    if limits and -code in TIMED_OUT:
        most = f"{most_seconds(limits.max_pixels):g} s of decoding, or what its format and size take"
        message = f"expected at most {most}, got an image that takes longer"
        return Failure("decode", "too_much_work", message)
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Failure("decode", "decoder_died", f"the process that decodes it ended with {how}")
