"""Records and statistics as typed MessagePack, for workers, shuffles and a runner's state; nothing in it can run code.

msgspec matches fields by name: it ignores unknown ones, and gives missing ones their defaults. So a job that is updated goes on
with what an earlier release left in its shuffles and state.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_origin

import apache_beam as beam
import msgspec
import numpy as np
from apache_beam.coders import Coder
from apache_beam.typehints import typehints

from pipeline.records import DeadLetter, DetectedImage, EncodedImage, ImageRef, name_bytes, name_of

_UNICODE, _ESCAPED = b"\2", b"\3"  # first bytes; the release before wrote 1
_DTYPES = ("float32", "int32")
_RECORDS = {record.__name__.encode(): record for record in (ImageRef, EncodedImage, DetectedImage, DeadLetter)}
_T = TypeVar("_T")
_making = threading.Lock()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def pack(value: Any) -> bytes:
    """A record, statistics, or a container of them as bytes; `unpack` reads them."""
    try:
        return _UNICODE + msgspec.msgpack.encode(value, enc_hook=_array_parts)
    except UnicodeEncodeError:  # the bytes of a file's name may be no text
        plain = msgspec.to_builtins(value, enc_hook=_array_parts, builtin_types=(bytes,))
        return _ESCAPED + msgspec.msgpack.encode(_with_texts(plain, lambda text: name_bytes(text).decode("latin-1")))


def unpack(kind: type[_T], content: bytes) -> _T:
    """The value of a type whose `pack` gives these bytes.

    Raises:
      ValueError: The bytes are no value of this type.
    """
    decoder = _decoder(kind)
    try:
        if content[:1] == _UNICODE:
            return decoder.decode(memoryview(content)[1:])
        if content[:1] == _ESCAPED:
            plain = _with_texts(msgspec.msgpack.decode(content[1:]), lambda text: name_of(text.encode("latin-1")))
            return msgspec.convert(plain, kind, dec_hook=_built)
        raise ValueError("its first byte is of no format that this release knows")
    except (ValueError, TypeError, RecursionError) as err:
        raise ValueError(f"expected a {kind.__name__}: {err}") from err


def _decoder(kind: type[_T]) -> msgspec.msgpack.Decoder[_T]:
    """The decoder of a type. One thread makes it: msgspec 0.22 crashes the process where two meet a type for the first time."""
    if kind not in _decoders:
        with _making:
            if kind not in _decoders:
                _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_built)
    return _decoders[kind]


def _with_texts(plain: Any, change: Callable[[str], str]) -> Any:
    if isinstance(plain, str):
        return change(plain)
    if isinstance(plain, dict):
        return {_with_texts(key, change): _with_texts(value, change) for key, value in plain.items()}
    return tuple(_with_texts(each, change) for each in plain) if isinstance(plain, (list, tuple)) else plain


def _array_parts(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    return str(array.dtype), array.shape, array.tobytes()


def _built(kind: Any, parts: Any) -> Any:
    """A value of a type that msgspec does not know, from its parts."""
    if kind is np.ndarray:
        dtype, shape, content = parts
        if dtype not in _DTYPES:
            raise ValueError(f"expected an array of {' or '.join(_DTYPES)}, got {dtype!r:.80}")
        return np.frombuffer(content, dtype).reshape(shape)
    key, value = (*get_args(kind), int)[:2]  # a Counter names its keys only
    counts = msgspec.convert(parts, dict[key, value])  # type: ignore[valid-type]
    return Counter(counts) if get_origin(kind) is Counter else defaultdict(value, counts)


class RecordCoder(Coder):
    """A Beam coder for records, and unions of them: the name of the record's class, a colon, the record."""

    def encode(self, record: Any) -> bytes:
        """The bytes of a record."""
        return type(record).__name__.encode() + b":" + pack(record)

    def decode(self, content: bytes) -> Any:
        """The record of these bytes.

        Raises:
          ValueError: They are no record.
        """
        name, _, packed = content.partition(b":")
        if name not in _RECORDS:
            raise ValueError(f"expected a record, got {content[:80]!r}")
        return unpack(_RECORDS[name], packed)

    def is_deterministic(self) -> bool:
        """Equal records have equal bytes."""
        return True

    @classmethod
    def from_type_hint(cls, typehint: Any, _registry: Any) -> RecordCoder:
        """The coder of a record or of a union of records.

        Raises:
          ValueError: The type is another one.
        """
        members = getattr(typehint, "union_types", ()) if isinstance(typehint, typehints.TypeConstraint) else get_args(typehint)
        if not {*(members or [typehint])} <= {*_RECORDS.values()}:
            raise ValueError(f"expected records, got {typehint}")
        return cls()


def register_record_coder() -> None:
    """Registers `RecordCoder` for steps whose output type is a record, or a union of records."""
    for record in _RECORDS.values():
        beam.coders.registry.register_coder(record, RecordCoder)
    beam.coders.registry.register_fallback_coder(RecordCoder)  # a union has no coder of its own
