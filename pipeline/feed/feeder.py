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
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pipeline.errors import ModelError
from pipeline.failures import ImageError
from pipeline.feed.bounds import TIMED_OUT
from pipeline.feed.decode import most_seconds
from pipeline.feed.fit import ModelInput
from pipeline.feed.read_image import note_storage, store_name
from pipeline.feed.shared_memory import SharedMemory, size_of
from pipeline.feed.work import Coming, Fitted, Limits, Prepared, StopWaiting, StoreAnswers, StoreAway, StoreFails, Work
from pipeline.records import EncodedImage, Image, ImageRef
from pipeline.stats.process import PROCESS

# with this process's own path, not with the current folder; prctl(PR_SET_PDEATHSIG, SIGKILL): it ends with the job's thread
_CODE = """
import sys
sys.path[:] = {path!r}
import ctypes
ctypes.CDLL(None).prctl(1, 9)
from pipeline.feed.process import serve
serve({memory}, {locks})
"""
_ENVIRONMENT = {  # one arena, as more reserve memory; memory for pixels is kept, as the kernel clears each new page
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(16 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 20),
    "OPENBLAS_NUM_THREADS": "1",
}
_STARTS = 3  # failed ones in a row, after which the feeder gives up if no process is there
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 5.0  # after a failed start, doubled after each
_KEPT_BYTES = 64 << 20  # of a slot of images of any size; more is given back to the system
_THUMBNAIL_ONLY = ModelInput((800, 800), "letterbox", "darknet", 0)


@dataclasses.dataclass
class FedChunk:
    """Images that are ready for the model.

    Attributes:
      images: All images of the chunk.
      model_input: How they were fitted.
      pixels: `(n, H, W, 3) uint8`, in shared memory until `release`, of the images of `fitted`.
      fitted: These images.
      failures: Place in `images` -> why it has no pixels, of all other images.
      fed_at: When the chunk was ready, by the monotonic clock.
    """

    images: Sequence[Image]
    model_input: ModelInput
    pixels: np.ndarray
    fitted: list[Fitted]
    failures: dict[int, ImageError]
    fed_at: float
    _release: Callable[[], None] | None

    def release(self) -> None:
        """Lets other images have the shared memory, when nobody uses the pixels any more; further calls do nothing."""
        release, self._release = self._release, None
        if release:
            release()


class _Chunk:
    """Images that are not ready yet."""

    def __init__(self, images: Sequence[Image], to: ModelInput, sample_below: int):
        self.images = images
        self.to = to
        self.result: Future[FedChunk] = Future()
        self.slot = -1
        self.used_bytes = 0
        self.fitted: list[Fitted] = []
        self.failures: dict[int, ImageError] = {}
        self.singles: deque[int] = deque()  # places to try one by one, since a process died of the chunk
        self._sample_below = sample_below

    def next_work(self) -> Work:
        places = [self.singles[0]] if self.singles else range(len(self.images))
        return Work(self.slot, self.used_bytes, self.to, {place: self.images[place] for place in places}, self._sample_below)

    def add(self, part: Prepared) -> bool:
        """Adds what a process has prepared; returns whether that was all."""
        self.fitted += part.fitted
        self.failures |= part.failures
        self.used_bytes += sum(each.pixels_hw[0] * each.pixels_hw[1] * 3 for each in part.fitted)
        if self.singles:
            self.singles.popleft()
        return not self.singles

    def answered(self, part: Prepared) -> Iterable[str]:
        """An image of each store that has answered."""
        failed = {place for place, failure in part.failures.items() if failure.reason == "storage_unavailable"}
        asked = (image for place, image in self.next_work().images.items() if place not in failed)
        return {store_name(image.uri): image.uri for image in asked if isinstance(image, ImageRef)}.values()

    def process_died(self, failure: ImageError) -> bool:
        """Blames the image that was tried alone, if one was; returns whether nothing is left to try."""
        if not self.singles:
            self.singles.extend(range(len(self.images)))
            return False
        self.failures[self.singles.popleft()] = failure
        return not self.singles


