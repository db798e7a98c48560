"""The state that the steps of a stream share in one process, and the way of an acknowledgement.

    Pub/Sub ─> Subscriber.pull ─> ParseMessages ─> … ─> PublishResults ─> bundle finalizer ─> Subscriber.finalize ─> Pub/Sub
               holds              │                     │                 │                   │
               the message        RequestAggregator     Archive.add       DelayedAcks         acknowledges what nobody
                                  .open holds its       holds it until    adds a delay        holds; the rest when the
                                  acknowledgement       rows are durable  on Flink            last hold ends

A message is acknowledged when all of these hold:

1. `Publishing.wait`: Pub/Sub has its messages. The bundle ends only then.
2. `DelayedAcks`: on a runner that finalizes early, one more checkpoint has begun; elsewhere the finalizer does not wait.
3. `Archive`: its rows are durable in shards.
4. `RequestAggregator`: its request, if it is one, is answered, perhaps by another bundle or at its deadline.

The first two make its bundle final; the `Subscriber` counts the holds of the others.

A message that is not acknowledged comes again, to the next run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from pipeline.config import Config
from pipeline.records import ImageRef
from pipeline.results.completion import UNKNOWN, RowVersion
from pipeline.stats.worker_context import WorkerContext
from pipeline.stream.archive import Archive
from pipeline.stream.clients import Publishing, connect_subscriber
from pipeline.stream.dedup_cache import Attempts, DedupCache
from pipeline.stream.delayed_acks import DelayedAcks
from pipeline.stream.live import LiveStats
from pipeline.stream.messages import Request
from pipeline.stream.outgoing import Outcome, OutgoingMessage
from pipeline.stream.request_aggregator import RequestAggregator
from pipeline.stream.subscriber import Subscriber
from pipeline.stream.threads import RunThreads

_OVERDUE_SECONDS = 0.25
_PULL_BYTES = 64_000_000  # of messages, pulled ahead and in one bundle
_BEGAN = time.time() - time.monotonic()


@dataclasses.dataclass(frozen=True)
class Topics:
    """Where a stream publishes.

    Attributes:
      detections: One message an image.
      dead_letters: One message a dead letter; empty: only files.
      answers: One message a request; empty: none.
    """

    detections: str
    dead_letters: str = ""
    answers: str = ""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The settings of a run; steps carry them to their workers.

    Attributes:
      name: Names the run: its shards, and the one `StreamRun` of each process.
      subscription: Where messages come from.
      topics: Where answers go.
      in_process: Whether all steps are in the launcher's process, which opens and closes the run. Elsewhere the first step that
        needs the run opens it, and it ends with its process.
      max_images: Most images that the messages of one bundle name, and as many waiting.
      max_bytes: The same in bytes of messages.
      answer_deadline_s: Longest time to a request's answer.
      deduplicate_s: How long an image is remembered.
      samples: How many annotated images the report will show.
      results: Folder of the archive and the dead letters; empty: no files are written.
      archive_detections: Whether detections are archived, too.
      window_s: Seconds of rows in one shard there.
      version: The model and settings that make these rows.
      view: Whether each shard has a view for people.
      finalizes_early: Whether the runner finalizes bundles before a checkpoint holds them; see `pipeline.stream.delayed_acks`.
      worker_context: What remote workers must reach before they begin.
    """

    name: str
    subscription: str = ""
    topics: Topics = Topics("")
    in_process: bool = True
    max_images: int = 128
    max_bytes: int = 64_000_000
    answer_deadline_s: float = 60.0
    deduplicate_s: float = 600.0
    samples: int = 0
    results: str = ""
    archive_detections: bool = False
    window_s: float = 10.0
    version: RowVersion = UNKNOWN
    view: bool = True
    finalizes_early: bool = False
    worker_context: WorkerContext | None = None

    @staticmethod
    def of(
        config: Config,
        name: str,
        *,
        in_process: bool,
        samples: int,
        results: str,
        model: tuple[str, str] = ("", ""),
        finalizes_early: bool = False,
        worker_context: WorkerContext | None = None,
    ) -> RunSettings:
        """The settings of a job's run; `model`: name and version, where they are known."""
        stream = config.stream
        return RunSettings(
            name,
            config.input[0],
            Topics(config.output, stream.dead_letter_topic, stream.answer_topic),
            in_process,
            stream.pull_images,
            _PULL_BYTES,
            stream.answer_deadline_s,
            stream.deduplicate_s,
            samples,
            results,
            bool(stream.archive),
            stream.archive_window_s,
            RowVersion.of(config.as_dict(), model),
            config.write.view,
            finalizes_early,
            worker_context,
        )


def steady_time() -> float:
    """Seconds since the epoch by the clock at this process's start, plus the monotonic seconds since.

    A clock that jumps and comes back would put the watermark hours ahead, and all later elements would be late.
    """
    return _BEGAN + time.monotonic()


