"""The Pub/Sub clients of this process, and the publishing of a bundle's messages."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
import time
from typing import Any

from google.api_core import exceptions

from pipeline.stats.process import PROCESS
from pipeline.stream.outgoing import OutgoingMessage

_PUBLISH_LINE_SECONDS = 10.0
_MAX_OPEN_PUBLISHES = 1000
_FOR_GOOD = (
    exceptions.NotFound,
    exceptions.Forbidden,
    exceptions.Unauthorized,
    exceptions.BadRequest,
    exceptions.MethodNotImplemented,
)

_log = logging.getLogger(__name__)


class Publishing:
    """Publishes the messages of one bundle."""

    def __init__(self) -> None:
        self._client = shared_publisher()
        self._open: list[tuple[str, OutgoingMessage, Any]] = []

    def send(self, topic: str, message: OutgoingMessage) -> None:
        """Begins to publish a message; waits only while very many are unconfirmed."""
        self._open.append((topic, message, self._client.publish(topic, message.data, **message.attributes)))
        if len(self._open) >= _MAX_OPEN_PUBLISHES:
            self.wait()

    def wait(self) -> None:
        """Waits until Pub/Sub has all messages."""
        if not self._open:
            return
        with PROCESS.parts["publish"].working():
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
            PROCESS.parts["publish"].progressed()  # the client tries again, and the line tells
            _log.warning("no answer from Pub/Sub for %.0f s while publishing to %s; waiting", time.monotonic() - started, topic)
        except Exception as err:
            if not is_lost_connection(err):
                raise
            _log.warning("lost Pub/Sub while publishing to %s (%s); publishing again", topic, one_line(err))
            PROCESS.parts["publish"].progressed()
            future = client.publish(topic, message.data, **message.attributes)


def connect_subscriber() -> Any:
    """A subscriber client without a limit on message size; the default channel to an emulator has 4 MB."""
    from google.cloud import pubsub_v1

    emulator = os.environ.get("PUBSUB_EMULATOR_HOST")
    if not emulator:
        return pubsub_v1.SubscriberClient()
    import grpc
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


def is_lost_connection(err: BaseException) -> bool:
    """Whether an error of Pub/Sub is transient: anything but a wrong name, a missing permission or a wrong request.

    A connection that breaks is not always `ServiceUnavailable`; seen were `Unknown` ("Stream removed") and `Cancelled` as well.
    """
    return isinstance(err, (exceptions.GoogleAPICallError, exceptions.RetryError)) and not isinstance(err, _FOR_GOOD)


def one_line(err: BaseException) -> str:
    """An error of Google's clients, on one line."""
    return " ".join(str(getattr(err, "message", None) or err).split())[:300] or type(err).__name__
