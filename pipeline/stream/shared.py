"""The state that the steps of a stream share in one process, and the way of an acknowledgement.

    Pub/Sub ─> Subscriber.pull ─> ParseMessages ─> … ─> PublishResults ─> bundle finalizer ─> Subscriber.end_hold ─> Pub/Sub
               holds the          Answers.open          Archive.add       DelayedAcks         acknowledges a message
               message            holds it until        holds it until    adds a delay        when its last hold ends
                                  it is answered        rows are durable  on Flink

A message is acknowledged when all of these hold:

1. `Publishing.wait`: Pub/Sub has its messages. The bundle ends only then.
2. `DelayedAcks`: on a runner that finalizes early, one more checkpoint has begun; elsewhere the finalizer does not wait.
3. `Archive`: its rows are durable in shards.
4. `Answers`: its request, if it is one, is answered, perhaps by another bundle or at its deadline.

A message that is not acknowledged comes again, to the next run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator

import apache_beam as beam

from pipeline.config import Config
from pipeline.outcome.conclude import Conclusion
from pipeline.records import DeadLetter, DetectedImage, ImageRef
from pipeline.results.completion import UNKNOWN, RowVersion
from pipeline.results.run_folder import Run
from pipeline.stats.counted import COUNTED
from pipeline.stats.samples import REPORT_SAMPLES
from pipeline.stream.answers import Answers
from pipeline.stream.archive import Archive, RowWriter, no_reports
from pipeline.stream.dedup_cache import DedupCache
from pipeline.stream.delayed_acks import DelayedAcks
from pipeline.stream.outgoing import Outcome
from pipeline.stream.subscriber import PULL_BYTES, PULL_IMAGES, Subscriber
from pipeline.stream.threads import RunThreads
from pipeline.worker import WorkerContext

_MAX_FAILED = 100_000


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The settings of a run; steps carry them to their workers.

    Attributes:
      name: Names the run: its shards, and the one `StreamRun` of each process.
      config: The job.
      results: Folder of the archive and the dead letters; empty: no files are written.
      began: When it began, in seconds since the epoch.
      version: The model and settings that make its rows.
      finalizes_early: Whether the runner finalizes bundles before a checkpoint holds them; see `pipeline.stream.delayed_acks`.
      worker_context: What workers elsewhere must reach before they begin. There the first step that needs the run opens it, and
        it ends with its process. None: all steps are in the launcher's process, which opens and closes the run.
      end: What the reports of the run take, which workers elsewhere renew.
    """

    name: str
    config: Config = dataclasses.field(default_factory=Config)
    results: str = ""
    began: float = 0.0
    version: RowVersion = UNKNOWN
    finalizes_early: bool = False
    worker_context: WorkerContext | None = None
    end: Conclusion | None = None

    def __post_init__(self) -> None:
        """Leaves out what steps do not use, and which may be secret, such as a webhook."""
        object.__setattr__(self, "config", self.config.of_steps())

    @property
    def in_process(self) -> bool:
        """Whether all steps are in the launcher's process."""
        return self.worker_context is None

    @property
    def writer(self) -> RowWriter:
        """Writes the rows of its archive."""
        return RowWriter(Run(self.results, self.name, self.began), self.version)


class StreamRun:
    """The state of one run in this process; thread-safe.

    Attributes:
      settings: Its settings.
      threads: Its threads, its stop event, and the failure that ends it.
      subscriber: Has its messages; pulling begins with the first step that pulls.
      delayed_acks: The polls of each poller, on a runner that finalizes early.
      recent: The deduplication cache, if all steps are in one process.
      answers: Its open requests.
      archive: Writes its rows; None if another step does, or no files are wanted.
    """

    def __init__(self, settings: RunSettings, renew: Callable[[], object] = no_reports):
        stream = settings.config.stream
        self.settings = settings
        self.threads = RunThreads()
        COUNTED.samples = max(COUNTED.samples, settings.config.write.samples, REPORT_SAMPLES)
        self.archive: Archive | None = None
        self._failed: dict[str, bool] = {}
        subscription = settings.config.input[0] if settings.config.input else ""
        self.subscriber = Subscriber(subscription, PULL_IMAGES, PULL_BYTES, self.threads)
        self.delayed_acks: dict[int, DelayedAcks] = {}
        self.answers = Answers(stream.answer_topic, stream.answer_deadline_s, self.subscriber)
        self.recent = DedupCache(stream.deduplicate_s, self.answers.done)
        if stream.answer_topic:
            self.threads.start("answering", functools.partial(self.answers.keep_publishing, self.threads.closed))
        if settings.results and settings.in_process:
            self.archive = Archive(settings.writer, settings.config.write.window_s, self.threads, self.subscriber, renew=renew)
            self.threads.start("archiving", self.archive.keep_writing)
            self.threads.start("compacting", self.archive.keep_compacting)

    def end(self, result: DetectedImage | DeadLetter, row: bytes) -> None:
        """Notes what became of an image, and the row that answers all messages that asked for it."""
        ref, outcome = result.ref, Outcome(row if self.answers.topic else b"", isinstance(result, DeadLetter))
        if outcome.failed:
            if len(self._failed) >= _MAX_FAILED:
                self._failed.clear()
            self._failed[ref.uri] = True
        if not self.settings.in_process or (isinstance(result, DeadLetter) and result.stage == "message"):
            self.answers.done(ref, outcome)
        else:
            self.recent.done(ref, outcome)

    def forget_failure(self, ref: ImageRef) -> bool:
        """Whether the last attempt at an image failed in this process; forgets it, since the next attempt begins."""
        return self._failed.pop(ref.uri, False)

    def close(self) -> None:
        """Ends the threads, archives the last rows, and releases all messages that are not acknowledged.

        Raises:
          Exception: The last rows could not be archived; their messages are released, too.
        """
        self.threads.close()  # answers are published, or not, before their messages are released
        try:
            if self.archive:
                self.archive.finish()
        finally:
            self.subscriber.close()


_runs: dict[str, StreamRun] = {}  # of this process, by name
_opening = threading.Lock()


@contextlib.contextmanager
def opened(settings: RunSettings, renew: Callable[[], object] = no_reports) -> Iterator[StreamRun]:
    """Opens a run for the length of a block; `renew` is called after each window of its archive."""
    run = _runs[settings.name] = StreamRun(settings, renew)
    try:
        yield run
    finally:
        del _runs[settings.name]
        run.close()


def run_of(settings: RunSettings) -> StreamRun:
    """The run of this process.

    Raises:
      LookupError: All steps work in the launcher's process, and the launcher has closed the run.
      UserError: This process is remote, and cannot reach what it needs.
    """
    with _opening:
        if settings.name not in _runs:
            if settings.in_process:
                raise LookupError(f"the run {settings.name} is over")
            run = StreamRun(settings)
            if settings.worker_context:
                settings.worker_context.check_worker()
            _runs[settings.name] = run
        return _runs[settings.name]


class StreamStep(beam.DoFn):
    """A step that works with the run of its process, `self._shared`.

    Args:
      run: The stream's settings.
    """

    def __init__(self, run: RunSettings):
        self._run = run

    def setup(self) -> None:
        self._shared = run_of(self._run)
