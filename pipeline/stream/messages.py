"""What a Pub/Sub message asks for, and the messages that answer it. Pure functions; nothing here talks to Pub/Sub.

A message is recognised by what it holds, without a setting:

    Cloud Storage notification     attributes eventType, bucketId, objectId, objectGeneration (only OBJECT_FINALIZE is work)
    JSON                           {"uri"} or {"bytes"} (base64), or {"request_id", "images": [{"uri"} | {"bytes"}, …]},
                                   each image optionally with "name" (inline images) or "generation"; a list of URIs; one URI
    plain text                     one URI
    raw image bytes                by a content type of image/*, or by how the bytes start

Whoever can publish decides what stands in a message, so a URI must lie under an allowed prefix, and counts and sizes are bounded.
Attributes `request_id`, `name` and `event_time` (RFC 3339) are honoured on each kind.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import datetime
import hashlib
import json
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.failures import ImageError
from pipeline.records import (
    INLINE,
    DeadLetter,
    DetectedImage,
    EncodedImage,
    ImageRef,
    dead_letter_row,
    detection_row,
    identity_bytes,
    name_bytes,
    row_bytes,
)

MAX_MESSAGE_BYTES = 9_500_000  # Pub/Sub takes 10 MB a message, with its attributes
_MAX_ATTRIBUTE_BYTES = 1024
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


@dataclasses.dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message to publish."""

    data: bytes
    attributes: Mapping[str, str]


def parse_message(message: Message, limits: MessageLimits) -> Request:
    """Finds out what a message asks for; never raises, whatever stands in it."""
    try:
        request_id, asked = _recognise(message)
        if asked is None:
            return Request(message.message_id, request_id, skipped=True)
        if not 1 <= len(asked) <= limits.max_images:
            raise ImageError(
                "message",
                "too_many_images" if asked else "no_images",
                f"expected 1 to {limits.max_images} images, got {len(asked)}",
            )
    except ImageError as err:
        request_id = message.attributes.get("request_id", "")
        return Request(
            message.message_id, request_id, dead_letters=(err.dead_letter(ImageRef("", request_id=request_id), message.data),)
        )
    return _request(message, request_id, asked, limits)


def image_count(message: Message) -> int:
    """How many images a message names, at least 1: what it weighs when intake is bounded."""
    try:
        return max(1, len(_recognise(message)[1] or ()))
    except ImageError:
        return 1


def is_allowed(uri: str, prefixes: Iterable[str]) -> bool:
    """Whether a URI lies under one of the prefixes; each ends at a slash: `gs://photos` does not allow `gs://photos-secret/x`.

    Compared as written: `GS://…`, `..` (also percent-encoded), control characters and endless names are refused.
    """
    if len(uri) > _MAX_URI:
        return False
    decoded = urllib.parse.unquote(urllib.parse.unquote(uri))
    if _CONTROL.search(decoded) or ".." in re.split(r"[/\\]", decoded):
        return False
    return any(prefix and uri.startswith(prefix if prefix.endswith("/") else prefix + "/") for prefix in prefixes)


def detection_id(ref: ImageRef, model_name: str, model_version: str) -> str:
    """Equal for each result of one version of an image from one version of a model, so that repeats can be recognised."""
    return hashlib.sha256(b"\n".join((identity_bytes(ref), name_bytes(model_name), name_bytes(model_version)))).hexdigest()[:32]


def detection_message(image: DetectedImage, now: float) -> OutgoingMessage:
    """The message for one image: its row as JSON; what readers route on as attributes.

    Args:
      image: What was detected.
      now: Seconds since the epoch, for `latency_ms` (from the image's event time).
    """
    attributes = {
        "kind": "detections",
        "detection_id": detection_id(image.ref, image.model_name, image.model_version),
        "model_name": image.model_name,
        "model_version": image.model_version,
        **_ref_attributes(image.ref, now),
    }
    return OutgoingMessage(row_bytes(detection_row(image)), _fit(attributes))


def dead_letter_message(letter: DeadLetter, now: float) -> OutgoingMessage:
    """The message for one dead letter; a payload that Pub/Sub would refuse is left out, and the attribute `payload` says so."""
    attributes = {"kind": "dead_letter", "stage": letter.stage, "reason": letter.reason, **_ref_attributes(letter.ref, now)}
    data = row_bytes(dead_letter_row(letter))
    if len(data) > MAX_MESSAGE_BYTES:
        data = row_bytes(dead_letter_row(dataclasses.replace(letter, payload=b"")))
        attributes["payload"] = "left out, too large"
    return OutgoingMessage(data, _fit(attributes))