class StreamRun:
    """The state of one run in this process; thread-safe.

    Attributes:
      settings: Its settings.
      threads: Its threads, its stop event, and the failure that ends it.
      clock: Seconds since the epoch by this machine's clock; in a remote worker `steady_time`.
      figures: Its statistics.
      recent: The deduplication cache.
      attempts: The failed attempts that runner state does not know; None if all steps are in one process.
      answers: Its open requests; None if there is no topic for answers.
      archive: Writes its rows; None if another step does, or no files are wanted.
    """

    def __init__(self, settings: RunSettings, clock: Callable[[], float] = time.time):
        self.settings = settings
        self.clock = clock
        self.threads = RunThreads()
        self._lock = threading.Lock()
        self._subscriber: Subscriber | None = None
        self._turns: dict[int, DelayedAcks] = {}
        self.figures = LiveStats(settings.samples)
        self.recent = DedupCache(settings.deduplicate_s)
        self.attempts = None if settings.in_process else Attempts()
        self.answers = RequestAggregator(settings.answer_deadline_s) if settings.topics.answers else None
        if self.answers:
            self.threads.start("answers that are overdue", self._answer_overdue)
        self.archive: Archive | None = None
        if settings.results and settings.in_process:
            self.archive = Archive(
                settings.results,
                settings.name,
                settings.window_s,
                self.threads,
                hold=self._hold_acks,
                end_hold=self._end_holds,
                version=settings.version,
                view=settings.view,
            )
            self.threads.start("archiving", self.archive.keep_writing)

    @property
    def subscriber(self) -> Subscriber:
        """The subscriber; pulling begins with the first step that needs it."""
        with self._lock:
            if self._subscriber is None:
                bounds = self.settings.max_images, self.settings.max_bytes
                self._subscriber = Subscriber(self.settings.subscription, connect_subscriber, *bounds, self.threads)
            return self._subscriber

    def delayed_acks_of(self, puller: int) -> DelayedAcks:
        """The turns of a puller, on a runner that finalizes early."""
        with self._lock:
            return self._turns.setdefault(puller, DelayedAcks())

    def open_request(self, request: Request) -> None:
        """Opens a request that wants an answer, and holds its message until that is published."""
        if self.answers and request.wants_answer:
            self._hold_acks([request.message_id])
            self.answers.open(request)

    def end_attempt(self, ref: ImageRef, outcome: Outcome, *, was_begun: bool) -> list[ImageRef]:
        """Ends the attempt at an image; returns the repeats that wait for its outcome.

        Args:
          ref: The image, and the message that asked for it.
          outcome: What became of it.
          was_begun: Whether deduplication has seen the image.
        """
        if self.attempts:
            self.attempts.end(ref, outcome.failed)
        return self.recent.done(ref, outcome) if was_begun else []

    def answered(self, published: Iterable[OutgoingMessage]) -> None:
        """Notes that these answers are published, so their requests may be acknowledged."""
        self._end_holds([message.answers for message in published if message.answers])

    def nack(self, ref: ImageRef) -> None:
        """Leaves an image without an outcome: its message is held, and delivered again after the run."""
        self.figures.add_given_back()
        self._hold_acks([ref.message_id])

    def _hold_acks(self, message_ids: Iterable[str]) -> None:
        if self._subscriber:
            self._subscriber.hold_acks(message_ids)

    def _end_holds(self, message_ids: Sequence[str]) -> None:
        if self._subscriber:
            self._subscriber.end_holds(message_ids)

    def stop(self) -> None:
        """Stops pulling; messages in progress are still finished."""
        self.threads.stop.set()

    def close(self) -> None:
        """Ends the threads, archives the last rows, and releases all messages that are not acknowledged.

        Raises:
          Exception: The last rows could not be archived; their messages are released, too.
        """
        self.stop()
        if self._subscriber:
            self._subscriber.end_pulling()
        self.threads.close()  # answers are published, or not, before their messages are released
        try:
            if self.archive:
                self.archive.finish()
        finally:
            if self._subscriber:
                self._subscriber.close()

    def _answer_overdue(self) -> None:
        """Publishes the answers of overdue requests; a permanent failure of Pub/Sub ends the job, as in a step."""
        assert self.answers is not None  # noqa: S101  started only with them
        while not self.threads.closed.wait(_OVERDUE_SECONDS):
            late = self.answers.overdue()
            if late:
                publishing = Publishing()
                for answer in late:
                    publishing.send(self.settings.topics.answers, answer)
                publishing.wait()
                self.answered(late)


class _Process:
    """Holds the one run of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.run: StreamRun | None = None


_PROCESS = _Process()


@contextlib.contextmanager
def opened(settings: RunSettings, clock: Callable[[], float] = time.time) -> Iterator[StreamRun]:
    """Opens a run for the length of a block."""
    run = StreamRun(settings, clock)
    _PROCESS.run = run
    try:
        yield run
    finally:
        _PROCESS.run = None
        run.close()


def run_of(settings: RunSettings) -> StreamRun:
    """The run of this process.

    Raises:
      LookupError: All steps work in the launcher's process, and the launcher has closed the run.
      UserError: This process is remote, and cannot reach what it needs.
    """
    with _PROCESS.lock:
        run = _PROCESS.run
        if run is None or run.settings.name != settings.name:
            if settings.in_process:
                raise LookupError(f"the run {settings.name} is over")
            run = StreamRun(settings, steady_time)
            if settings.worker_context:
                settings.worker_context.check_worker(run.figures.told)
            _PROCESS.run = run
        return run
