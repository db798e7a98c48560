"""One answer for each request of several images: sent when its last image is done, or at a deadline with what is missing named.

Kept in the process, like the rest of a local stream. An image that was asked for before is not detected again; the request gets
the rows that the first asking gave.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from pipeline.failures import ImageError
from pipeline.records import DeadLetter, DetectedImage, ImageRef, dead_letter_row, detection_row, row_bytes
from pipeline.stream.messages import MAX_MESSAGE_BYTES, OutgoingMessage, Request

_MOST_ROWS = 20_000  # rows remembered for requests that ask again

Row = dict[str, Any]


@dataclasses.dataclass
class _Open:
    request_id: str
    opened_at: float
    missing: list[ImageRef] = dataclasses.field(default_factory=list)
    results: list[Row] = dataclasses.field(default_factory=list)
    failed: list[Row] = dataclasses.field(default_factory=list)


class Answers:
    """Gathers results by request; thread-safe. Methods return the answers that are due now.

    Args:
      deadline_s: How long a request may take; then it is answered with what is there.
      clock: Seconds, monotonic.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic):
        self._deadline_s = deadline_s
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._rows: OrderedDict[str, tuple[bool, Row]] = OrderedDict()
        self._followers: dict[str, list[str]] = {}

    def open(self, request: Request) -> None:
        """Begins to wait for a request's images; without a request id there is nobody to answer."""
        if not request.request_id or request.skipped:
            return
        refs = [image if isinstance(image, ImageRef) else image.ref for image in request.images]
        refs += [letter.ref for letter in request.dead_letters]
        with self._lock:
            self._open.setdefault(request.request_id, _Open(request.request_id, self._clock())).missing.extend(refs)

    def done(self, result: DetectedImage | DeadLetter) -> list[OutgoingMessage]:
        """Notes the result of an image, for its request and for others that ask for the same image."""
        failed = isinstance(result, DeadLetter)
        row = (
            dead_letter_row(dataclasses.replace(result, payload=b"")) if isinstance(result, DeadLetter) else detection_row(result)
        )
        identity = result.ref.identity
        with self._lock:
            self._rows[identity] = (failed, row)
            if len(self._rows) > _MOST_ROWS:
                self._rows.popitem(last=False)
            asking = [result.ref.request_id, *self._followers.pop(identity, [])]
            return [answer for request_id in asking for answer in self._fill(request_id, result.ref, failed, row)]

    def repeat(self, ref: ImageRef) -> list[OutgoingMessage]:
        """Notes that an image was asked for before: its row is there already, or will be."""
        with self._lock:
            if ref.request_id not in self._open:
                return []
            if ref.identity in self._rows:
                return self._fill(ref.request_id, ref, *self._rows[ref.identity])
            self._followers.setdefault(ref.identity, []).append(ref.request_id)
            return []

    def overdue(self) -> list[OutgoingMessage]:
        """Answers whose deadline has passed, with what is missing named as failed."""
        with self._lock:
            late = [opened for opened in self._open.values() if self._clock() - opened.opened_at >= self._deadline_s]
            for opened in late:
                del self._open[opened.request_id]
                message = f"not done within {self._deadline_s:g} s; its own message may still come"
                opened.failed += [
                    dead_letter_row(ImageError("answer", "deadline", message).dead_letter(ref)) for ref in opened.missing
                ]
            return [answer_message(each.request_id, each.results, each.failed, on_time=False) for each in late]

    def _fill(self, request_id: str, ref: ImageRef, failed: bool, row: Row) -> list[OutgoingMessage]:
        opened = self._open.get(request_id)
        if opened is None:
            return []
        same = next((n for n, missing in enumerate(opened.missing) if missing.uri == ref.uri), None)
        if same is None:
            return []
        del opened.missing[same]
        (opened.failed if failed else opened.results).append(row)
        if opened.missing:
            return []
        del self._open[request_id]
        return [answer_message(request_id, opened.results, opened.failed, on_time=True)]


def answer_message(request_id: str, results: list[Row], failed: list[Row], *, on_time: bool) -> OutgoingMessage:
    """The answer to a request: `{"request_id", "complete", "results": [rows], "failed": [dead-letter rows]}`.

    `complete` is false where the deadline came first. Rows that Pub/Sub would refuse for their size are left out, and
    `rows_left_out` says so; they have been published one by one.
    """
    answer = {"request_id": request_id, "complete": on_time, "results": results, "failed": failed}
    data = row_bytes(answer)
    if len(data) > MAX_MESSAGE_BYTES:
        counts = {"rows_left_out": len(results) + len(failed), "results": [], "failed": []}
        data = row_bytes({**answer, **counts})
    attributes = {"kind": "answer", "request_id": request_id[:256], "images": str(len(results)), "failed": str(len(failed))}
    return OutgoingMessage(data, attributes)
