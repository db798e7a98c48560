"""PNG (RFC 2083, and its third edition for animations): one header, and only the chunks on which pixels depend.

Texts, profiles and later frames never reach a decoder: a thousand compressed texts of 8 KB each unpack to 8 GB.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib

from pipeline.detect.headers.deflate import check_deflate
from pipeline.detect.headers.exif import orientation
from pipeline.detect.headers.header import Header, corrupt, too_much

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_NEEDED = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_END = b"\0\0\0\0IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
_OPENCV_BYTES = 4 << 20  # OpenCV, faster by a seventh, unpacks what comes behind the last row too: a thousand bytes for each
_MOST_CHUNKS = 100_000  # encoders write 8 KB and more a chunk


@dataclasses.dataclass(slots=True)
class _Chunks:
    """What a walk over the chunks found."""

    kept: list[memoryview] = dataclasses.field(default_factory=list)
    data: list[memoryview] = dataclasses.field(default_factory=list)
    exif: bytes = b""
    whole: bool = False


def read_png(content: bytes) -> Header:
    """Reads a PNG file; of an animation, the image that a viewer of plain PNG shows.

    Raises:
      ImageError: It is damaged, or has far more bytes or chunks than its pixels can need.
    """
    chunks = _read_chunks(content)
    width, height, raw = _read_ihdr(content)
    size = sum(map(len, chunks.data))
    if size > 2 * raw + 65536:
        raise too_much(f"{size} compressed bytes for {raw} bytes of pixels in a PNG")
    check_deflate([chunks.data], raw)
    unchanged = chunks.whole and len(chunks.kept) == 1 and len(chunks.kept[0]) == len(content)
    return Header(
        "PNG",
        (width, height),
        content if unchanged else b"".join(chunks.kept) + (b"" if chunks.whole else _END),
        1e-9 * (6 * width * height + 5 * raw + 2 * size),
        "opencv" if size <= _OPENCV_BYTES else "pillow",
        orientation=orientation(chunks.exif),
        bytes_per_pixel=7 if size <= _OPENCV_BYTES else 15,
        cut=not chunks.whole,
    )


def _read_chunks(content: bytes) -> _Chunks:
    view, found = memoryview(content), _Chunks()
    at, start = 8, 0
    for _ in range(_MOST_CHUNKS):
        if at + 12 > len(content) or found.whole:
            break
        length, kind = struct.unpack_from(">I4s", content, at)
        end = at + 12 + length
        if end > len(content):
            break
        if (kind == b"IHDR") != (at == 8):
            raise corrupt("a PNG has one IHDR, and it comes first")
        if kind == b"IDAT":
            found.data.append(view[at + 8 : end - 4])
        elif kind not in _NEEDED:
            found.kept.append(view[start:at])
            start = end
            if kind == b"eXIf":
                found.exif = found.exif or content[at + 8 : end - 4]
        at, found.whole = end, kind == b"IEND"
    else:
        raise too_much(f"more than {_MOST_CHUNKS} chunks in a PNG")
    if at == 8:
        raise corrupt("the PNG ends within its first chunk")
    found.kept.append(view[start:at])
    return found


def _read_ihdr(content: bytes) -> tuple[int, int, int]:
    """(width, height, bytes of the unpacked pixels with a filter byte a row)."""
    length, width, height, bits, colour, packing, filters, interlaced = struct.unpack_from(">I4xIIBBBBB", content, 8)
    if length != 13 or colour not in _CHANNELS or bits not in (1, 2, 4, 8, 16) or packing or filters or interlaced > 1:
        raise corrupt("a PNG's IHDR with values that do not exist")
    if not 0 < width < 2**31 or not 0 < height < 2**31:
        raise corrupt(f"a PNG of {width} x {height} pixels")
    raw = height * (1 + (width * bits * _CHANNELS[colour] + 7) // 8)
    return width, height, raw + 4 * height * interlaced  # seven passes have 15 rows for 8, each with a filter byte and padding