def utc(seconds: float) -> str:
    """RFC 3339, UTC, milliseconds."""
    return (
        datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def _recognise(message: Message) -> tuple[str, list[Any] | None]:
    """What a message asks for, unchecked: the request's id and one entry an image; None for a message that needs no work."""
    attributes, data = message.attributes, message.data
    request_id = attributes.get("request_id", "")
    if "eventType" in attributes and "objectId" in attributes:
        return request_id, _notified(attributes)
    content_type = next((v for k, v in attributes.items() if k.lower().replace("_", "-") in ("content-type", "contenttype")), "")
    if content_type.lower().startswith("image/") or _looks_like_image(data):
        return request_id, [{"content": data, "name": attributes.get("name", "")}]
    if data.lstrip()[:1] in (b"{", b"[", b'"'):
        return _asked_in_json(data, request_id)
    if len(data) <= 2 * _MAX_URI and _SCHEME.fullmatch(data):
        return request_id, [{"uri": data.decode("utf-8", "replace").strip()}]
    raise ImageError(
        "message", "not_recognised", f"expected a storage notification, JSON or image bytes, got {len(data)} bytes: {data[:24]!r}"
    )


def _notified(attributes: Mapping[str, str]) -> list[Any] | None:
    if attributes["eventType"] != "OBJECT_FINALIZE":
        return None
    bucket = attributes.get("bucketId", "")
    if not _BUCKET.fullmatch(bucket):
        raise ImageError("message", "bad_notification", f"expected a bucket's name in bucketId, got {bucket[:80]!r}")
    return [{"uri": f"gs://{bucket}/{attributes['objectId']}", "generation": attributes.get("objectGeneration", "")}]


def _asked_in_json(data: bytes, request_id: str) -> tuple[str, list[Any]]:
    try:
        asked = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise ImageError("message", "bad_json", f"the JSON cannot be parsed: {str(err)[:200]}") from err
    if isinstance(asked, dict):
        request_id = str(asked.get("request_id") or request_id)[:_MAX_ATTRIBUTE_BYTES]
        asked = asked.get("images", [asked])
    if isinstance(asked, str):
        asked = [asked]
    if not isinstance(asked, list):
        raise ImageError("message", "bad_request", f"expected a list in 'images', got {type(asked).__name__}")
    return request_id, [{"uri": entry} if isinstance(entry, str) else entry for entry in asked]


def _request(message: Message, request_id: str, asked: list[Any], limits: MessageLimits) -> Request:
    images: list[ImageRef | EncodedImage] = []
    dead: list[DeadLetter] = []
    event_time, bytes_left = _event_time(message), limits.max_bytes
    for entry in asked:
        try:
            image = _image(entry, limits, bytes_left, request_id, event_time)
            bytes_left -= len(image.content) if isinstance(image, EncodedImage) else 0
            images.append(image)
        except ImageError as err:
            ref = ImageRef(_uri(entry)[:_MAX_URI], request_id=request_id)
            dead.append(err.dead_letter(ref, message.data if len(asked) == 1 else row_bytes(entry)))
    return Request(message.message_id, request_id, tuple(images), tuple(dead))


def _image(entry: Any, limits: MessageLimits, bytes_left: int, request_id: str, event_time: float) -> ImageRef | EncodedImage:
    if not isinstance(entry, dict):
        raise ImageError("message", "bad_request", f"expected an image as {{'uri'}} or {{'bytes'}}, got {type(entry).__name__}")
    uri = _uri(entry)
    if uri:
        if not is_allowed(uri, limits.allowed_prefixes):
            allowed = ", ".join(limits.allowed_prefixes)
            raise ImageError("message", "not_allowed", f"{uri[:200]!r} lies under none of the allowed prefixes ({allowed})")
        return ImageRef(uri, str(entry.get("generation") or ""), event_time=event_time, request_id=request_id)
    content = (
        entry["content"] if "content" in entry and isinstance(entry["content"], bytes) else _decode_base64(entry.get("bytes"))
    )
    if len(content) > bytes_left:
        raise ImageError(
            "message", "too_large", f"expected at most {limits.max_bytes} bytes of inline images in a message, got more"
        )
    digest = hashlib.sha256(content).hexdigest()[:32]
    name = _CONTROL.sub("?", str(entry.get("name") or digest))[:1024]
    return EncodedImage(ImageRef(INLINE + name, digest, len(content), event_time, request_id), content)


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
        return moment.replace(tzinfo=moment.tzinfo or datetime.timezone.utc).timestamp()
    except (ValueError, OverflowError):
        return message.publish_time


def _ref_attributes(ref: ImageRef, now: float) -> dict[str, str]:
    attributes = {"image_uri": ref.uri, "generation": ref.generation, "request_id": ref.request_id}
    if ref.event_time:
        attributes["event_time"] = utc(ref.event_time)
        attributes["latency_ms"] = f"{max(0.0, now - ref.event_time) * 1e3:.1f}"
    return {name: value for name, value in attributes.items() if value}


def _fit(attributes: Mapping[str, str]) -> dict[str, str]:
    """Cuts what Pub/Sub would refuse: values of at most 1024 bytes (a URI can be longer; the row has all of it)."""
    return {
        name: value.encode("utf-8", "replace")[:_MAX_ATTRIBUTE_BYTES].decode("utf-8", "ignore")
        for name, value in attributes.items()
    }
