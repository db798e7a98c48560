"""Messages in and out of Pub/Sub, so that nothing is acknowledged before it is answered.

`ReadMessages` is a splittable DoFn: it takes what was pulled, yields it, and acknowledges in the *bundle finalizer*, when the
runner has committed everything that was fused with it. `PublishMessages` waits in `finish_bundle` until Pub/Sub has its
messages. Where a runner fuses the two (Prism does, as long as no shuffle, flatten or side input stands between), a message is
acknowledged only after its answers are published, whenever the process dies.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.io.iobase import RestrictionProgress, RestrictionTracker
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Duration, Timestamp

from pipeline.stream.intake import is_lost_connection, one_line, shared_intake, stop_event
from pipeline.stream.messages import Message, OutgoingMessage

_PULLERS = 2  # while one's images are detected and published, another's are read; and a huge request holds up one of them only
_STEP_BACK_SECONDS = 2.0
_IDLE_SECONDS = 0.5
_PUBLISH_LINE_SECONDS = 10.0
_MAX_OPEN_PUBLISHES = 1000

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class ReadMessages(beam.PTransform):
    """Reads a subscription with the project's own splittable source.

    Element out: `Message`, at the time of its arrival (so nothing is ever late). Unbounded, until `stop_event(job)` is set: then
    what was taken is finished, and the pipeline ends. At least once.

    Args:
      subscription: `projects/P/subscriptions/S`.
      job: Names this run; the stop event and what is in hand are kept by it.
      max_images: Most images (by what the messages name) in hand for each bundle, and waiting.
      max_bytes: The same in bytes of messages.
    """

    subscription: str
    job: str
    max_images: int = 128
    max_bytes: int = 64_000_000

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, begin: beam.pvalue.PBegin) -> beam.PCollection[Message]:
        """Wires the pullers."""
        return (
            begin
            | "Pullers" >> beam.Create(range(_PULLERS), reshuffle=False)
            | "Pull" >> beam.ParDo(_Pull(self)).with_output_types(Message)
        )


@dataclasses.dataclass
class ReadNative(beam.PTransform):
    """Reads a subscription with Beam's own source, for runners that replace it with their own (Dataflow).

    Element out: `Message`, at its publish time. Unbounded. At least once.

    Args:
      subscription: `projects/P/subscriptions/S`.
    """

    subscription: str

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, begin: beam.pvalue.PBegin) -> beam.PCollection[Message]:
        """Wires Beam's source, with attributes."""
        return (
            begin
            | "ReadFromPubSub" >> beam.io.ReadFromPubSub(subscription=self.subscription, with_attributes=True)
            | "ToMessages" >> beam.Map(_from_beam).with_output_types(Message)
        )


@dataclasses.dataclass
class PublishMessages(beam.PTransform):
    """Publishes to a topic; a bundle ends only when Pub/Sub has all of its messages.

    Element in: `OutgoingMessage`; nothing comes out. Bounded or unbounded. At least once: a bundle run again publishes again.
    A lost connection is waited for, with a line in the log every ten seconds.

    Args:
      topic: `projects/P/topics/T`.
    """

    topic: str

    def __post_init__(self) -> None:
        super().__init__()

    def expand(self, messages: beam.PCollection[OutgoingMessage]) -> beam.PCollection[None]:
        """Wires the publishing DoFn."""
        return messages | "Publish" >> beam.ParDo(_Publish(self.topic))


class _EndlessTracker(RestrictionTracker):
    """A restriction without an end that is split only by deferring what remains of it."""

    def __init__(self, turn: int):
        self._turn = turn
        self._deferred = False

    def current_restriction(self) -> int:
        return self._turn

    def try_claim(self, position: int) -> bool:
        return not self._deferred

    def try_split(self, fraction_of_remainder: float) -> tuple[int, int] | None:
        if fraction_of_remainder != 0 or self._deferred:
            return None
        self._deferred = True
        return self._turn, self._turn + 1

    def check_done(self) -> bool:
        return True

    def current_progress(self) -> RestrictionProgress:
        return RestrictionProgress(fraction=0.0)  # with amounts Beam would divide by a size that it may not know yet

    def is_bounded(self) -> bool:
        return False


class _Endless(RestrictionProvider):
    """Restrictions are counted turns."""

    def initial_restriction(self, element: int) -> int:
        return 1

    def create_tracker(self, restriction: int) -> _EndlessTracker:
        return _EndlessTracker(restriction)

    def restriction_size(self, element: int, restriction: int) -> int:
        return 1


