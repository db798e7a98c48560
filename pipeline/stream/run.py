"""One run of a stream: everything that its steps share in a process, made once, looked up here, closed at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from pipeline.config import Config
from pipeline.records import ImageRef
from pipeline.stats.worker_context import WorkerContext
from pipeline.storage.completion import UNKNOWN, Provenance
from pipeline.stream.archive import Archive
from pipeline.stream.clients import Publishing, connect_subscriber
from pipeline.stream.dedup_cache import Attempts, DedupCache
from pipeline.stream.delayed_acks import DelayedAcks
from pipeline.stream.live import LiveStats
from pipeline.stream.messages import Request
from pipeline.stream.monotonic import steady_time
from pipeline.stream.outgoing import OutgoingMessage
from pipeline.stream.request_aggregator import RequestAggregator
from pipeline.stream.subscriber import Subscriber
from pipeline.stream.threads import RunThreads

_OVERDUE_SECONDS = 0.25
_CLOSE_SECONDS = 1.0
_RECOVER_SECONDS = 60.0
_runs: dict[str, StreamRun] = {}
_registry = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Topics:
    """Where answers go.

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
    """What a run is made of; steps carry it to wherever they work.

    Attributes:
      name: Names the run: its archive files, and the one `StreamRun` of each process.
      subscription: Where messages come from.
      topics: Where answers go.
      in_process: Whether all steps work in the launcher's process. Then the launcher opens the run and closes it; elsewhere the
        first step that asks opens it, and it ends with its process.
      max_images: Most images (by what messages name) in one bundle, and as many waiting.
      max_bytes: The same in bytes of messages.
      answer_deadline_s: Longest time to a request's answer.
      deduplicate_s: How long an image is remembered.
      samples: How many annotated images the report will show.
      results: Folder of the archive and the dead letters; empty: nothing is written to files.
      archive_detections: Whether the rows of detections go there, too.
      window_s: Seconds of rows in one file there.
      shards: Files a window there.
      provenance: By what the rows there are made.
      finalizes_early: Whether the runner finalizes bundles before it is sure to hold them; see `pipeline.stream.delayed_acks`.
      worker_context: What workers elsewhere must reach before they begin.
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
    window_s: float = 60.0
    shards: int = 1
    provenance: Provenance = UNKNOWN
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
            int(stream.pull_mb * 1e6),
            stream.answer_deadline_s,
            stream.deduplicate_s,
            samples,
            results,
            bool(stream.archive),
            stream.archive_window_s,
            config.write.shards or 1,
            Provenance.of(config.as_dict(), model),
            finalizes_early,
            worker_context,
        )


class StreamRun:
    """The state of one run in this process; thread-safe.

    Attributes:
      settings: What it was made of.
      threads: Its threads, its stop event, and the failure that ends it.
      clock: Seconds since the epoch, as this machine has them; in a worker elsewhere, steady.
      figures: What it has counted.
      recent: The images that are under way, and what became of those of late.
      attempts: How attempts ended whose beginning runner state holds; None where all steps are in one process.
      answers: Its open requests; None where nobody wants answers by request.
      archive: Where its rows become files; None where that is not for this process to do.
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
                window_s=settings.window_s,
                shards=settings.shards,
                clock=clock,
                stop=self.threads.stop,
                provenance=settings.provenance,
            )
            self.threads.repeat("closing windows of the archive", self.archive.close_windows, _CLOSE_SECONDS)
            self.threads.repeat("looking after killed runs' archives", self.archive.recover, _RECOVER_SECONDS)

    @property
    def subscriber(self) -> Subscriber:
        """The messages in hand; pulling begins with the first step that asks for them."""
        with self._lock:
            if self._subscriber is None:
                bounds = self.settings.max_images, self.settings.max_bytes
                self._subscriber = Subscriber(self.settings.subscription, connect_subscriber, *bounds, self.threads)
            return self._subscriber

    def delayed_acks_of(self, puller: int) -> DelayedAcks:
        """What a puller has taken, on a runner that finalizes early."""
        with self._lock:
            return self._turns.setdefault(puller, DelayedAcks())

    def open_request(self, request: Request) -> None:
        """Begins to wait for the images of a request, where somebody wants its answer; until then its message is in hand."""
        if self.answers and request.wants_answer:
            if self._subscriber:
                self._subscriber.hold_ack(request.message_id)
            self.answers.open(request)

    def answered(self, published: Iterable[OutgoingMessage]) -> None:
        """Notes which messages have been answered: Pub/Sub has the answers."""
        if self._subscriber:
            self._subscriber.answered([message.answers for message in published if message.answers])

    def nack(self, ref: ImageRef) -> None:
        """Leaves an image without an outcome: its message stays in hand, and comes again when the run is over."""
        self.figures.add_given_back()
        if self._subscriber:
            self._subscriber.hold_ack(ref.message_id)

    def stop(self) -> None:
        """Ends subscriber; what is in hand is still finished."""
        self.threads.stop.set()

    def close(self) -> None:
        """Ends the run's threads, and gives back what is in hand still."""
        self.stop()
        if self._subscriber:
            self._subscriber.end_pulling()
        self.threads.close()  # so the last answers are published, or not, before their messages are given back
        if self._subscriber:
            self._subscriber.close()
        if self.archive:
            self.archive.finish()

    def _answer_overdue(self) -> None:
        """Answers requests whose time is over. Where Pub/Sub refuses an answer for good, so it would in a step: the job ends."""
        assert self.answers is not None  # noqa: S101  started only with them
        while not self.threads.closed.wait(_OVERDUE_SECONDS):
            late = self.answers.overdue()
            if late:
                publishing = Publishing()
                for answer in late:
                    publishing.send(self.settings.topics.answers, answer)
                publishing.wait()
                self.answered(late)


@contextlib.contextmanager
def opened(settings: RunSettings, clock: Callable[[], float] = time.time) -> Iterator[StreamRun]:
    """Opens a run for the length of a block."""
    run = StreamRun(settings, clock)
    with _registry:
        _runs[settings.name] = run
    try:
        yield run
    finally:
        with _registry:
            del _runs[settings.name]
        run.close()


def run_of(settings: RunSettings) -> StreamRun:
    """The run of this process.

    Raises:
      LookupError: All steps work in the launcher's process, and the launcher has closed the run.
      UserError: This process is elsewhere, and does not reach what it needs.
    """
    with _registry:
        if settings.name not in _runs:
            if settings.in_process:
                raise LookupError(f"the run {settings.name} is over")
            run = StreamRun(settings, steady_time)
            if settings.worker_context:
                settings.worker_context.check_worker(run.figures.told)
            _runs[settings.name] = run
        return _runs[settings.name]
