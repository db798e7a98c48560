"""What a Pub/Sub message asks for. Nothing here talks to Pub/Sub, or opens what a message names.

A message is recognised by what it holds, without a setting:

    Cloud Storage notification     attributes eventType, bucketId, objectId, objectGeneration (only OBJECT_FINALIZE is work)
    JSON                           {"uri"} or {"bytes"} (base64), or {"request_id", "images": [{"uri"} | {"bytes"}, …]},
                                   each image optionally with "name" (inline images) or "generation"; a list of URIs; one URI;
                                   other keys, of an image or of all, are what its row has as `extra`
    dead letter                    its image again, or the message that was refused: so a dead-letter topic is an input
    plain text                     one URI
    raw image bytes                by a content type of image/*, or by how the bytes start

Whoever can publish decides what stands in a message, so a URI must lie under an allowed prefix, counts and sizes are bounded, and
no message raises: what cannot be understood is a dead letter.
Attributes `request_id`, `name` and `event_time` (RFC 3339) are honoured on each kind.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import datetime
import hashlib
import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.extra_fields import extra_text, said_beyond
from pipeline.failures import ImageError
from pipeline.records import INLINE, DeadLetter, EncodedImage, ImageRef, row_bytes
from pipeline.stream.asked_again import asked_again, innermost, is_dead_letter
from pipeline.stream.outgoing import utc

_MAX_TEXT = 1024  # characters of an id, a name, a generation; Pub/Sub's own attributes have as many bytes
_MAX_URI = 2048  # an object's name has at most 1024 bytes
_BUCKET = re.compile(r"[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SCHEME = re.compile(rb"\s*(/|[A-Za-z][A-Za-z0-9+.-]*://)[^\r\n]*\s*")
_IMAGE_STARTS = (
    b"\xff\xd8\xff",  # JPEG
    b"\x89PNG\r\n\x1a\n",
    b"GIF8",
    b"BM",
    b"II*\0",  # TIFF
    b"MM\0*",
    b"\0\0\1\0",  # ICO
    b"\0\0\0\x0cjP  ",  # JPEG 2000
    b"\xff\x4f\xff\x51",
    b"#?RADIANCE",
)
_OURS = frozenset({"uri", "bytes", "content", "name", "generation", "request_id", "images"})
_NO_WORK = object()  # what a message asks for that needs none
_FTYP_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"mif1")


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """A message as it came.

    Attributes:
      data: Its payload.
      attributes: Its attributes.
      message_id: Pub/Sub's id, equal for each delivery of the message.
      publish_time: Seconds since the epoch.
    """

    data: bytes
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    message_id: str = ""
    publish_time: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class MessageLimits:
    """What a message may ask for.

    Attributes:
      allowed_prefixes: A URI must lie under one of these folders (`gs://`, `gs://bucket/`, `/data/photos/`).
      max_images: Most images of one message.
      max_bytes: Most bytes of a message's inline images together.
    """

    allowed_prefixes: tuple[str, ...] = ("gs://",)
    max_images: int = 1000
    max_bytes: int = 20_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What one message asks for.

    Attributes:
      message_id: The message's id.
      request_id: The id that the sender gave; empty where it gave none.
      images: The images to look at, named or with their bytes.
      dead_letters: What cannot be done, each with its reason.
      skipped: The message needs no work (a notification of a deleted object, for instance).
    """

    message_id: str
    request_id: str = ""
    images: tuple[ImageRef | EncodedImage, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    skipped: bool = False

    @property
    def wants_answer(self) -> bool:
        """Whether there is somebody who waits for an answer to the whole request."""
        return bool(self.request_id) and not self.skipped


def parse_message(message: Message, limits: MessageLimits) -> Request:
    """Finds out what a message asks for; never raises, whatever stands in it."""
    request_id = _text(message.attributes.get("request_id"))
    try:
        message = dataclasses.replace(message, data=innermost(message.data))
        of_json, asked = _recognise(message)
        request_id = of_json or request_id
        if asked is _NO_WORK:
            return Request(message.message_id, request_id, skipped=True)
        if not isinstance(asked, list):
            raise ImageError("message", "bad_request", f"expected a list in 'images', got {type(asked).__name__}")
        if not 1 <= len(asked) <= limits.max_images:
            reason = "too_many_images" if asked else "no_images"
            raise ImageError("message", reason, f"expected 1 to {limits.max_images} images, got {len(asked)}")
    except ImageError as err:
        ref = ImageRef("", request_id=request_id, message_id=message.message_id)
        return Request(message.message_id, request_id, dead_letters=(err.dead_letter(ref, message.data),))
    return _request(message, request_id, asked, limits)


def image_count(message: Message) -> int:
    """How many images a message names, at least 1: what it weighs when intake is bounded."""
    try:
        asked = _recognise(dataclasses.replace(message, data=innermost(message.data)))[1]
    except ImageError:
        return 1
    return max(1, len(asked)) if isinstance(asked, list) else 1


def is_allowed(uri: str, prefixes: Iterable[str]) -> bool:
    """Whether a URI lies under one of the prefixes; each ends at a slash: `gs://photos` does not allow `gs://photos-secret/x`.

    Compared as written: `GS://…`, `..` (also percent-encoded), control characters and endless names are refused. A local file
    must lie there after symbolic links are followed, too.
    """
    if len(uri) > _MAX_URI:
        return False
    decoded = urllib.parse.unquote(urllib.parse.unquote(uri))
    if _CONTROL.search(decoded) or ".." in re.split(r"[/\\]", decoded):
        return False
    if not any(_is_under(uri, prefix) for prefix in prefixes):
        return False
    return "://" in uri or _lies_under(uri, prefixes)


def _is_under(uri: str, prefix: str) -> bool:
    return bool(prefix) and uri.startswith(prefix if prefix.endswith("/") else prefix + "/")


def _lies_under(path: str, prefixes: Iterable[str]) -> bool:
    """Whether a local path leads to somewhere under one of the prefixes, wherever links lead."""
    try:
        real = os.path.realpath(path)
    except ValueError:  # no name that a file could have
        return False
    return any(_is_under(real, os.path.realpath(prefix)) for prefix in prefixes if prefix and "://" not in prefix)


def _recognise(message: Message) -> tuple[str, Any]:
    """What a message asks for, unchecked: the request's id that stands in its JSON, and a list of one entry an image.

    `_NO_WORK` instead of a list where there is none; what JSON has instead of one is for the caller to refuse.
    """
    attributes, data = message.attributes, message.data
    if "eventType" in attributes and "objectId" in attributes:
        return "", _notified(attributes)
    content_type = next((v for k, v in attributes.items() if k.lower().replace("_", "-") in ("content-type", "contenttype")), "")
    if content_type.lower().startswith("image/") or _looks_like_image(data):
        return "", [{"content": data, "name": attributes.get("name", "")}]
    if data.lstrip()[:1] in (b"{", b"[", b'"'):
        return _asked_in_json(data)
    if len(data) <= 2 * _MAX_URI and _SCHEME.fullmatch(data):
        return "", [{"uri": data.decode("utf-8", "replace").strip()}]
    raise ImageError(
        "message", "not_recognised", f"expected a storage notification, JSON or image bytes, got {len(data)} bytes: {data[:24]!r}"
    )


def _notified(attributes: Mapping[str, str]) -> Any:
    if attributes["eventType"] != "OBJECT_FINALIZE":
        return _NO_WORK
    bucket = attributes.get("bucketId", "")
    if not _BUCKET.fullmatch(bucket):
        raise ImageError("message", "bad_notification", f"expected a bucket's name in bucketId, got {bucket[:80]!r}")
    return [{"uri": f"gs://{bucket}/{attributes['objectId']}", "generation": attributes.get("objectGeneration", "")}]


def _asked_in_json(data: bytes) -> tuple[str, Any]:
    try:
        asked = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise ImageError("message", "bad_json", f"the JSON cannot be parsed: {str(err)[:200]}") from err
    if is_dead_letter(asked):
        return "", [asked_again(asked)]
    request_id, of_all = "", {}
    if isinstance(asked, dict):
        request_id = _text(asked.get("request_id"))
        if "images" in asked:  # made small once, not for each image
            of_all = json.loads(extra_text(said_beyond(_OURS, asked)) or "{}")
        asked = asked.get("images", [asked])
    if isinstance(asked, str):
        asked = [asked]
    if not isinstance(asked, list):
        return request_id, asked
    entries = [{"uri": entry} if isinstance(entry, str) else entry for entry in asked]
    return request_id, [of_all | entry if of_all and isinstance(entry, dict) else entry for entry in entries]


def _text(value: Any) -> str:
    """A short text as a message gives it, also where it gives a number; anything else is none."""
    return str(value)[:_MAX_TEXT] if isinstance(value, (str, int, float)) and value else ""


def _request(message: Message, request_id: str, asked: list[Any], limits: MessageLimits) -> Request:
    images: list[ImageRef | EncodedImage] = []
    dead: list[DeadLetter] = []
    event_time, bytes_left = _event_time(message), limits.max_bytes
    for entry in asked:
        try:
            image = _image(entry, limits, bytes_left)
            bytes_left -= len(image.content) if isinstance(image, EncodedImage) else 0
            images.append(_asked_by(image, event_time, request_id, message.message_id))
        except ImageError as err:
            ref = ImageRef(_uri(entry)[:_MAX_URI], event_time=event_time, request_id=request_id, message_id=message.message_id)
            dead.append(err.dead_letter(ref, message.data if len(asked) == 1 else _payload(entry, message)))
    return Request(message.message_id, request_id, tuple(images), tuple(dead))


def _payload(entry: Any, message: Message) -> bytes:
    """The part of a message that asks for one image; all of it where that is nested too deeply to be written again."""
    try:
        return row_bytes(entry)
    except RecursionError:
        return message.data


def _asked_by(image: ImageRef | EncodedImage, event_time: float, request_id: str, message_id: str) -> ImageRef | EncodedImage:
    if isinstance(image, EncodedImage):
        ref = dataclasses.replace(image.ref, event_time=event_time, request_id=request_id, message_id=message_id)
        return EncodedImage(ref, image.content)
    return dataclasses.replace(image, event_time=event_time, request_id=request_id, message_id=message_id)


def _image(entry: Any, limits: MessageLimits, bytes_left: int) -> ImageRef | EncodedImage:
    if not isinstance(entry, dict):
        raise ImageError("message", "bad_request", f"expected an image as {{'uri'}} or {{'bytes'}}, got {type(entry).__name__}")
    uri = _uri(entry)
    if uri:
        if not is_allowed(uri, limits.allowed_prefixes):
            allowed = ", ".join(limits.allowed_prefixes)
            raise ImageError("message", "not_allowed", f"{uri[:200]!r} lies under none of the allowed prefixes ({allowed})")
        return ImageRef(uri, _text(entry.get("generation")), extra=extra_text(said_beyond(_OURS, entry)))
    content = (
        entry["content"] if "content" in entry and isinstance(entry["content"], bytes) else _decode_base64(entry.get("bytes"))
    )
    if len(content) > bytes_left:
        raise ImageError(
            "message", "too_large", f"expected at most {limits.max_bytes} bytes of inline images in a message, got more"
        )
    digest = hashlib.sha256(content).hexdigest()[:32]
    name = _CONTROL.sub("?", _text(entry.get("name")) or digest)
    return EncodedImage(ImageRef(INLINE + name, digest, len(content), extra=extra_text(said_beyond(_OURS, entry))), content)


def _uri(entry: Any) -> str:
    uri = entry.get("uri") if isinstance(entry, dict) else ""
    return uri if isinstance(uri, str) else ""


def _decode_base64(text: Any) -> bytes:
    if not isinstance(text, str) or not text:
        raise ImageError("message", "bad_request", "expected an image as {'uri'} or {'bytes'} with text, got neither")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as err:
        raise ImageError("message", "bad_base64", f"the image's bytes are no base64: {err}") from err


def _looks_like_image(data: bytes) -> bool:
    if data.startswith(_IMAGE_STARTS) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        return True
    return data[4:8] == b"ftyp" and data[8:12] in _FTYP_BRANDS


def _event_time(message: Message) -> float:
    text = message.attributes.get("event_time") or message.attributes.get("eventTime") or ""
    try:
        moment = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
        seconds = moment.replace(tzinfo=moment.tzinfo or datetime.timezone.utc).timestamp()
        utc(seconds)  # at the edge of the calendar a time zone has moments that UTC has not
    except (ValueError, OverflowError):
        return message.publish_time
    return seconds