class _Process:
    """One feeder process, as the job sees it."""

    def __init__(self, memory: int, locks: int):
        ours, its = socket.socketpair()
        for end in (ours, its):
            end.settimeout(None)  # Beam's sign-in at Google sets a default for all sockets
        self._channel = Connection(ours.detach())
        try:
            with its:
                self._process = subprocess.Popen(  # noqa: S603  a command of ours
                    [sys.executable, "-c", _CODE.format(path=sys.path, memory=memory, locks=locks)],
                    stdin=its.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # decoders print
                    env=os.environ | _ENVIRONMENT,
                    pass_fds=(memory, locks),
                    start_new_session=True,  # Ctrl-C is for the job
                )
        except OSError:  # as for want of memory or of processes at this moment
            self._channel.close()
            raise
        self.pid = self._process.pid
        self.chunks: deque[_Chunk] = deque()  # in the order in which it works at them
        self.is_ready = False

    def start(self, chunk: _Chunk) -> None:
        """Sends the work of a chunk, after that of those before it."""
        self.chunks.append(chunk)
        work = chunk.next_work()
        if size := sum(len(image.content) for image in work.images.values() if isinstance(image, EncodedImage)):
            self.send(Coming(size))
        self.send(work)

    def send(self, message: Any) -> None:
        """Sends a message; that a process has died, its channel tells the one who receives from it."""
        with contextlib.suppress(OSError):
            self._channel.send(message)

    def messages(self) -> Iterator[Any]:
        with contextlib.suppress(OSError, EOFError):
            while True:
                yield self._channel.recv()

    def kill(self) -> None:
        self._process.kill()

    def bury(self) -> int:
        """Frees what is left of a process that has ended, or closed its channel; returns its exit code."""
        self._channel.close()
        self._process.kill()
        return self._process.wait()


