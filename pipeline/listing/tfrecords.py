"""Reads images from TFRecord files of `tf.Example`s; a damaged record becomes a dead letter, and the others are read.

A file is records of: length as uint64, masked CRC-32C of the length, content, masked CRC-32C of the content, little-endian
(https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details). The readers of TensorFlow, tfx-bsl and Beam
end at the first damage, so this module reads the framing;
tfx-bsl decodes the examples. Keys are those of the TF Object Detection API.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import google_crc32c

from models.base.project import pip_install
from pipeline.failures import Failure, ImageError
from pipeline.listing.names import CONTROL, bad_name, record_range
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.storage.fetch import open_file

_HEAD = struct.Struct("<QI")
_MASK_DELTA = 0xA282EAD8
_LONGEST = 1 << 40  # bytes of a record: a longer one is a lie
_ENCODED, _NAMES = "image/encoded", ("image/source_id", "image/filename")


def images_of_file(shard: ImageRef, max_bytes: int) -> Iterator[EncodedImage | DeadLetter]:
    """The images of one TFRecord file, each read when it is asked for.

    Args:
      shard: The file. `<file>@<start>-<end>` names the records that begin in this range of its bytes, `<file>@<start>-` the rest:
        so do dead letters, which can therefore be given as input again.
      max_bytes: A larger record is refused.

    Yields:
      For each record its image or a dead letter; one dead letter for all records that can no longer be told apart.
      An image's URI is its source id, else its file name, else a hash of its bytes; its generation is a hash of its bytes.
    """
    path, start, end = record_range(shard.uri) or (shard.uri, 0, None)
    try:
        with open_file(path) as opened, _as_written(opened) as file:
            file.seek(start)
            try:
                while end is None or start < end:
                    asked = time.monotonic()
                    head = file.read(_HEAD.size)
                    if not head:
                        return
                    length = _length(head)
                    if length is None:
                        raise EOFError("its length is wrong")
                    following = start + _HEAD.size + length + 4
                    place, what = f"{path}@{start}-{following}", f"{path}: the record of {length} bytes at byte {start}"
                    try:
                        image = _image_of(_content(file, what, length, max_bytes), place, what, asked)
                    except ImageError as err:
                        image = err.failure.dead_letter(ImageRef(place))
                    yield image
                    start = following
            except (EOFError, zlib.error, gzip.BadGzipFile) as err:  # behind a damaged length nothing can be found
                size = None if isinstance(file, gzip.GzipFile) else file.seek(0, 2)  # the rest of a gzipped one may be endless
                lost = f"its last {size - start} of {size} bytes" if size else "all that is gzipped behind it"
                message = f"{path} is damaged at byte {start} ({err}): {lost} cannot be read"
                yield Failure("read", "broken_file", message).dead_letter(ImageRef(f"{path}@{start}-"))
    except ImageError as err:
        yield err.failure.dead_letter(ImageRef(f"{path}@{start}-{end or ''}") if start else shard)


def _length(head: bytes) -> int | None:
    """A record's length; None where it is damaged."""
    length, checksum = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
    return int(length) if checksum == _masked_crc(head[:8]) and length <= _LONGEST else None


def _content(file: BinaryIO, what: str, length: int, max_bytes: int) -> bytes:
    """A record's bytes; one that is too large is passed over without its bytes being taken.

    Raises:
      EOFError: The file ends within it.
      ImageError: It is too large, or damaged.
    """
    content = file.read(length) if length <= max_bytes else b""
    if length > max_bytes:
        file.seek(length, 1)
    checksum = file.read(4)
    if len(checksum) < 4:
        raise EOFError("the record there is not all there")
    if length > max_bytes:
        message = f"{what}: expected at most {max_bytes / 1e6:g} MB (max_file_mb sets the limit)"
        raise ImageError("read", "too_large_file", message)
    if int.from_bytes(checksum, "little") != _masked_crc(content):
        raise ImageError("read", "bad_checksum", f"{what} is not as it was written: its checksum differs")
    return content


def framed(content: bytes) -> bytes:
    """A record as a file has it, for those that write one."""
    length = len(content).to_bytes(8, "little")
    return length + _masked_crc(length).to_bytes(4, "little") + content + _masked_crc(content).to_bytes(4, "little")


def _masked_crc(content: bytes) -> int:
    crc: int = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _as_written(opened: Any) -> Any:
    """The file as it was written before it was gzipped, if it was, whatever its name; TensorFlow's writer adds no ending."""
    head = opened.read(_HEAD.size)
    opened.seek(0)
    return gzip.GzipFile(fileobj=opened) if head.startswith(b"\x1f\x8b") and _length(head) is None else opened


def _image_of(record: bytes, place: str, what: str, asked: float) -> EncodedImage | DeadLetter:
    try:
        content, name = _decode_example(record)
    except RuntimeError as err:
        raise ImageError("read", "no_example", f"{what} is no tf.Example") from err
    if CONTROL.search(name):
        return bad_name(name).dead_letter(ImageRef(place))
    if not isinstance(content, bytes):
        message = f"{what} has {content} as {_ENCODED!r}; expected the bytes of an image"
        return Failure("read", "no_image", message).dead_letter(ImageRef(name or place, record=place))
    digest = hashlib.sha256(content).hexdigest()[:16]
    ref = ImageRef(name or f"tfrecord:{digest}", generation=digest, size_bytes=len(content), record=place)
    return EncodedImage(ref, content, time.monotonic() - asked, time.time())


def _decode_example(example: bytes) -> tuple[bytes | str, str]:
    """The encoded image of a serialized `tf.Example`, or what it has instead; and its name, which may be empty.

    Raises:
      RuntimeError: It is no example.
      ImageError: The package that decodes it is not installed.
    """
    columns = _decoder().DecodeBatch([example])
    values = {name: columns.column(name)[0].as_py() or [] for name in (_ENCODED, *_NAMES) if name in columns.schema.names}
    encoded = values.get(_ENCODED) or ["nothing"]
    named = (values[name][0] for name in _NAMES if values.get(name))
    name = next((text for text in map(_text, named) if text), "")
    return encoded[0] if isinstance(encoded[0], bytes) else f"{encoded[0]!s:.20}", name


def _text(name: Any) -> str:
    return name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else str(name)


@functools.cache
def _decoder() -> Any:
    try:
        from tfx_bsl.coders.example_coder import ExamplesToRecordBatchDecoder
    except ImportError as err:
        message = f"examples are decoded by tfx-bsl: {pip_install('tensorflow')}"
        raise ImageError("decode", "no_decoder", message) from err
    return ExamplesToRecordBatchDecoder()