class _Pull(beam.DoFn):
    """One turn: take what waits, yield it, acknowledge when the bundle is final, come again."""

    def __init__(self, settings: ReadMessages):
        self._subscription = settings.subscription
        self._job = settings.job
        self._bounds = (settings.max_images, settings.max_bytes)

    def setup(self) -> None:
        self._intake = shared_intake(self._job, self._subscription, connect_subscriber, *self._bounds)
        self._unfinished: set[str] = set()

    def start_bundle(self) -> None:
        self._turns = 0

    def teardown(self) -> None:
        self._intake.release(self._unfinished)  # of bundles that failed

    @beam.DoFn.unbounded_per_element()
    def process(
        self,
        puller: int,
        finalizer: Any = beam.DoFn.BundleFinalizerParam,
        tracker: Any = beam.DoFn.RestrictionParam(_Endless()),  # noqa: B008  how Beam's parameters are declared
        watermark: Any = beam.DoFn.WatermarkEstimatorParam(ManualWatermarkEstimator.default_provider()),  # noqa: B008
    ) -> Iterator[Any]:
        tracker.try_claim(tracker.current_restriction())
        arrival = Timestamp.of(time.time())
        if self._is_first_in_bundle():
            messages = self._intake.take(*self._bounds, wait_s=_IDLE_SECONDS)
            arrival = Timestamp.of(time.time())
            ids = [message.message_id for message in messages]
            self._unfinished.update(ids)
            finalizer.register(functools.partial(self._acknowledge, ids))
            for message in messages:
                yield TimestampedValue(message, arrival)
            again_after = Duration.of(0)
        else:
            again_after = Duration.of(_STEP_BACK_SECONDS * puller)
        watermark.set_watermark(arrival)
        if not stop_event(self._job).is_set():
            tracker.defer_remainder(again_after)

    def _is_first_in_bundle(self) -> bool:
        """Whether no other puller is in this bundle; those that are step back, to have bundles of their own beside it."""
        self._turns += 1
        return self._turns == 1

    def _acknowledge(self, ids: list[str]) -> None:
        self._intake.acknowledge(ids)
        self._unfinished.difference_update(ids)


class _Publish(beam.DoFn):
    def __init__(self, topic: str):
        self._topic = topic

    def start_bundle(self) -> None:
        self._publishing = Publishing()

    def process(self, message: OutgoingMessage) -> None:
        self._publishing.send(self._topic, message)

    def finish_bundle(self) -> None:
        self._publishing.wait()


class Publishing:
    """Messages on their way to Pub/Sub, for the length of a bundle."""

    def __init__(self) -> None:
        self._client = shared_publisher()
        self._open: list[tuple[str, OutgoingMessage, Any]] = []

    def send(self, topic: str, message: OutgoingMessage) -> None:
        """Hands a message to Pub/Sub; waits only when very many are on their way."""
        self._open.append((topic, message, self._client.publish(topic, message.data, **message.attributes)))
        if len(self._open) >= _MAX_OPEN_PUBLISHES:
            self.wait()

    def wait(self) -> None:
        """Waits until Pub/Sub has all of them."""
        for topic, message, future in self._open:
            _wait_published(self._client, topic, message, future)
        self._open = []


def _wait_published(client: Any, topic: str, message: OutgoingMessage, future: Any) -> None:
    """Waits until Pub/Sub has a message; publishes it again where the connection was lost.

    Raises:
      google.api_core.exceptions.GoogleAPICallError: Pub/Sub refuses the message or the topic.
    """
    started = time.monotonic()
    while True:
        try:
            future.result(timeout=_PUBLISH_LINE_SECONDS)
            return
        except concurrent.futures.TimeoutError:
            _log.warning("no answer from Pub/Sub for %.0f s while publishing to %s; waiting", time.monotonic() - started, topic)
        except Exception as err:
            if not is_lost_connection(err):
                raise
            _log.warning("lost Pub/Sub while publishing to %s (%s); publishing again", topic, one_line(err))
            future = client.publish(topic, message.data, **message.attributes)


def connect_subscriber() -> Any:
    """A subscriber client whose channel takes answers of any size (that for the emulator has gRPC's limit of 4 MB else)."""
    from google.cloud import pubsub_v1

    emulator = os.environ.get("PUBSUB_EMULATOR_HOST")
    if not emulator:
        return pubsub_v1.SubscriberClient()
    import grpc  # type: ignore[import-untyped]
    from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

    channel = grpc.insecure_channel(emulator, options=[("grpc.max_receive_message_length", -1)])
    return pubsub_v1.SubscriberClient(transport=SubscriberGrpcTransport(channel=channel))


@functools.lru_cache(maxsize=4)
def _publisher(emulator: str) -> Any:
    from google.cloud import pubsub_v1

    return pubsub_v1.PublisherClient(pubsub_v1.types.BatchSettings(max_bytes=1_000_000, max_latency=0.005, max_messages=100))


def shared_publisher() -> Any:
    """The publisher client of this process."""
    return _publisher(os.environ.get("PUBSUB_EMULATOR_HOST", ""))


def _from_beam(message: Any) -> Message:
    published = message.publish_time
    return Message(
        message.data,
        dict(message.attributes or {}),
        message.message_id or "",
        published.timestamp() if published else time.time(),
    )
