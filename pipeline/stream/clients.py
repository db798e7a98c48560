"""The Pub/Sub clients of this process, and the publishing of a bundle's messages."""

from __future__ import annotations

import functools
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from google.api_core import exceptions, retry

from pipeline.process import PROCESS
from pipeline.stream.messages import Message

_PERMANENT = (
    exceptions.NotFound,
    exceptions.Forbidden,
    exceptions.Unauthorized,
    exceptions.BadRequest,
    exceptions.MethodNotImplemented,
)
_RETRY_SECONDS = 600.0

_log = logging.getLogger(__name__)


class Publishing:
    """Publishes the messages of one bundle; the client publishes again while the connection is lost."""

    def __init__(self) -> None:
        self._client = shared_publisher()
        self._open: deque[tuple[Callable[[], Any], Any]] = deque()

    def send(self, topic: str, message: Message) -> None:
        """Begins to publish a message."""
        publish = functools.partial(self._client.publish, topic, message.data, **message.attributes)
        self._open.append((publish, publish()))

    def wait(self) -> None:
        """Waits until Pub/Sub has all messages.

        Raises:
          google.api_core.exceptions.GoogleAPICallError: Pub/Sub refuses a message or the topic.
        """
        with PROCESS.parts["publish"].working():
            while self._open:
                publish, future = self._open.popleft()
                if isinstance(future.exception(), exceptions.RetryError):  # the client keeps each error while it tries
                    self._open.append((publish, publish()))
                else:
                    future.result()


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


def shared_publisher() -> Any:
    """The publisher client of this process."""
    return _publisher(os.environ.get("PUBSUB_EMULATOR_HOST", ""))


@functools.lru_cache(maxsize=4)
def _publisher(emulator: str) -> Any:
    from google.cloud import pubsub_v1

    batches = pubsub_v1.types.BatchSettings(max_bytes=1_000_000, max_latency=0.005, max_messages=100)
    again = retry.Retry(is_lost_connection, initial=0.5, maximum=10.0, timeout=_RETRY_SECONDS, on_error=_publish_again)
    return pubsub_v1.PublisherClient(batches, pubsub_v1.types.PublisherOptions(retry=again))


def _publish_again(err: Exception) -> None:
    PROCESS.parts["publish"].progressed()
    _log.warning("lost Pub/Sub while publishing (%s); publishing again", one_line(err))


def is_lost_connection(err: BaseException) -> bool:
    """Whether an error of Pub/Sub is transient: anything but a wrong name, a missing permission or a wrong request.

    A connection that breaks is not always `ServiceUnavailable`; seen were `Unknown` ("Stream removed") and `Cancelled` as well.
    """
    return isinstance(err, (exceptions.GoogleAPICallError, exceptions.RetryError)) and not isinstance(err, _PERMANENT)


def one_line(err: BaseException) -> str:
    """An error of Google's clients, on one line."""
    return " ".join(str(getattr(err, "message", None) or err).split())[:300] or type(err).__name__
