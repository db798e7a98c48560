"""Reads PNG headers (RFC 2083, and its third edition for animations), and keeps only the chunks on which pixels depend.

Texts, profiles and later frames never reach a decoder: a thousand compressed texts of 8 KB each unpack to 8 GB.
"""

from __future__ import annotations

import struct
import zlib

from pipeline.feed.headers.deflate import check_deflate
from pipeline.feed.headers.exif import orientation
from pipeline.feed.headers.header import Header, corrupt, too_much

_NEEDED = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_END = b"\0\0\0\0IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
_OPENCV_BYTES = 4 << 20  # OpenCV, faster by a seventh, also unpacks bytes behind the last row: a thousand for each
_MOST_CHUNKS = 100_000  # encoders write 8 KB and more a chunk


def read_png(content: bytes) -> Header:
    """Reads a PNG file; of an animation the default image.

    Raises:
      ImageError: The file is damaged, or has far more bytes or chunks than its pixels can need.
    """
    kept, data, exif, whole = _read_chunks(content)
    width, height, raw = _read_ihdr(content)
    size = sum(map(len, data))
    if size > 2 * raw + 65536:
        raise too_much(f"{size} compressed bytes for {raw} bytes of pixels in a PNG")
    check_deflate([data], raw)
    unchanged = whole and len(kept) == 1 and len(kept[0]) == len(content)
    return Header(
        "PNG",
        (width, height),
        content if unchanged else b"".join(kept) + (b"" if whole else _END),
        1e-9 * (6 * width * height + 5 * raw + 2 * size),
        "opencv" if size <= _OPENCV_BYTES else "pillow",
        orientation=orientation(exif),
        bytes_per_pixel=7 if size <= _OPENCV_BYTES else 15,
        cut=not whole,
    )


def _read_chunks(content: bytes) -> tuple[list[memoryview], list[memoryview], bytes, bool]:
    """Returns (parts of the file to keep, compressed pixels, Exif, whether the file is whole)."""
    view, kept, data, exif = memoryview(content), [], [], b""
    at, start, whole = 8, 0, False
    for _ in range(_MOST_CHUNKS):
        if at + 12 > len(content) or whole:
            break
        length, kind = struct.unpack_from(">I4s", content, at)
        end = at + 12 + length
        if end > len(content):
            break
        if (kind == b"IHDR") != (at == 8):
            raise corrupt("a PNG has one IHDR, and it comes first")
        if kind == b"IDAT":
            data.append(view[at + 8 : end - 4])
        elif kind not in _NEEDED:
            kept.append(view[start:at])
            start = end
            if kind == b"eXIf":
                exif = exif or content[at + 8 : end - 4]
        at, whole = end, kind == b"IEND"
    else:
        raise too_much(f"more than {_MOST_CHUNKS} chunks in a PNG")
    if at == 8:
        raise corrupt("the PNG ends within its first chunk")
    kept.append(view[start:at])
    return kept, data, exif, whole


def _read_ihdr(content: bytes) -> tuple[int, int, int]:
    """(width, height, bytes of the unpacked pixels with a filter byte a row)."""
    length, width, height, bits, colour, packing, filters, interlaced = struct.unpack_from(">I4xIIBBBBB", content, 8)
    if length != 13 or colour not in _CHANNELS or bits not in (1, 2, 4, 8, 16) or packing or filters or interlaced > 1:
        raise corrupt("a PNG's IHDR with values that do not exist")
    if not 0 < width < 2**31 or not 0 < height < 2**31:
        raise corrupt(f"a PNG of {width} x {height} pixels")
    raw = height * (1 + (width * bits * _CHANNELS[colour] + 7) // 8)
    return width, height, raw + 4 * height * interlaced  # seven passes have 15 rows for 8, each with a filter byte and padding
