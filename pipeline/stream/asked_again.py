"""What a dead letter asks for when it comes as a message: its image again, by name, or by the payload that it carries."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from pipeline.failures import REASONS, ImageError
from pipeline.records import INLINE

MOST_VALUES = 200_000  # in a message's JSON, of at most 240 bytes of memory each


def load_json(data: bytes, max_values: int = MOST_VALUES) -> Any:
    """What stands in JSON, if that is not more than fits into memory many times.

    Raises:
      ImageError: It is too much, or no JSON.
    """
    values = 1 + sum(map(data.count, (b",", b"[", b"{")))  # at least as many as it has: each begins behind one of these
    if values > max_values:
        raise ImageError("message", "too_many_images", f"expected JSON of at most {max_values} values, got up to {values}")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as err:
        raise ImageError("message", "bad_json", f"the JSON cannot be parsed: {str(err)[:200]}") from err


def is_dead_letter(row: Any) -> bool:
    """Whether something in JSON is a dead letter of ours."""
    if not (isinstance(row, dict) and isinstance(row.get("image"), dict)):
        return False
    stage, reason = row.get("stage"), row.get("reason")
    return isinstance(stage, str) and isinstance(reason, str) and reason in REASONS.get(stage, ())


def innermost(data: bytes, max_values: int = MOST_VALUES) -> bytes:
    """The message that was refused, where a message is its dead letter, or that one's dead letter; else the message itself.

    Raises:
      ImageError: Its payload is damaged.
    """
    while b'"payload_base64"' in data and data.lstrip()[:1] == b"{":
        try:
            row = load_json(data, max_values)
        except ImageError:
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
