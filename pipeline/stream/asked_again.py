"""What a dead letter asks for when it comes as a message: its image again, by name, or by the payload that it carries."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from pipeline.failures import REASONS, ImageError
from pipeline.records import INLINE


def is_dead_letter(row: Any) -> bool:
    """Whether something in JSON is a dead letter of ours."""
    return (
        isinstance(row, dict)
        and isinstance(row.get("image"), dict)
        and row.get("reason") in REASONS.get(str(row.get("stage")), ())
    )


def innermost(data: bytes) -> bytes:
    """The message that was refused, where a message is its dead letter, or that one's dead letter; else the message itself.

    Raises:
      ImageError: Its payload is damaged.
    """
    while b'"payload_base64"' in data and data.lstrip()[:1] == b"{":
        try:
            row = json.loads(data)
        except (ValueError, RecursionError):
            return data
        if not is_dead_letter(row) or _uri(row).startswith(INLINE):
            return data
        data = _decoded(row.get("payload_base64"))
    return data


def asked_again(letter: dict[str, Any]) -> dict[str, Any]:
    """The image that a dead letter asks for, as an entry of a message: `{"uri"}`, or `{"content", "name"}` with its bytes.

    The version that failed is not asked for, since the newest one may be in order.

    Raises:
      ImageError: It has no image that could be read again.
    """
    uri = _uri(letter)
    extra = {"extra": letter["extra"]} if "extra" in letter else {}
    if uri.startswith(INLINE) and "payload_base64" in letter:
        return {"content": _decoded(letter["payload_base64"]), "name": uri.removeprefix(INLINE), **extra}
    if not uri or uri.startswith(INLINE):
        raise ImageError(
            "message", "bad_request", "a dead letter that neither names an image that can be read nor has its payload"
        )
    return {"uri": uri, **extra}


def _uri(letter: dict[str, Any]) -> str:
    uri = letter["image"].get("uri")
    return uri if isinstance(uri, str) else ""


def _decoded(payload: Any) -> bytes:
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError, TypeError) as err:
        raise ImageError("message", "bad_base64", f"the dead letter's payload is no base64: {err}") from err
