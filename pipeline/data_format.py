"""Serialises records, counts and states as JSON, with bytes and arrays after it; nothing in it can run code.

    version, 1 byte | size of the JSON, 4 bytes | JSON | bytes and arrays, one after the other

The reader names the expected type, and gets a value of that type or a `DataError`. Fields are matched by name: unknown ones are
ignored, missing ones have their defaults. So a release reads the files of earlier and later ones. A type may check its values:
`Annotated[int, is_valid]` calls `is_valid`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import struct
import types
import typing
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

VERSION = 1
_HEAD = struct.Struct(">BI")
_DTYPES = ("float32", "int32")
_MAPPINGS = (dict, Counter, defaultdict, Mapping)
_LARGEST = 1 << 64  # ranks and hashes have 64 bits

_T = TypeVar("_T")
Buffer = bytes | memoryview


class DataError(ValueError):
    """Bytes do not have the expected type."""


def pack(value: Any) -> bytes:
    """A value as bytes: dataclasses, named tuples, dictionaries, lists, tuples, texts, numbers, bytes and arrays."""
    blobs = bytearray()
    header = json.dumps(to_plain(value, blobs)).encode()
    return _HEAD.pack(VERSION, len(header)) + header + blobs


def unpack(kind: type[_T], content: bytes) -> _T:
    """The value whose `pack` gives these bytes.

    Raises:
      DataError: The bytes are no value of this type.
    """
    value: _T = from_plain(kind, *parse(content))
    return value


def parse(content: bytes) -> tuple[Any, memoryview]:
    """The JSON of packed bytes, and the bytes after it.

    Raises:
      DataError: The bytes are not of this version of the format.
    """
    try:
        version, size = _HEAD.unpack_from(content)
        if version != VERSION or len(content) < _HEAD.size + size:
            raise DataError(f"expected version {VERSION} and {size} bytes of JSON, got version {version}")
        return json.loads(content[_HEAD.size : _HEAD.size + size]), memoryview(content)[_HEAD.size + size :]
    except (struct.error, ValueError, RecursionError) as err:
        raise DataError(f"no packed data: {err}") from err


def to_plain(value: Any, blobs: bytearray) -> Any:
    """A value as plain JSON types; appends its bytes and arrays to `blobs`."""
    if isinstance(value, (bytes, np.ndarray)):
        content = bytes(value) if isinstance(value, bytes) else value.tobytes()
        blobs += content
        beside = [] if isinstance(value, bytes) else [str(value.dtype), list(value.shape)]
        return [len(blobs) - len(content), len(content), *beside]
    if fields := _fields_of(type(value)):
        return {name: to_plain(getattr(value, name), blobs) for name in fields}
    if isinstance(value, Mapping):
        items = {key: to_plain(each, blobs) for key, each in value.items()}
        return items if all(isinstance(key, str) for key in items) else [[to_plain(key, blobs), items[key]] for key in items]
    return [to_plain(each, blobs) for each in value] if isinstance(value, (list, tuple)) else value


def from_plain(kind: Any, plain: Any, blobs: Buffer = b"") -> Any:
    """The value of a type from the result of `to_plain`.

    Raises:
      DataError: It is no value of this type.
    """
    try:
        return _read(kind, plain, blobs)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as err:
        raise DataError(str(err) or type(err).__name__) from err


def _read(kind: Any, plain: Any, blobs: Buffer) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        value = _read(args[0], plain, blobs)
        _check(all(is_valid(value) for is_valid in args[1:]), kind, plain)
        return value
    if origin in (Union, types.UnionType):
        return None if plain is None else _read(next(arg for arg in args if arg is not type(None)), plain, blobs)
    if origin in _MAPPINGS or kind in _MAPPINGS:
        return _mapping(origin or kind, args or (str, Any), plain, blobs)
    if origin in (list, tuple, Sequence):
        return _sequence(origin, args, plain, blobs)
    is_record = typing.is_typeddict(kind) or _fields_of(origin or kind)
    read = _blob if kind in (bytes, np.ndarray) else _fields if is_record else _scalar
    return read(kind, plain, blobs)


def _mapping(kind: Any, args: tuple[Any, ...], plain: Any, blobs: Buffer) -> Any:
    key, value = (*args, int)[:2]  # a Counter names its keys only
    items = {
        _read(key, name, blobs): _read(value, each, blobs) for name, each in (plain.items() if isinstance(plain, dict) else plain)
    }
    if kind is defaultdict:
        return defaultdict(value, items)
    return Counter(items) if kind is Counter else items


def _sequence(kind: Any, args: tuple[Any, ...], plain: Any, blobs: Buffer) -> Any:
    _check(isinstance(plain, list), kind, plain)
    if kind is not tuple or args[1:] == (...,):
        return (list if kind is list else tuple)(_read(args[0], each, blobs) for each in plain)
    return tuple(_read(each, part, blobs) for each, part in zip(args, plain, strict=True))


def _blob(kind: Any, plain: Any, blobs: Buffer) -> Any:
    start, size, *beside = plain
    _check(type(start) is int and type(size) is int and 0 <= start <= start + size <= len(blobs), kind, plain)
    content = bytes(blobs[start : start + size])
    if kind is bytes:
        return content
    dtype, shape = beside
    _check(dtype in _DTYPES, kind, plain)
    return np.frombuffer(content, dtype).reshape(shape)


def _fields(kind: Any, plain: Any, blobs: Buffer) -> Any:
    """A record of fields by name, or in order, as JSON writes a named tuple."""
    hints = _hints(kind)
    given = dict(zip(hints, plain, strict=False)) if isinstance(plain, list) else plain
    _check(isinstance(given, dict), kind, plain)
    known = {name: _read(hints[name], given[name], blobs) for name in hints if name in given}
    if typing.is_typeddict(kind):
        _check(kind.__required_keys__ <= known.keys(), kind, plain)
        return {**given, **known}
    return (get_origin(kind) or kind)(**known)


def _scalar(kind: Any, plain: Any, _blobs: Buffer) -> Any:
    if kind is float:
        _check(type(plain) in (int, float) and not math.isnan(plain), kind, plain)
        return float(plain)
    _check(kind is Any or type(plain) is kind, kind, plain)
    _check(type(plain) is not int or abs(plain) < _LARGEST, kind, plain)
    return plain


def _fields_of(kind: Any) -> tuple[str, ...]:
    """The names of a record's fields; empty for other types."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return tuple(getattr(kind, "_fields", ())) if isinstance(kind, type) and issubclass(kind, tuple) else ()


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """The types of a record's fields by name, with the arguments of a generic record."""
    record = get_origin(kind) or kind
    hints = get_type_hints(record, include_extras=True)
    arguments = dict(zip(getattr(record, "__parameters__", ()), get_args(kind), strict=False))
    return {name: _with(arguments, hints[name]) for name in _fields_of(record) or hints}


def _with(arguments: Mapping[Any, Any], hint: Any) -> Any:
    if isinstance(hint, TypeVar):
        return arguments.get(hint, Any)
    names = getattr(hint, "__parameters__", ())
    return hint[tuple(arguments.get(name, Any) for name in names)] if names else hint


def _check(holds: bool, kind: Any, plain: Any) -> None:
    if not holds:
        raise DataError(f"expected {getattr(kind, '__name__', kind)}, got {str(plain)[:80]}")
