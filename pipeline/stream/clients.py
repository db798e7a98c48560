"""The Pub/Sub clients of this process, and the publishing of a bundle's messages."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
from collections import deque
from concurrent.futures import Future
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
_REQUEST_MESSAGES = 1000  # the most that Pub/Sub takes
_REQUEST_BYTES = 1_000_000  # it takes 10 MB; a message that is larger goes alone

_log = logging.getLogger(__name__)


class Publishing:
    """Publishes the messages of one bundle, however long the connection is lost."""

    def __init__(self) -> None:
        self._publisher = shared_publisher()
        self._open: list[Future[None]] = []

    def send(self, topic: str, message: Message) -> None:
        """Begins to publish a message."""
        self._open.append(self._publisher.publish(topic, message))

    def wait(self) -> None:
        """Waits until Pub/Sub has all messages.

        Raises:
          google.api_core.exceptions.GoogleAPICallError: Pub/Sub refuses a message or the topic.
        """
        with PROCESS.parts["publish"].working():
            for request in self._open:
                request.result()
        self._open.clear()


class Publisher:
    """Publishes messages in few requests: those that come during a request are the next one; thread-safe.

    Google's publisher gives each message a future and locks, and each request threads and a timer: 0.1 ms of CPU time a message.

    Args:
      client: The client of the process.
    """

    def __init__(self, client: Any):
        self.client = client
        self._changed = threading.Condition()
        self._waiting: deque[_Request] = deque()
        threading.Thread(target=self._keep_publishing, name="publishing", daemon=True).start()

    def publish(self, topic: str, message: Message) -> Future[None]:
        """Begins to publish a message; the future is that of its request."""
        size = len(message.data)
        with self._changed:
            request = next((each for each in reversed(self._waiting) if each.topic == topic), None)
            if not request or len(request.messages) >= _REQUEST_MESSAGES or request.size_bytes + size > _REQUEST_BYTES:
                request = _Request(topic)
                self._waiting.append(request)
                self._changed.notify()
            request.messages.append(message)
            request.size_bytes += size
            return request.done

    def _keep_publishing(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                request = self._waiting.popleft()
            try:
                self._publish(request)
            except Exception as err:  # noqa: BLE001  raised where the bundle waits
                request.done.set_exception(err)
            else:
                request.done.set_result(None)

    def _publish(self, request: _Request) -> None:
        from google.pubsub_v1.types import PublishRequest

        content = PublishRequest.pb()(topic=request.topic)
        for message in request.messages:
            content.messages.add(data=message.data, attributes=message.attributes)
        again = retry.Retry(is_lost_connection, initial=0.5, maximum=10.0, timeout=_RETRY_SECONDS, on_error=_publish_again)
        while True:
            with contextlib.suppress(exceptions.RetryError):  # it keeps each error while it tries
                self.client.publish(PublishRequest.wrap(content), retry=again)
                return


@dataclasses.dataclass
class _Request:
    """Messages for a topic that go together."""

    topic: str
    messages: list[Message] = dataclasses.field(default_factory=list)
    size_bytes: int = 0
    done: Future[None] = dataclasses.field(default_factory=Future)


def connect_subscriber() -> Any:
    """A subscriber client."""
    from google.cloud import pubsub_v1

    return _connected(pubsub_v1.SubscriberClient, os.environ.get("PUBSUB_EMULATOR_HOST", ""))


def shared_publisher() -> Publisher:
    """The publisher of this process."""
    return _publisher(os.environ.get("PUBSUB_EMULATOR_HOST", ""))


@functools.lru_cache(maxsize=4)
def _publisher(emulator: str) -> Publisher:
    from google.pubsub_v1 import PublisherClient

    return Publisher(_connected(PublisherClient, emulator))


def _connected(client: Any, emulator: str) -> Any:
    """A client without a limit on message size; the default channel to an emulator has 4 MB."""
    if not emulator:
        return client()
    import grpc

    channel = grpc.insecure_channel(emulator, options=[("grpc.max_receive_message_length", -1)])
    return client(transport=client.get_transport_class("grpc")(channel=channel))


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
