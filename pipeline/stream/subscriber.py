"""A Pub/Sub subscriber that leases messages: it pulls ahead, extends deadlines, and acknowledges.

A thread pulls up to a bound of images and bytes, so the next messages wait here while the detector works, and a backlog stays in
Pub/Sub. Another thread extends the deadlines of held messages until they are acknowledged or released. After a process has died,
Pub/Sub delivers its messages again within `EXTEND_SECONDS`. Those of its last four seconds, and an answer that is lost on its way
here, come again after the subscription's own deadline.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from google.api_core import exceptions, retry

from pipeline.limits import MEMORY
from pipeline.process import PROCESS
from pipeline.stream.clients import connect_subscriber, is_lost_connection, one_line
from pipeline.stream.messages import Message, image_count
from pipeline.stream.threads import RunThreads

PULL_IMAGES = 128  # most images of messages, pulled ahead and in one bundle
PULL_BYTES = 64_000_000  # of messages, pulled ahead and in one bundle
EXTEND_SECONDS = 20
_EXTEND_EVERY_SECONDS = 4.0  # a subscription's own deadline can be as short as 10 s
_PULL_SECONDS = 1.0  # a job takes so much longer to end, since it waits for its last pull
_PULL_MESSAGES = 200
_FIRST_PULL_MESSAGES = 10
_IDS_PER_CALL = 1000  # ack ids of ~200 bytes against a limit of 512 kB a call
_AGAIN_SECONDS = 2.0  # while the connection is lost
_RETRY = retry.Retry(predicate=is_lost_connection, initial=0.5, maximum=10.0, timeout=60.0)

_log = logging.getLogger(__name__)


class Subscriber:
    """Pulls messages ahead and holds their leases; thread-safe. It connects and begins with the first `pull`.

    Args:
      subscription: Full name.
      max_images: Most images that a bundle takes; pulling pauses while as many wait.
      max_bytes: Most bytes, likewise.
      threads: The run's threads. `stop` ends pulling; messages that no step has taken are released.
    """

    def __init__(self, subscription: str, max_images: int, max_bytes: int, threads: RunThreads):
        self._subscription = subscription
        self._client: Any = None
        self._max_images, self._max_bytes = max_images, max_bytes
        self._threads, self._stop = threads, threads.stop
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Message, int]] = deque()  # with the number of its images
        self._ack_ids: dict[str, str] = {}  # of the messages that are held
        self._holds: Counter[str] = Counter()
        self._part = PROCESS.parts["subscriber"]
        self._mean_bytes = max_bytes / _FIRST_PULL_MESSAGES

    def pull(self, wait_s: float) -> list[Message]:
        """Returns waiting messages, or the first that comes within `wait_s`; one that exceeds the bounds comes alone.

        Each has one hold, which its bundle ends.

        Raises:
          google.api_core.exceptions.GoogleAPICallError: Pulling failed permanently.
          Exception: Another thread of the run failed.
        """
        self._threads.raise_failure()
        taken: list[Message] = []
        with self._changed:
            if self._client is None:
                self._client = connect_subscriber()
                self._threads.start("pulling", self._pull_ahead)
                self._threads.start("extending deadlines", self._keep_extending)
            self._changed.wait_for(lambda: self._waiting or self._stop.is_set(), wait_s)
            images = size = 0
            while self._waiting and not self._stop.is_set():
                message, its_images = self._waiting[0]
                images, size = images + its_images, size + len(message.data)
                if taken and (images > self._max_images or size > self._max_bytes):
                    break
                taken.append(message)
                self._waiting.popleft()
            self._part.end(len(taken))
            self._changed.notify_all()
        return taken

    def hold(self, message_ids: Iterable[str]) -> None:
        """Holds the acknowledgement of messages, once for each time that an id is named.

        Its row may not be durable yet, or another bundle may have an image of the request in progress. If the process dies before
        that ends, the message must be delivered again.
        """
        with self._changed:
            self._holds.update(each for each in message_ids if each in self._ack_ids)

    def end_hold(self, message_ids: Sequence[str]) -> None:
        """Ends holds, once for each time that an id is named; acknowledges messages without further holds."""
        with self._changed:
            self._holds.subtract(each for each in message_ids if each in self._ack_ids)
            done = [each for each in {*message_ids} if each in self._ack_ids and not self._holds[each]]
        self.acknowledge(done)

    def acknowledge(self, message_ids: Iterable[str]) -> None:
        """Acknowledges messages; if the call fails, Pub/Sub delivers them again."""
        self._call("acknowledge", self._forget(message_ids), retry=_RETRY)

    def release(self, message_ids: Iterable[str]) -> None:
        """Releases messages: Pub/Sub delivers them again at once."""
        self._call("modify_ack_deadline", self._forget(message_ids), ack_deadline_seconds=0)

    def release_all(self) -> None:
        """Releases all messages that a step has taken and that are not acknowledged."""
        with self._changed:
            waiting = {message.message_id for message, _ in self._waiting}
            taken = [message_id for message_id in self._ack_ids if message_id not in waiting]
        self.release(taken)

    def close(self) -> None:
        """Releases all held messages and closes the connection.

        The threads have ended: a pull that still waits would take the released messages, even on a closed connection, since
        Pub/Sub may not notice.
        """
        if self._client:
            self.release_all()
            self._client.close()

    def _pull_ahead(self) -> None:
        """Pulls until stopped, then releases what no step has taken; raises permanent failures, which end the job."""
        try:
            while not self._stop.is_set():
                try:
                    with PROCESS.parts["pull"].working(), contextlib.suppress(exceptions.DeadlineExceeded):  # no message came
                        self._pull_once()
                    PROCESS.failing.discard("Pub/Sub")
                except Exception as err:
                    if not is_lost_connection(err):
                        raise
                    if "Pub/Sub" not in PROCESS.failing:
                        _log.warning("lost Pub/Sub (%s); pulling again until it is back", one_line(err))
                    PROCESS.failing.add("Pub/Sub")
                    self._stop.wait(_AGAIN_SECONDS)
        finally:
            with self._changed:
                ids = [message.message_id for message, _ in self._waiting]
                self._part.end(len(ids))
                self._waiting.clear()
            self.release(ids)

    def _pull_once(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stop.is_set() or min(self._room()) > 0, timeout=1.0)
            images, size = self._room()
        if self._stop.is_set() or min(images, size) <= 0:
            return
        count = min(_PULL_MESSAGES, images, max(1, int(size / max(self._mean_bytes, 1.0))))
        answer = self._client.pull(subscription=self._subscription, max_messages=count, timeout=_PULL_SECONDS, retry=None)
        with self._changed:
            for received in type(answer).pb(answer).received_messages:  # its wrapper takes 56 us more a message
                self._take(received)
            self._changed.notify_all()

    def _room(self) -> tuple[int, float]:
        """How many images and bytes may be pulled ahead now."""
        images = sum(images for _, images in self._waiting)
        size = sum(len(message.data) for message, _ in self._waiting)
        return self._max_images - images, MEMORY.budget(self._max_bytes) - size

    def _take(self, received: Any) -> None:
        sent = received.message
        is_redelivery = sent.message_id in self._ack_ids
        self._ack_ids[sent.message_id] = received.ack_id  # it acknowledges all deliveries
        if is_redelivery:
            return
        message = Message(sent.data, dict(sent.attributes), sent.message_id, sent.publish_time.ToNanoseconds() / 1e9)
        self._holds[message.message_id] = 1
        self._waiting.append((message, image_count(message)))
        self._part.begin()
        self._mean_bytes += 0.1 * (len(message.data) - self._mean_bytes)

    def _keep_extending(self) -> None:
        while not self._threads.closed.wait(_EXTEND_EVERY_SECONDS):
            with self._changed:
                ack_ids = [*self._ack_ids.values()]
            self._call("modify_ack_deadline", ack_ids, ack_deadline_seconds=EXTEND_SECONDS)

    def _call(self, method: str, ack_ids: Sequence[str], **more: Any) -> None:
        """Calls a method of the client for these messages; a failure is logged only, since they are delivered again."""
        try:
            for start in range(0, len(ack_ids), _IDS_PER_CALL):
                ids = ack_ids[start : start + _IDS_PER_CALL]
                getattr(self._client, method)(subscription=self._subscription, ack_ids=ids, timeout=10, **more)
        except Exception as err:  # noqa: BLE001  also of a connection that is closed
            _log.warning("%s failed for %d messages, which may be delivered again: %s", method, len(ack_ids), one_line(err))

    def _forget(self, message_ids: Iterable[str]) -> list[str]:
        with self._changed:
            known = self._ack_ids.keys() & {*message_ids}
            for each in known:
                del self._holds[each]
            return [self._ack_ids.pop(each) for each in known]
