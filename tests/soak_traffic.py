"""What a soak asks a stream for, and what the stream answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tests.emulators import PubSubEmulator
from tests.streaming_job import StreamingJob

_DAMAGED = 50  # one image in so many


class Feed:
    """Asks for new images at a steady rate, in a thread of its own: by URI, inline, and three in a request; some repeatedly.

    Attributes:
      images: URIs asked for.
      damaged: Of these, those that can have no row.
      requests: Ids of requests.
    """

    def __init__(self, job: StreamingJob, bucket: Any, content: bytes, rate: float):
        self.images: set[str] = set()
        self.damaged: set[str] = set()
        self.requests: set[str] = set()
        self._job, self._bucket, self._content, self._rate = job, bucket, content, rate
        self._numbers = itertools.count()

    def publish(self, left: threading.Event) -> None:
        """Publishes until `left` is set."""
        for number in itertools.count():
            made = len(self.images)
            self._job.publish((self._by_uri, self._inline, self._request)[number % 3]())
            if number % 10 == 9:
                self._job.publish(self._asked_for(self._last))
            if left.wait((len(self.images) - made) / self._rate):
                return

    def _by_uri(self) -> bytes:
        return self._upload().encode()

    def _inline(self) -> tuple[bytes, dict[str, str]]:
        name = f"inline-{next(self._numbers)}"
        self.images.add(f"inline:{name}")
        return self._content, {"name": name}

    def _request(self) -> bytes:
        return self._asked_for(*(self._upload() for _ in range(3)))

    def _asked_for(self, *uris: str) -> bytes:
        asked = f"request-{next(self._numbers)}"
        self.requests.add(asked)
        return json.dumps({"request_id": asked, "images": uris}).encode()

    def _upload(self) -> str:
        number = next(self._numbers)
        uri = f"gs://{self._bucket.name}/in/{number:06d}.png"
        damaged = number % _DAMAGED == 0
        self._bucket.blob(f"in/{number:06d}.png").upload_from_string(b"no image" if damaged else self._content)
        self._last = uri
        self.images.add(uri)
        self.damaged.update([uri] if damaged else [])
        return uri


class Received:
    """What a topic got, received in a thread of its own: for each image or request when messages came, by Pub/Sub's clock."""

    def __init__(self, emulator: PubSubEmulator, subscription: str, name: str):
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self.incomplete: set[str] = set()
        self._emulator, self._subscription, self._name = emulator, subscription, name

    def receive(self, left: threading.Event) -> None:
        """Receives until `left` is set."""
        from google.api_core import exceptions

        client = self._emulator.subscriber()
        while not left.is_set():
            with contextlib.suppress(exceptions.DeadlineExceeded, exceptions.ServiceUnavailable):
                answer = client.pull(subscription=self._subscription, max_messages=100, timeout=1)
                for received in answer.received_messages:
                    self._add(received.message)
                if ids := [received.ack_id for received in answer.received_messages]:
                    client.acknowledge(subscription=self._subscription, ack_ids=ids)

    def _add(self, message: Any) -> None:
        name = message.attributes[self._name]
        self.times[name].append(message.publish_time.timestamp())
        if b'"complete": false' in message.data[:200]:
            self.incomplete.add(name)

    def repeated(self) -> Iterator[tuple[float, float]]:
        """When each message came that repeats one, with the time of that one."""
        for times in self.times.values():
            yield from itertools.pairwise(sorted(times))
