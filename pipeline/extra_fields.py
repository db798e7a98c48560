"""Extra columns of an image in a manifest or message (`camera`, `label`): they go into its row, within bounds.

The result is small, plain JSON: 2,000 bytes in all, and nesting at most 4 deep. A field beyond a bound is left out, and `...`
counts such fields. A number that JSON lacks becomes null. An integer beyond 64 bits becomes text, since not all readers take it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from pipeline.records import row_bytes
from pipeline.secrets import with_public_addresses

LEFT_OUT = "..."  # the field that counts those left out

_MOST_BYTES = 2000  # of JSON
_DEEPEST = 4


def extra_text(fields: Mapping[Any, Any]) -> str:
    r"""The fields as the JSON text of `ImageRef.extra`; empty without fields. Never raises for any JSON.

    >>> extra_text({"camera": 7, "label": "häslein"})
    '{"camera": 7, "label": "häslein"}'
    >>> extra_text({"temperature": float("nan"), "id": 2**64, "notes": "x" * 5000})
    '{"temperature": null, "id": "18446744073709551616", "...": 1}'
    >>> extra_text({})
    ''
    """
    kept: dict[str, Any] = {}
    room, left_out = _MOST_BYTES, int(_number_before(fields))
    for name, value in fields.items():
        if name == LEFT_OUT:
            continue
        try:
            entry = _plain({name: value}, _DEEPEST + 1)
            size = len(row_bytes(entry))
        except _TooLargeError:
            size = room + 1
        if size > room:
            left_out += 1
            continue
        kept |= entry
        room -= size
    if left_out:
        kept[LEFT_OUT] = left_out
    return row_bytes(kept).decode() if kept else ""


def extra_of(text: str | None) -> dict[str, Any]:
    """The fields of a row's `extra`; none where the text is not one of `extra_text`, as in a file that somebody planted.

    >>> extra_of('{"camera": 7}'), extra_of("[" * 100_000), extra_of("")
    ({'camera': 7}, {}, {})
    """
    try:
        fields = json.loads(text) if text else {}
        _plain(fields, _DEEPEST + 1)
    except (ValueError, RecursionError, _TooLargeError):
        return {}
    return fields if isinstance(fields, dict) else {}


def extra_columns(known: Collection[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row or message beyond the known ones; those of an `extra` are merged in.

    >>> extra_columns({"uri"}, {"uri": "a.jpg", "camera": 7, "extra": {"label": "cat"}})
    {'camera': 7, 'label': 'cat'}
    """
    others = {name: value for name, value in fields.items() if name not in known and name != "extra"}
    extra = fields.get("extra")
    if isinstance(extra, Mapping):
        return others | dict(extra)
    return others | {"extra": extra} if extra else others


class _TooLargeError(Exception):
    """A value is too large, too deep, or no JSON."""


def _number_before(fields: Mapping[Any, Any]) -> int:
    """The count of left-out fields in a row that is read as input."""
    number = fields.get(LEFT_OUT)
    return number if isinstance(number, int) and 0 <= number < 1_000_000 else 0


def _plain(value: Any, deepest: int) -> Any:
    """The value in types that all JSON readers agree on; stops at the bounds."""
    match value:
        case None | bool():
            return value
        case str() if len(value) <= _MOST_BYTES:
            return with_public_addresses(value)
        case int() if value.bit_length() <= _MOST_BYTES:
            return value if -(2**63) <= value < 2**63 else str(value)
        case float():
            return value if math.isfinite(value) else None
        case list() | tuple() if deepest and len(value) <= _MOST_BYTES:
            return [_plain(part, deepest - 1) for part in value]
        case dict() if deepest and len(value) <= _MOST_BYTES and all(isinstance(name, str) for name in value):
            return {name: _plain(part, deepest - 1) for name, part in value.items()}
    raise _TooLargeError
