"""Parses Pub/Sub messages into requests. Pure functions: they call neither Pub/Sub nor storage.

The format of a message is recognised by its content, without a setting:

    Cloud Storage notification     attributes eventType, bucketId, objectId, objectGeneration (only OBJECT_FINALIZE is work)
    JSON                           {"uri"} or {"bytes"} (base64), or {"request_id", "images": [{"uri"} | {"bytes"}, …]},
                                   each image optionally with "name" (inline images) or "generation"; a list of URIs; one URI;
                                   other keys, of an image or of all, become `extra` in its row
    dead letter                    its image again, or the message that was refused: so a dead-letter topic is an input
    plain text                     one URI
    raw image bytes                by a content type of image/*, or by how the bytes start

Messages are untrusted input. A URI must lie under an allowed prefix, counts and sizes are bounded, and parsing never raises: a
message that cannot be parsed becomes a dead letter.
Attributes `request_id`, `name` and `event_time` (RFC 3339) are honoured on each kind.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from pipeline.extra_fields import extra_columns, extra_text
from pipeline.failures import ImageError
from pipeline.image_formats import format_by_start
from pipeline.listing.allowed import MAX_URI, is_allowed
from pipeline.listing.dead_letter_replay import image_entry, is_dead_letter, load_json, original_message
from pipeline.listing.names import CONTROL, bad_name, full_name, is_of_macos
from pipeline.records import INLINE, DeadLetter, EncodedImage, Image, ImageRef, ref_of, row_bytes
from pipeline.secrets import with_public_addresses

MAX_IMAGES = 1000  # of one message
MAX_INLINE_BYTES = 20_000_000  # of a message's inline images together
_MAX_TEXT = 1024  # characters of an id, a name, a generation; Pub/Sub's own attributes have as many bytes
_BUCKET = re.compile(r"[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]")
_SIZE = re.compile(r"[0-9]{1,15}")
_SCHEME = re.compile(rb"\s*(/|[A-Za-z][A-Za-z0-9+.-]*://)[^\r\n]*\s*")
_KNOWN = frozenset({"uri", "bytes", "content", "name", "generation", "request_id", "images"})


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """A message that was received, or that is to be published.

    Attributes:
      data: The payload.
      attributes: The attributes.
      message_id: Pub/Sub's id, the same for each delivery; empty before it is published.
      publish_time: Seconds since the epoch, likewise.
    """

    data: bytes
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    message_id: str = ""
    publish_time: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What one message asks for.

    Attributes:
      message_id: The message's id.
      request_id: The sender's id; empty if there is none.
      images: The images to detect in, named or with their bytes.
      dead_letters: Images that cannot be read, each with its reason.
      skipped: The message needs no work (a notification of a deleted object, for instance).
    """

    message_id: str
    request_id: str = ""
    images: tuple[Image, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    skipped: bool = False

    @property
    def wants_answer(self) -> bool:
        """Whether the sender waits for one answer to the whole request."""
        return bool(self.request_id) and not self.skipped

    @property
    def named(self) -> ImageRef | None:
        """The first image that it names, or that has a bad name."""
        found = [*map(ref_of, self.images), *(letter.ref for letter in self.dead_letters if letter.stage == "read")]
        return found[0] if found else None


def parse_message(message: Message, allowed: Sequence[str]) -> Request:
    """Parses a message; never raises, whatever its content.

    Args:
      message: The message.
      allowed: A URI must lie under one of these folders (`gs://`, `gs://bucket/`, `/data/photos/`).
    """
    request_id = _text(message.attributes.get("request_id"))
    if is_notification(message) and not _is_work(message.attributes):
        return Request(message.message_id, request_id, skipped=True)
    try:
        with _Refusing():
            message = _original(message)
            content = _recognised(message)
            request_id = content.request_id or request_id
            if not isinstance(content.images, list):
                raise _bad_request("a list in 'images'", content.images)
            if not 1 <= len(content.images) <= MAX_IMAGES:
                reason = "too_many_images" if content.images else "no_images"
                raise ImageError("message", reason, f"expected 1 to {MAX_IMAGES} images, got {len(content.images)}")
            return _request(message, request_id, content, allowed)
    except ImageError as err:
        ref = ImageRef("", request_id=request_id, message_id=message.message_id)
        letter = err.failure.dead_letter(ref, _without_secrets(message.data))
        return Request(message.message_id, request_id, dead_letters=(letter,))


def replay_message(line: bytes, allowed: Sequence[str]) -> tuple[Image | DeadLetter, ...]:
    """What a dead letter requests if it comes as a message; see `parse_message`."""
    request = parse_message(Message(line), allowed)
    return (*request.images, *request.dead_letters)


def image_count(message: Message) -> int:
    """How many images a message names, at least 1; bounds the subscriber."""
    try:
        with _Refusing():
            images = _recognised(_original(message)).images
            return max(1, len(images)) if isinstance(images, list) else 1
    except ImageError:
        return 1


def _original(message: Message) -> Message:
    data = original_message(message.data)
    return message if data is message.data else dataclasses.replace(message, data=data)


class _Refusing(contextlib.AbstractContextManager[None]):
    """Maps every exception in its block to an `ImageError`.

    Any other exception would end the stream, again at each restart, since the message is delivered again.
    """

    def __exit__(self, _kind: object, err: BaseException | None, _traceback: object) -> None:
        if isinstance(err, Exception) and not isinstance(err, ImageError):
            text = f"expected a message that can be understood, got {type(err).__name__}: {err!s:.200}"
            raise ImageError("message", "bad_request", text) from err


def _bad_request(expected: str, got: Any) -> ImageError:
    return ImageError("message", "bad_request", f"expected {expected}, got {type(got).__name__}")


class _Content(NamedTuple):
    """The content of a message, unchecked."""

    images: Any  # a list with one entry for each image, or another JSON value
    request_id: str = ""
    shared: Mapping[str, Any] = {}  # fields of all images
    size_bytes: int = 0  # of the one object that a notification names; 0 if unknown


def is_notification(message: Message) -> bool:
    """Whether Cloud Storage sent a message about an object; any other message was sent for its images."""
    return "eventType" in message.attributes and "objectId" in message.attributes


def _is_work(notified: Mapping[str, str]) -> bool:
    """Whether a notification is of a new object that may be an image: none that stands for a folder, and none that macOS adds."""
    return notified["eventType"] == "OBJECT_FINALIZE" and not (
        notified["objectId"].endswith("/") or is_of_macos(notified["objectId"])
    )


def _recognised(message: Message) -> _Content:
    attributes, data = message.attributes, message.data
    if is_notification(message):
        bucket = attributes.get("bucketId", "")
        if not _BUCKET.fullmatch(bucket):
            raise ImageError("message", "bad_notification", f"expected a bucket's name in bucketId, got {bucket[:80]!r}")
        uri = f"gs://{bucket}/{attributes['objectId']}"
        return _Content([{"uri": uri, "generation": attributes.get("objectGeneration", "")}], size_bytes=_announced_bytes(data))
    content_type = next((v for k, v in attributes.items() if k.lower().replace("_", "-") in ("content-type", "contenttype")), "")
    if content_type.lower().startswith("image/") or format_by_start(data):
        return _Content([{"content": data, "name": attributes.get("name", "")}])
    if data.lstrip()[:1] in (b"{", b"[", b'"'):
        return _content_of_json(load_json(data))
    if len(data) <= 2 * MAX_URI and _SCHEME.fullmatch(data):
        return _Content([data.decode("utf-8", "replace").strip()])
    raise ImageError(
        "message", "not_recognised", f"expected a storage notification, JSON or image bytes, got {len(data)} bytes: {data[:24]!r}"
    )


def _announced_bytes(payload: bytes) -> int:
    """The size in a notification's payload, which saves a request; 0 without one. A wrong one is noticed when it is read."""
    with contextlib.suppress(ImageError, AttributeError):
        size = load_json(payload).get("size")
        return int(size) if isinstance(size, str) and _SIZE.fullmatch(size) else 0
    return 0


def _content_of_json(value: Any) -> _Content:
    if is_dead_letter(value):
        return _Content([image_entry(value)])
    if not isinstance(value, dict):
        return _Content([value] if isinstance(value, str) else value)
    request_id = _text(value.get("request_id"))
    if "images" not in value:
        return _Content([value], request_id)
    return _Content(value["images"], request_id, json.loads(extra_text(extra_columns(_KNOWN, value)) or "{}"))


def _text(value: Any) -> str:
    """A text or number of a message as a short text; empty for other values."""
    return str(value)[:_MAX_TEXT] if isinstance(value, (str, int, float)) and value else ""


def _request(message: Message, request_id: str, content: _Content, allowed: Sequence[str]) -> Request:
    images: list[Image] = []
    dead: list[DeadLetter] = []
    of_message: dict[str, Any] = {"event_time": _event_time(message), "request_id": request_id, "message_id": message.message_id}
    bytes_left = MAX_INLINE_BYTES
    for entry in content.images:
        fields = {"uri": entry} if isinstance(entry, str) else entry
        try:
            with _Refusing():
                if not isinstance(fields, dict):
                    raise _bad_request("an image as {'uri'} or {'bytes'}", fields)
                fields = {**content.shared, **fields}
                image = _image(fields, allowed, bytes_left, of_message)
            if isinstance(image, DeadLetter):
                dead.append(image)
                continue
            bytes_left -= len(image.content) if isinstance(image, EncodedImage) else 0
            images.append(replace(image, size_bytes=content.size_bytes) if content.size_bytes else image)
        except ImageError as err:
            ref = ImageRef(_uri(fields)[:MAX_URI], **of_message)
            payload = message.data if len(content.images) == 1 else _payload(fields)
            dead.append(err.failure.dead_letter(ref, _without_secrets(payload)))
    return Request(message.message_id, request_id, tuple(images), tuple(dead))


def _image(entry: dict[str, Any], allowed: Sequence[str], bytes_left: int, of_message: Mapping[str, Any]) -> Image | DeadLetter:
    uri, extra = _uri(entry), extra_text(extra_columns(_KNOWN, entry))
    if uri:
        if not is_allowed(uri, allowed):
            text = f"{uri[:200]!r} lies under none of the allowed prefixes ({', '.join(allowed)})"
            raise ImageError("message", "not_allowed", text)
        ref = ImageRef(full_name(uri), generation=_text(entry.get("generation")), extra=extra, **of_message)
        return bad_name(ref.uri).dead_letter(ref) if CONTROL.search(ref.uri) else ref
    content = _inline_content(entry, bytes_left)
    if len(content) > bytes_left:
        raise ImageError("message", "too_large", f"expected at most {MAX_INLINE_BYTES} bytes of inline images in a message")
    digest = hashlib.sha256(content).hexdigest()[:32]
    name = CONTROL.sub("?", _text(entry.get("name")) or digest)
    return EncodedImage(ImageRef(INLINE + name, digest, len(content), extra=extra, **of_message), content)


def _uri(entry: Any) -> str:
    uri = entry.get("uri") if isinstance(entry, dict) else ""
    return uri if isinstance(uri, str) else ""


def _inline_content(entry: dict[str, Any], most: int) -> bytes:
    """The bytes of an inline image: those of the message, or base64 in its JSON, of which no more than needed is decoded."""
    content, text = entry.get("content"), entry.get("bytes")
    if isinstance(content, bytes):
        return content
    if not isinstance(text, str) or not text:
        raise ImageError("message", "bad_request", "expected an image as {'uri'} or {'bytes'} with text, got neither")
    try:
        return base64.b64decode(text[: most // 3 * 4 + 8], validate=True)
    except (binascii.Error, ValueError) as err:
        raise ImageError("message", "bad_base64", f"the image's bytes are no base64: {err}") from err


def _payload(entry: Any) -> bytes:
    """The JSON of one image's entry; of one that is nested too deeply, its texts."""
    try:
        return row_bytes(entry)
    except RecursionError:
        flat = {name: value for name, value in entry.items() if isinstance(value, str)} if isinstance(entry, dict) else None
        return row_bytes(flat)


def _without_secrets(payload: bytes) -> bytes:
    """A payload whose addresses lack their signatures, which do not outlive the dead letter; an image as it is."""
    return payload if format_by_start(payload) else with_public_addresses(payload.decode("latin-1")).encode("latin-1")


def _event_time(message: Message) -> float:
    text = message.attributes.get("event_time") or message.attributes.get("eventTime") or ""
    try:
        moment = _moment(text)
        seconds = moment.replace(tzinfo=moment.tzinfo or datetime.timezone.utc).timestamp()
        # at the edge of the calendar a time zone has moments that UTC has not
        datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    except (ValueError, OverflowError):
        return message.publish_time
    return seconds


def _moment(text: str) -> datetime.datetime:
    try:
        return msgspec.convert(text, datetime.datetime)  # also on Python 3.10 with any digits of a second
    except msgspec.ValidationError:
        return datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))  # such as a day
