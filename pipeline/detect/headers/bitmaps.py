"""Formats whose pixels follow a short header: BMP, PNM, Radiance HDR, Targa."""

from __future__ import annotations

import re
import struct

from pipeline.detect.headers.header import Header, Size, corrupt, not_read

_PNM_FIELD = re.compile(rb"(?:[ \t\r\n]|#[^\r\n]*[\r\n])+(\d{1,9})")
_RADIANCE_SIZE = re.compile(rb"([-+][XY]) +(\d{1,9}) +([-+][XY]) +(\d{1,9})\n")
_MOST_HEADER = 65536
TARGA_END = b"TRUEVISION-XFILE.\0"


def read_bmp(content: bytes) -> Header:
    """Reads a BMP file (BITMAPCOREHEADER, BITMAPINFOHEADER and its successors).

    Raises:
      ImageError: It is damaged, or holds a JPEG or PNG.
    """
    if len(content) < 26:
        raise corrupt("the BMP ends within its header")
    (header_size,) = struct.unpack_from("<I", content, 14)
    compression = 0
    if header_size == 12:
        width, height = struct.unpack_from("<HH", content, 18)
    else:
        width, height = struct.unpack_from("<ii", content, 18)
        compression = int.from_bytes(content[30:34], "little")
    if compression not in (0, 1, 2, 3, 6):
        raise not_read(f"a BMP with compression {compression}; plain, RLE and bit fields are read")
    if width <= 0 or height in (0, -(2**31)):
        raise corrupt(f"a BMP of {width} x {height} pixels")
    wh = width, abs(height)
    runs = compression in (1, 2)  # which Pillow unpacks run by run in Python
    return Header(
        "BMP",
        wh,
        content,
        25e-9 * wh[0] * wh[1] + 5e-9 * len(content) * runs,
        ("opencv",) if runs else ("opencv", "pillow"),
        bytes_per_pixel=15,
    )


def read_pnm(content: bytes) -> Header:
    """Reads a PBM, PGM or PPM file, binary or as text (https://netpbm.sourceforge.net/doc/pnm.html).

    Raises:
      ImageError: Its header is damaged.
    """
    values: list[int] = []
    at = 2
    for name in ("width", "height", "maximum")[: 2 if content[1:2] in b"14" else 3]:
        found = _PNM_FIELD.match(content, at, at + _MOST_HEADER)
        if not found:
            raise corrupt(f"a PNM without {name}")
        values.append(int(found[1]))
        at = found.end()
    if min(values) < 1 or values[2:] > [65535]:
        raise corrupt(f"a PNM whose header says {values}")
    text = content[1:2] in b"123"
    plain = content[:2] + b"\n" + b" ".join(b"%d" % value for value in values[:2]) + b"".join(b"\n%d" % v for v in values[2:])
    pixels = values[0] * values[1]
    return Header(
        "PPM",
        (values[0], values[1]),
        b"".join(
            (plain, b"\n", memoryview(content)[at + 1 :], b"\n" * text)
        ),  # text: a last number is read up to what follows it
        1e-9 * (15 * pixels + (20 if text else 1) * len(content)),
        bytes_per_pixel=10,
    )


def read_radiance(content: bytes) -> Header:
    """Reads a Radiance picture (https://radsite.lbl.gov/radiance/refer/filefmts.pdf).

    What the decoder sees is a header of three lines: it would read a comment of more than 127 bytes as several lines.

    Raises:
      ImageError: It has no size where one must stand, or another format than RGBE.
    """
    end = content.find(b"\n\n", 0, _MOST_HEADER)
    found = _RADIANCE_SIZE.match(content, end + 2) if end >= 0 else None
    if not found:
        raise corrupt("a Radiance picture without its size behind the first empty line")
    formats = {line for line in content[:end].split(b"\n")[1:] if line.startswith(b"FORMAT=")}
    if formats - {b"FORMAT=32-bit_rle_rgbe"}:
        raise not_read(f"a Radiance picture of {formats.pop()[:40]!r}; FORMAT=32-bit_rle_rgbe is read")
    first, second = int(found[2]), int(found[4])
    if not first or not second or found[1][1:] == found[3][1:]:
        raise corrupt("a Radiance picture without pixels")
    wh = (first, second) if found[1].endswith(b"X") else (second, first)
    return Header(
        "HDR",
        wh,
        b"".join((b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n", memoryview(content)[found.start() :])),
        1e-9 * (30 * wh[0] * wh[1] + 5 * len(content)),
        bytes_per_pixel=16,
    )


def read_targa(content: bytes) -> Header:
    """Reads a Targa file of version 2: only these say at their end what they are.

    Raises:
      ImageError: Its header has values that do not exist.
    """
    _, colour_map, kind = struct.unpack_from("<BBB", content)
    wh: Size = struct.unpack_from("<HH", content, 12)
    if colour_map > 1 or kind not in (1, 2, 3, 9, 10, 11) or not all(wh):
        raise corrupt("a Targa header with values that do not exist")
    return Header("TGA", wh, content, 1e-9 * (25 * wh[0] * wh[1] + 5 * len(content)), ("pillow",), bytes_per_pixel=15)
