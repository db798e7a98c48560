"""One answer for each request, when its last image is done or at a deadline. Only for steps in one process.

A request is one message, even if others have its request id. Its message is held until its own answer is published, so after a
crash Pub/Sub delivers it again. A thread publishes the answers; whichever bundle ends the last image of a request.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from pipeline.failures import Failure
from pipeline.records import ImageRef, compact_bytes, dead_letter_row, ref_of
from pipeline.stream.clients import Publishing
from pipeline.stream.messages import Message, Request
from pipeline.stream.outgoing import Outcome, answer_message
from pipeline.stream.subscriber import Subscriber

_LOOK_SECONDS = 0.25


@dataclasses.dataclass
class _Open:
    request: Request
    missing: list[ImageRef]
    deadline: float
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)


class Answers:
    """The open requests of one run; thread-safe.

    Args:
      topic: Where answers are published; empty: there are none.
      deadline_s: After this time a request is answered; the answer names the images that are missing as failed.
      subscriber: Holds their messages.
      clock: Seconds, monotonic.
    """

    def __init__(self, topic: str, deadline_s: float, subscriber: Subscriber, clock: Callable[[], float] = time.monotonic):
        self.topic, self._deadline_s, self._subscriber, self._clock = topic, deadline_s, subscriber, clock
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._complete = threading.Event()

    def open(self, request: Request) -> None:
        """Begins to collect the outcomes of a request's images, if its sender wants an answer."""
        if not (self.topic and request.wants_answer):
            return
        refs = [*map(ref_of, request.images), *(letter.ref for letter in request.dead_letters)]
        self._subscriber.hold([request.message_id])
        with self._lock:
            self._open[request.message_id] = _Open(request, refs, self._clock() + self._deadline_s)

    def done(self, ref: ImageRef, outcome: Outcome) -> None:
        """Notes the outcome of an image for the message in `ref`."""
        with self._lock:
            opened = self._open.get(ref.message_id)
            asked = next((each for each in opened.missing if each.uri == ref.uri), None) if opened else None
            if not opened or not asked:
                return
            opened.missing.remove(asked)
            opened.outcomes.append(outcome)
            if not opened.missing:
                self._complete.set()

    def expect(self, ref: ImageRef) -> None:
        """Adds an image to what the message in `ref` asks for: a member of a container that it names."""
        with self._lock:
            if opened := self._open.get(ref.message_id):
                opened.missing.append(ref)

    def opened(self, container: ImageRef) -> None:
        """Notes that all members of a container are expected, and so the container itself no more."""
        with self._lock:
            opened = self._open.get(container.message_id)
            asked = next((each for each in opened.missing if each.uri == container.uri), None) if opened else None
            if opened and asked:
                opened.missing.remove(asked)
                if not opened.missing:
                    self._complete.set()

    def keep_publishing(self, closed: threading.Event) -> None:
        """Publishes answers until the run is over; the work of a thread."""
        while not closed.is_set():
            self._complete.wait(_LOOK_SECONDS)
            self.publish()
        self.publish()

    def publish(self) -> None:
        """Publishes the answers that are due, then ends the holds of their messages."""
        due = self.due()
        if due:
            publishing = Publishing()
            for answer in due.values():
                publishing.send(self.topic, answer)
            publishing.wait()
            self._subscriber.end_hold([*due])

    def due(self) -> dict[str, Message]:
        """Takes the answers that are complete or overdue, each by the id of its request's message."""
        self._complete.clear()  # what completes from here on sets it again
        with self._lock:
            now = self._clock()
            due = {asked: opened for asked, opened in self._open.items() if not opened.missing or opened.deadline <= now}
            for asked in due:
                del self._open[asked]
        return {asked: self._answer(opened) for asked, opened in due.items()}

    def _answer(self, opened: _Open) -> Message:
        late_by = Failure("answer", "deadline", f"not done within {self._deadline_s:g} s; its own message may still come")
        missing = [Outcome(compact_bytes(dead_letter_row(late_by.dead_letter(ref))), failed=True) for ref in opened.missing]
        return answer_message(opened.request.request_id, [*opened.outcomes, *missing], on_time=not missing)
