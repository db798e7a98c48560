"""Reads images from zip and tar archives, one member at a time; what cannot be read becomes a dead letter, and the rest is read.

The reader writes no member to the disk and follows no link. A zip file needs its directory in memory, a tar file one header and a
hash of each name; both are bounded.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import math
import posixpath
import re
import stat
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from models.base.image_uris import archive_member, video_frame
from pipeline.failures import Failure, ImageError, one_line
from pipeline.image_formats import HEAD_BYTES, format_by_start
from pipeline.limits import MEMORY
from pipeline.listing.names import CONTROL, names_image, record_range
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.storage.fetch import open_file
from pipeline.storage.store import is_transient_error

_BLOCK = 512  # of a tar file: each header is one
_HEADERS_BYTES = 1 << 20  # of one member's headers, which tarfile takes into memory
_MEMBERS_BYTES = 2e9  # of memory for what is known of all members
_OF_DIRECTORY = 12  # bytes of memory for each of a zip file's directory, measured: 500 for the least entry of 47
_OF_NAME = 160  # bytes of memory for each name that was seen, with its content
_DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, EOFError, struct.error),
    *(ValueError, OverflowError, NotImplementedError, IndexError),
)
_SECOND = "has the name of an earlier member, which is read"
_ZIP_UTF8 = 0x800  # a flag
_KNOWN_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # zipfile unpacks others without a limit on memory
_UNPACK = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\0", lzma.open))


class _Member(NamedTuple):
    """A file in an archive."""

    name: str
    size: int  # in bytes, as the archive gives it
    open: Callable[[], AbstractContextManager[Any]]
    fault: str = ""  # why it has no readable content


def images_of_archive(
    archive: ImageRef, max_bytes: int, others: Sequence[ImageRef] = ()
) -> Iterator[EncodedImage | DeadLetter | str]:
    """The images of one archive, each read when it is asked for, in one pass.

    Args:
      archive: The archive, or one member: `<archive>#<member>`.
      max_bytes: A larger member is refused.
      others: The same archive, or further members of it.

    Yields:
      For each image its bytes or a dead letter; for each other member its name; one dead letter of the archive for all members
      behind damage. An image's URI is `<archive>#<member>`, its generation its size and CRC-32. Hidden members and folders are
      left out, as in folders on a disk. Of images with one name the first is read, and others are dead letters; of copies of the
      first one come the names.
    """
    path, _ = archive_member(archive.uri) or (archive.uri, None)
    wanted = {(archive_member(ref.uri) or ("", None))[1] or "": ref for ref in (archive, *others)}
    whole, missing = wanted.pop("", None), dict(wanted)
    is_zip = path.lower().endswith(".zip")
    seen = dict[int, int]()
    try:
        with open_file(path) as opened, _damage(path):
            for member in _in_zip(opened) if is_zip else _in_tar(opened):
                asked = wanted.get(member.name) or (None if _is_hidden(member.name) else whole)
                if not asked:
                    continue
                missing.pop(member.name, None)
                ref = ImageRef(f"{path}#{member.name}", extra=asked.extra)
                try:
                    yield _unless_seen(_image_of(member, ref, max_bytes), member.name, seen)
                except _DAMAGE as err:
                    if not is_zip or is_transient_error(err):
                        raise
                    yield _bad(ref, f"is damaged ({one_line(err)})")  # if not by its name, perhaps by its content an image
                if not (whole or missing):
                    return
        for name, ref in missing.items():
            yield Failure("read", "not_found", f"{path} has no member {name!r}").dead_letter(ref)
    except ImageError as err:
        yield from (err.failure.dead_letter(ref) for ref in ([whole] if whole else missing.values()))


@contextlib.contextmanager
def _damage(path: str) -> Iterator[None]:
    """Maps what makes the rest of an archive unreadable to an `ImageError`; failures of storage pass."""
    try:
        yield
    except _DAMAGE as err:
        if is_transient_error(err):
            raise
        message = f"{path} is damaged, or no archive of this kind: the members behind that place cannot be read ({one_line(err)})"
        raise ImageError("read", "broken_file", message) from err


def _is_hidden(name: str) -> bool:
    """Whether a part of a name begins with a dot, as macOS adds them; `..` is no such part."""
    return any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))


class _Bounded:
    """A file of which no more than `most` bytes are read, all in all; `last` is the end of what was read last."""

    def __init__(self, file: Any, most: float, error: Exception) -> None:
        self._file = file
        self._error = error
        self._taken = 0
        self.most = most
        self.last = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        if self._taken + size > self.most:
            raise self._error
        content: bytes = self._file.read(size)
        self._taken += len(content)
        self.last = content[-_BLOCK:]
        return content


def _in_zip(opened: Any) -> Iterator[_Member]:
    most = MEMORY.budget(_MEMBERS_BYTES) / _OF_DIRECTORY
    too_much = zipfile.BadZipFile(f"its directory has more than the {most / 1e6:.1f} MB that fit in memory; divide it")
    bounded = _Bounded(opened, most, too_much)
    with zipfile.ZipFile(bounded) as archive:
        bounded.most = math.inf
        for info in archive.infolist():
            if not info.is_dir():
                yield _Member(_name_in_zip(info), info.file_size, partial(archive.open, info), _fault_in_zip(info))


def _name_in_zip(info: zipfile.ZipInfo) -> str:
    """The name of a member; also one in UTF-8 that lacks the flag of it, as macOS writes them."""
    with contextlib.suppress(UnicodeError):
        return info.filename if info.flag_bits & _ZIP_UTF8 else info.filename.encode("cp437").decode()
    return info.filename


def _fault_in_zip(info: zipfile.ZipInfo) -> str:
    if info.header_offset < 0:
        return "is damaged: its place is before the beginning of the archive"
    if info.flag_bits & 0x1:
        return "is encrypted"
    if stat.S_ISLNK(info.external_attr >> 16):
        return "is a link"
    if info.compress_type not in _KNOWN_METHODS:
        return f"is compressed by method {info.compress_type}; expected deflated or stored"
    return ""


def _in_tar(opened: Any) -> Iterator[_Member]:
    start = opened.read(6)
    opened.seek(0)
    unpack = next((unpack for magic, unpack in _UNPACK if start.startswith(magic)), None)
    too_much = tarfile.ReadError(f"the headers of a member have more than {_HEADERS_BYTES} bytes")
    unpacked = unpack(opened, "rb") if unpack else opened
    blocks = _Bounded(unpacked, _HEADERS_BYTES, too_much)
    left = MEMORY.budget(_MEMBERS_BYTES) / _OF_NAME
    archive: Any  # has attributes of which its type does not know
    with tarfile.open(fileobj=blocks, mode="r|", bufsize=_BLOCK, encoding="utf-8") as archive:
        for info in archive:
            archive.members = []  # else it keeps all
            blocks.most = archive.offset + _HEADERS_BYTES
            left -= 1
            if left < 0:
                raise tarfile.ReadError("it has more members than fit in memory; divide it")
            if not info.isdir():
                fault = "" if info.isreg() else "is a link" if info.issym() or info.islnk() else "is no file"
                yield _Member(info.name, info.size, partial(archive.extractfile, info), fault)
    if len(blocks.last) < _BLOCK or any(blocks.last):  # tarfile ends without a word at a damaged header
        raise tarfile.ReadError("expected a header or two blocks of zeros at the end")
    behind = b""
    with contextlib.suppress(*_DAMAGE):  # of the end of what is compressed
        behind = unpacked.read(_HEADERS_BYTES)
    if any(behind):
        raise tarfile.ReadError("it goes on behind its end, perhaps with a second archive, which `tar -i` unpacks")


def _image_of(member: _Member, ref: ImageRef, max_bytes: int) -> EncodedImage | DeadLetter | str:
    """The image that a member is, or a dead letter, or its name where it is no image."""
    fault, is_named = member.fault or _fault_of_name(member.name), names_image(member.name)
    if fault:
        return _bad(ref, fault) if is_named or ".." in member.name else member.name
    started = time.monotonic()
    with member.open() as file:
        content = file.read(min(member.size, HEAD_BYTES))
        if not (is_named or format_by_start(content)):
            return member.name
        if member.size > max_bytes:
            size = f"{member.size / 1e6:.1f} MB; expected at most {max_bytes / 1e6:g} MB (max_file_mb sets the limit)"
            return Failure("read", "too_large_file", f"{ref.uri} has {size}").dead_letter(ref)
        content += file.read(member.size - len(content))
    if len(content) < member.size:
        return _bad(ref, f"is damaged: it has {len(content)} bytes of {member.size}")
    known = ImageRef(ref.uri, f"{len(content)}-{zlib.crc32(content):08x}", len(content), extra=ref.extra)
    return EncodedImage(known, content, time.monotonic() - started, time.time())


def _unless_seen(found: EncodedImage | DeadLetter | str, name: str, seen: dict[int, int]) -> EncodedImage | DeadLetter | str:
    """An image that is the first of its name, and is noted; of a later one its name, or a dead letter if it is another image."""
    if not isinstance(found, EncodedImage):
        return found
    content = hash(found.ref.generation)
    if hash(name) in seen:  # of another generation than the first one, whose row is to count
        return name if seen[hash(name)] == content else _bad(replace(found.ref, generation="", size_bytes=0), _SECOND)
    seen[hash(name)] = content
    return found


def _fault_of_name(name: str) -> str:
    if name.startswith("/") or ".." in re.split(r"[/\\]", name) or CONTROL.search(name):
        return "has a name with control characters, or of no file below a folder"
    if video_frame(name):
        return "is a video within an archive, which is not opened; unpack the archive"
    found = archive_member(posixpath.basename(name))
    is_container = (found and not found[1]) or record_range(name)
    return "is an archive or TFRecord file within an archive, which is not opened" if is_container else ""


def _bad(ref: ImageRef, fault: str) -> DeadLetter:
    return Failure("read", "bad_member", f"{ref.uri[:300]!r} {fault}").dead_letter(ref)
