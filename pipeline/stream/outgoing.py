"""Builds the messages that a stream publishes: results, dead letters, answers. Pure functions; they do not call Pub/Sub.

Each message fits into Pub/Sub: parts that are too large are left out, and the message says so.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from pipeline.records import DeadLetter, DetectedImage, ImageRef, compact_bytes, dead_letter_row, detection_row, name_bytes
from pipeline.stream.messages import Message

MAX_MESSAGE_BYTES = 9_500_000  # Pub/Sub takes 10 MB a message, with its attributes
_MAX_ATTRIBUTE_BYTES = 1024
_MAX_EXPLANATION = 10_000  # characters of a dead letter's explanation where the message is too large
_LEFT_OUT = "left out, too large"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an image.

    Attributes:
      row: Its row, or its dead letter's, as UTF-8 JSON; empty if the stream has no answers.
      failed: Whether it is a dead letter.
    """

    row: bytes
    failed: bool


def detection_id(ref: ImageRef, model_name: str, model_version: str) -> str:
    """A deterministic id of image generation and model version, by which readers recognise repeats."""
    return hashlib.sha256(name_bytes("\n".join((ref.identity, model_name, model_version)))).hexdigest()[:32]


def detection_message(image: DetectedImage, now: float) -> Message:
    """The message for one image: its row as JSON, and attributes for routing.

    If the row is too large for Pub/Sub, the detections are left out. `detections_left_out` in the row counts them, and the
    attribute `detections` is set. The archive has the whole row.

    Args:
      image: The image with its detections.
      now: Seconds since the epoch, for `latency_ms` (from the image's event time).
    """
    attributes = {
        "kind": "detections",
        "detection_id": detection_id(image.ref, image.model_name, image.model_version),
        "model_name": image.model_name,
        "model_version": image.model_version,
        **_ref_attributes(image.ref, now),
    }
    fields = detection_row(image)
    data = compact_bytes(fields)
    if len(data) > MAX_MESSAGE_BYTES:
        data = compact_bytes({**fields, "detections": [], "detections_left_out": len(image.detections)})
        attributes["detections"] = _LEFT_OUT
    return Message(data, _fit(attributes))


def dead_letter_message(letter: DeadLetter, now: float) -> Message:
    """The message for one dead letter; a payload too large for Pub/Sub is left out, and the attribute `payload` is set."""
    attributes = {"kind": "dead_letter", "stage": letter.stage, "reason": letter.reason, **_ref_attributes(letter.ref, now)}
    if letter.model_name:
        attributes |= {"model_name": letter.model_name, "model_version": letter.model_version}
    data = compact_bytes(dead_letter_row(letter))
    if len(data) > MAX_MESSAGE_BYTES:
        short = replace(letter, payload=b"", message=letter.message[:_MAX_EXPLANATION])
        data = compact_bytes(dead_letter_row(short))
        attributes["payload"] = _LEFT_OUT
    return Message(data, _fit(attributes))


def answer_message(request_id: str, outcomes: Sequence[Outcome], *, on_time: bool) -> Message:
    """The answer to a request: `{"request_id", "complete", "results": [rows], "failed": [dead-letter rows]}`.

    `complete` is false if the deadline came first. If the rows are too large for Pub/Sub, they are left out and counted in
    `rows_left_out`; each has its own message.
    """
    results = [outcome.row for outcome in outcomes if not outcome.failed]
    failed = [outcome.row for outcome in outcomes if outcome.failed]
    head = compact_bytes({"request_id": request_id, "complete": on_time})[:-1]
    data = b'%s,"results":[%s],"failed":[%s]}' % (head, b",".join(results), b",".join(failed))
    if len(data) > MAX_MESSAGE_BYTES:
        data = b'%s,"rows_left_out":%d,"results":[],"failed":[]}' % (head, len(outcomes))
    attributes = {"kind": "answer", "request_id": request_id, "images": str(len(results)), "failed": str(len(failed))}
    return Message(data, _fit(attributes))


def _ref_attributes(ref: ImageRef, now: float) -> dict[str, str]:
    attributes = {"image_uri": ref.uri, "generation": ref.generation, "request_id": ref.request_id}
    if ref.event_time:
        moment = datetime.datetime.fromtimestamp(ref.event_time, datetime.timezone.utc)
        attributes["event_time"] = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        attributes["latency_ms"] = f"{max(0.0, now - ref.event_time) * 1e3:.1f}"
    return {name: value for name, value in attributes.items() if value}


def _fit(attributes: Mapping[str, str]) -> dict[str, str]:
    """Cuts values to the 1024 bytes that Pub/Sub accepts; the row has the whole URI."""
    return {
        name: value
        if value.isascii() and len(value) <= _MAX_ATTRIBUTE_BYTES
        else value.encode("utf-8", "replace")[:_MAX_ATTRIBUTE_BYTES].decode("utf-8", "ignore")
        for name, value in attributes.items()
    }
