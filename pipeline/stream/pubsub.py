"""`ReadMessages`: a splittable DoFn over a Pub/Sub subscription that acknowledges in the *bundle finalizer*.

The runner calls the finalizer when it has committed everything that is fused with this step. Local runners fuse it with
`PublishResults`, as long as no shuffle, flatten or side input stands between. Then a message is acknowledged only after its
results are published, whenever the process dies. `pipeline.stream.shared` draws this; `pipeline.stream.delayed_acks` is for
runners that finalize earlier.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.utils.timestamp import Duration

from pipeline.stream.delayed_acks import DelayedAcks
from pipeline.stream.messages import Message
from pipeline.stream.shared import RunSettings, StreamStep

# the in-memory runner has both in each of its bundles, and then two bundles side by side (`runners/in_memory.py`)
_POLLERS = 2  # while one's images are detected and published, another's are read; and a huge request holds up one of them only
_STEP_BACK_SECONDS = 2.0
_IDLE_SECONDS = 0.5
_NO_END = 1 << 62


@dataclasses.dataclass
class ReadMessages(beam.PTransform):
    """Reads a run's subscription. Element out: `Message`. Unbounded. At least once.

    The project's own source gives messages no event time, since no step has windows. When the run is stopped, what was taken is
    finished, and the pipeline ends.

    Args:
      run: The run whose subscription is read.
      native: Whether to read with Beam's own source, for runners that replace it with their own (Dataflow).
    """

    run: RunSettings
    native: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, begin: beam.pvalue.PBegin) -> beam.PCollection[Message]:
        """Wires Beam's source, with attributes, or the pollers."""
        if self.native:
            sent = begin | "ReadFromPubSub" >> beam.io.ReadFromPubSub(subscription=self.run.config.input[0], with_attributes=True)
            return sent | "ToMessages" >> beam.Map(_from_beam).with_output_types(Message)
        pollers = begin | "Pullers" >> beam.Create(range(_POLLERS), reshuffle=False)
        return pollers | "Pull" >> beam.ParDo(_Pull(self.run)).with_output_types(Message)


class _Tracker(OffsetRestrictionTracker):
    """The polls of a poller, by number; only what remains after a poll is split off."""

    def try_split(self, fraction_of_remainder: float) -> tuple[OffsetRange, OffsetRange] | None:
        return super().try_split(0) if fraction_of_remainder == 0 else None

    def is_bounded(self) -> bool:
        return False


class _Polls(RestrictionProvider):
    def initial_restriction(self, element: int) -> OffsetRange:
        return OffsetRange(1, _NO_END)

    def create_tracker(self, restriction: OffsetRange) -> _Tracker:
        return _Tracker(restriction)

    def restriction_size(self, element: int, restriction: OffsetRange) -> int:
        return 1


class _Pull(StreamStep):
    """One poll: take what waits, yield it, end its hold when the bundle is final, come again."""

    def start_bundle(self) -> None:
        self._is_first = True
        self._ends: Callable[[], None] | None = None

    def finish_bundle(self) -> None:
        if self._ends:
            self._ends()

    def teardown(self) -> None:
        if not self._run.in_process:  # a bundle failed, or the job ended; in one process the run is closed then
            self._shared.subscriber.release_all()

    @beam.DoFn.unbounded_per_element()
    def process(
        self,
        poller: int,
        finalizer: Any = beam.DoFn.BundleFinalizerParam,
        tracker: Any = beam.DoFn.RestrictionParam(_Polls()),  # noqa: B008  how Beam's parameters are declared
    ) -> Iterator[Message]:
        poll, again_s = tracker.current_restriction().start, 0.0
        if not tracker.try_claim(poll):
            return
        if self._is_first:
            self._is_first = False
            messages = self._shared.subscriber.pull(_IDLE_SECONDS)
            finalizer.register(self._finalizing(poller, poll, [message.message_id for message in messages]))
            yield from messages
        else:  # another poller is in this bundle; this one steps back, to have bundles of its own beside it
            again_s = _STEP_BACK_SECONDS * poller
        if self._shared.threads.stop.is_set():
            tracker.try_claim(_NO_END)  # nothing remains
        else:
            tracker.defer_remainder(Duration.of(again_s))

    def _finalizing(self, poller: int, poll: int, ids: list[str]) -> Callable[[], None]:
        """What to do with these messages when the bundle is final."""
        if not self._run.finalizes_early:
            return functools.partial(self._shared.subscriber.end_hold, ids)
        polls = self._shared.delayed_acks.setdefault(poller, DelayedAcks(self._shared.subscriber))
        this = polls.begin(poll, ids)
        self._ends = functools.partial(polls.end, this)
        return functools.partial(polls.finalize, this)


def _from_beam(message: Any) -> Message:
    published_at = message.publish_time.timestamp() if message.publish_time else time.time()
    return Message(message.data, dict(message.attributes or {}), message.message_id or "", published_at)