class Feeder:
    """Processes that read, decode and fit images; thread-safe.

    A thread for each process starts it, takes its messages, and starts another one in its place when it dies. The processes
    start at once, and import what they need, while the model loads; `open` lets them work.

    Args:
      processes: How many.

    Attributes:
      processes: The same.
      slots: Most chunks in work, ready, or in the model at once.
      waits: Whether images of messages wait for a store that is away.
    """

    def __init__(self, processes: int):
        self.processes = processes
        self.slots = self._most_chunks = 0
        self.waits = True
        self._limits: Limits | None = None
        self._descriptor, self._locks = os.memfd_create("feeder"), os.memfd_create("locks")
        self._memory = SharedMemory(self._descriptor)
        self._free: list[int] = []
        self._waiting: deque[_Chunk] = deque()
        self._running: list[_Process] = []
        self._failed_starts = 0
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._lock = threading.RLock()  # of all of these
        self._threads = [threading.Thread(target=self._tend, name=f"feeder {n}", daemon=True) for n in range(processes)]
        for thread in self._threads:
            thread.start()

    def open(self, limits: Limits, slots: int, most_chunks: int = 2) -> None:
        """Lets the processes work, within these limits, on so many chunks at once.

        Args:
          limits: The limits.
          slots: See `Feeder`.
          most_chunks: Most chunks of one process: it works at the first, and reads the images of the others meanwhile.
        """
        with self._lock:
            os.ftruncate(self._descriptor, size_of(slots))
            self._limits, self.slots, self._free = limits, slots, list(range(slots))
            self._most_chunks = most_chunks
            self._tell_all(limits)
            self._hand_out()

    def start(self, images: Sequence[Image], to: ModelInput, sample_below: int = 0) -> Future[FedChunk]:
        """Starts on a chunk of images; they are in work once a slot is free.

        Args:
          images: At least one; a single one for a model that takes images of any size.
          to: How they are fitted.
          sample_below: An image whose identity has a smaller hash gets a thumbnail.

        Returns:
          The future of the chunk. It raises `AwayError` if the images' store is away, and `ModelError` after `close`.
        """
        chunk = _Chunk(images, to, sample_below)
        with self._lock:
            if self._failure:
                chunk.result.set_exception(self._failure)
            else:
                self._waiting.append(chunk)
                self._hand_out()
        return chunk.result

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
        try:
            while not self._failure:
                try:
                    process = self._start_process()
                except OSError as err:
                    with self._lock:
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
                    self._note_death(process, code)
        except BaseException as err:  # noqa: BLE001  the futures pass it on
            self._fail(err)

    def _start_process(self) -> _Process:
        self._ended.wait(min(_PAUSE_SECONDS * 2**self._failed_starts, _LONGEST_PAUSE_SECONDS) if self._failed_starts else 0)
        process = _Process(self._descriptor, self._locks)
        with self._lock:
            self._running.append(process)
            if self._failure:
                process.kill()
            if self._limits:
                process.send(self._limits)
                if not self.waits:
                    process.send(StopWaiting())
            self._hand_out()
        return process

    def _hand_out(self) -> None:
        """Gives waiting chunks, the oldest first, to the processes with the fewest."""
        while self._waiting and self._running and (self._free or self._waiting[0].slot >= 0):
            process = min(self._running, key=lambda each: len(each.chunks))
            if len(process.chunks) >= self._most_chunks:
                return
            chunk = self._waiting.popleft()
            if chunk.slot < 0:
                chunk.slot = self._free.pop()
                PROCESS.parts["read"].begin(len(chunk.images))
            try:
                process.start(chunk)
            except BaseException as err:  # noqa: BLE001  half a message may have gone; the futures pass it on
                self._fail(err)

    def _take(self, process: _Process, message: Any) -> None:
        """Takes a message of a process; the chunk that it works at is its first one."""
        if self._failure:
            return
        if isinstance(message, Prepared):
            chunk = process.chunks[0]
            if "storage" in PROCESS.failing:  # perhaps a process waits for a store that has answered this one
                for uri in chunk.answered(message):
                    self._tell_all(StoreAnswers(uri))
            is_whole = chunk.add(message)
            if is_whole:
                self._finish(chunk)  # before it goes: `_fail` reaches the chunks that are there
            process.chunks.popleft()
            if not is_whole:
                process.start(chunk)  # behind a chunk that the process has already
        elif isinstance(message, StoreFails):
            note_storage(*message)
        elif isinstance(message, StoreAway):
            chunk = process.chunks.popleft()
            PROCESS.parts["read"].end(len(chunk.images))
            self._free.append(chunk.slot)
            chunk.result.set_exception(message.error)
        else:
            process.is_ready = True
            self._failed_starts = 0

    def _tell_all(self, message: Any) -> None:
        for process in self._running:
            process.send(message)

    def _note_death(self, process: _Process, code: int) -> None:
        """Blames the image that a process died of, if it was tried alone; other processes go on with its chunks."""
        if self._failure:
            return
        PROCESS.failing.pop("storage", None)  # what it knew of a store is lost; one that still fails is noted again
        self._running.remove(process)
        failure = _death(code, self._limits)
        if process.chunks and process.is_ready and process.chunks[0].process_died(failure):
            self._finish(process.chunks[0])
            process.chunks.popleft()
        self._waiting.extendleft(reversed(process.chunks))
        if process.is_ready:
            self._hand_out()
        else:
            self._note_failed_start(str(failure))

    def _note_failed_start(self, why: str) -> None:
        """Counts a start that failed; others are there, or the next one may succeed."""
        self._failed_starts += 1
        if self._failed_starts >= _STARTS and not self._running:
            raise ModelError(f"the processes that decode images do not start: {why}")

    def _finish(self, chunk: _Chunk) -> None:
        shape = (len(chunk.fitted), *(chunk.fitted[0].pixels_hw if chunk.fitted else (0, 0)), 3)
        pixels = self._memory.view(chunk.slot, chunk.used_bytes).reshape(shape)
        slot, is_kept = chunk.slot, chunk.to.resize != "none" or chunk.used_bytes <= _KEPT_BYTES

        def release() -> None:
            with self._lock:
                if not is_kept:
                    self._memory.free(slot)
                self._free.append(slot)
                self._hand_out()

        PROCESS.parts["read"].end(len(chunk.images))
        chunk.result.set_result(FedChunk(chunk.images, chunk.to, pixels, chunk.fitted, chunk.failures, time.monotonic(), release))

    def _fail(self, failure: BaseException) -> None:
        """Fails all chunks, now and later, and kills the processes."""
        with self._lock:
            if self._failure:
                return
            self._failure = failure
            self._ended.set()
            for process in self._running:
                process.kill()
            chunks = [*(chunk for process in self._running for chunk in process.chunks), *self._waiting]
            PROCESS.parts["read"].end(sum(len(chunk.images) for chunk in chunks if chunk.slot >= 0))
            for chunk in chunks:
                chunk.result.set_exception(failure)
            self._waiting.clear()


def _death(code: int, limits: Limits | None) -> ImageError:
    """Why a process ended."""
    if limits and -code in TIMED_OUT:
        most = f"{most_seconds(limits.max_pixels):g} s"
        message = f"expected at most {most} of decoding, got an image that takes longer; max_megapixels sets the limit"
        return ImageError("decode", "too_much_work", message)
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return ImageError("decode", "decoder_died", f"the process that decodes it ended with {how}")
