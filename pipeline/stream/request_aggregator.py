"""Request aggregator: one answer for each request of several images, when its last image is done or at a deadline.

At the deadline the answer names the missing images as failed.
Requests are kept in the process, like all of a local stream's state. A request is one message, even if others have its request
id. It is acknowledged when its own answer is published; until then Pub/Sub delivers it again after a crash.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import defaultdict
from collections.abc import Callable

from pipeline.failures import ImageError
from pipeline.records import ImageRef, dead_letter_row, row_bytes
from pipeline.stream.messages import Request
from pipeline.stream.outgoing import Outcome, OutgoingMessage, answer_message


@dataclasses.dataclass
class _Open:
    message_id: str
    request_id: str
    opened_at: float
    missing: defaultdict[str, list[ImageRef]] = dataclasses.field(default_factory=lambda: defaultdict(list))  # by URI
    left: int = 0
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)

    def answer(self, on_time: bool) -> OutgoingMessage:
        return answer_message(self.request_id, self.outcomes, on_time=on_time, answers=self.message_id)


class RequestAggregator:
    """Aggregates outcomes by request; thread-safe. Methods return the answers that are due now.

    Args:
      deadline_s: After this time a request is answered with the outcomes so far.
      clock: Seconds, monotonic.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic):
        self._deadline_s = deadline_s
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}

    def open(self, request: Request) -> None:
        """Begins to collect the outcomes of a request's images."""
        opened = _Open(request.message_id, request.request_id, self._clock())
        refs = [image if isinstance(image, ImageRef) else image.ref for image in request.images]
        for ref in (*refs, *(letter.ref for letter in request.dead_letters)):
            opened.missing[ref.uri].append(ref)
            opened.left += 1
        with self._lock:
            self._open[request.message_id] = opened

    def done(self, ref: ImageRef, outcome: Outcome) -> list[OutgoingMessage]:
        """Notes the outcome of an image for the message in `ref`."""
        with self._lock:
            opened = self._open.get(ref.message_id)
            if opened is None or not opened.missing[ref.uri]:
                return []
            opened.missing[ref.uri].pop()
            opened.left -= 1
            opened.outcomes.append(outcome)
            if opened.left:
                return []
            del self._open[ref.message_id]
            return [opened.answer(on_time=True)]

    def overdue(self) -> list[OutgoingMessage]:
        """Answers whose deadline has passed, with what is missing named as failed."""
        with self._lock:
            late = [opened for opened in self._open.values() if self._clock() - opened.opened_at >= self._deadline_s]
            for opened in late:
                del self._open[opened.message_id]
        late_by = ImageError("answer", "deadline", f"not done within {self._deadline_s:g} s; its own message may still come")
        for opened in late:
            missing = [ref for refs in opened.missing.values() for ref in refs]
            opened.outcomes += [Outcome(row_bytes(dead_letter_row(late_by.dead_letter(ref))), failed=True) for ref in missing]
        return [opened.answer(on_time=False) for opened in late]
