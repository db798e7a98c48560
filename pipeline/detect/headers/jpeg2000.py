"""JPEG 2000 (ITU-T T.800): one codestream, and how finely it is cut.

A decoder takes 14 KB for each tile, 1.8 KB for each precinct and 400 bytes for each code block before it looks at their bytes:
175 bytes of file took 1.7 GB. Every place where a size of these can be changed is therefore looked at.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from collections.abc import Iterator

from pipeline.detect.headers.boxes import read_box
from pipeline.detect.headers.header import Header, Size, corrupt, not_read, too_much

BOXES = b"\0\0\0\x0cjP  \r\n\x87\n"
CODESTREAM = b"\xff\x4f\xff\x51"
_SIZ, _COD, _COC, _POC, _SOT, _SOD = 0xFF51, 0xFF52, 0xFF53, 0xFF5F, 0xFF90, 0xFF93
_MARKERS = {_SIZ, _COD, _COC, _POC}
_MARKERS |= {0xFF00 | low for low in (0x50, 0x55, 0x56, 0x57, 0x58, 0x59, 0x5C, 0x5D, 0x5E, 0x60, 0x61, 0x63, 0x64)}
_TILE_PART = re.compile(rb"\xff\x90\0\x0a")  # cannot stand in packets
_SRGB, _GREY, _SYCC, _CMYK = 16, 17, 18, 12
_MOST_TILES = 65_535  # of the format
_MOST_SEGMENTS = 300_000  # four a tile, where there are most tiles


@dataclasses.dataclass(slots=True)
class _Cuts:
    """The finest cuts that any part of the codestream asks for."""

    layers: int = 1
    levels: int = 0
    block: int = 4096
    precinct_log2: int = 15
    orders: int = 1
    segments: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Siz:
    """The size marker: `offsets` are left, top, of the image and of its tiles; components are (depth, steps across, down)."""

    wh: Size
    tile_wh: Size
    offsets: tuple[int, int, int, int]
    components: list[tuple[int, int, int]]

    @property
    def tiles(self) -> int:
        left, top, tile_left, tile_top = self.offsets
        across = math.ceil((left + self.wh[0] - tile_left) / self.tile_wh[0])
        return across * math.ceil((top + self.wh[1] - tile_top) / self.tile_wh[1])


def read_jpeg2000(content: bytes) -> Header:
    """Reads a JP2 file or a bare codestream.

    Raises:
      ImageError: It is damaged, holds several codestreams or a palette, or is cut more finely than its pixels can need.
    """
    box_wh, colour, stream = _read_boxes(content) if content.startswith(BOXES) else (None, 0, content)
    siz = _read_siz(stream)
    cuts = _read_cuts(stream, len(siz.components))
    if box_wh and box_wh != siz.wh:
        raise corrupt(f"the box says {box_wh[0]} x {box_wh[1]} pixels, the codestream {siz.wh[0]} x {siz.wh[1]}")
    seconds, held = _cost(siz, cuts)
    pixels = siz.wh[0] * siz.wh[1]
    opencv = _opencv_reads(siz, colour)
    seconds += 1e-9 * (30 * pixels + 130 * len(stream)) * (1 if opencv else 2)
    return Header(
        "JPEG2000",
        siz.wh,
        _boxed(siz, colour, stream),
        seconds,
        ("opencv",) if opencv else ("pillow",),
        bytes_per_pixel=max(20, 4 + 5.5 * len(siz.components)) + held / pixels,
    )


def _read_boxes(content: bytes) -> tuple[Size, int, bytes]:
    """(size, enumerated colour space, codestream) of a JP2 file."""
    found = {}
    for kind, body in _boxes(content, 12):
        if kind in (b"jp2h", b"jp2c"):
            if kind in found:
                raise corrupt(f"a JPEG 2000 file with several {kind.decode()} boxes")
            found[kind] = body
    if len(found) < 2:
        raise corrupt("a JPEG 2000 file without a header and a codestream")
    inner = list(_boxes(found[b"jp2h"], 0))
    if any(kind == b"pclr" for kind, _ in inner):
        raise not_read("a JPEG 2000 file with a palette, which is not read here")
    headers = [body for kind, body in inner if kind == b"ihdr"]
    if len(headers) != 1:
        raise corrupt(f"a JPEG 2000 file has one size, got {len(headers)}")
    height, width = struct.unpack_from(">II", headers[0])
    colours = [int.from_bytes(body[3:7], "big") for kind, body in inner if kind == b"colr" and body[:1] == b"\1"]
    return (width, height), colours[0] if colours else 0, found[b"jp2c"]


def _boxes(content: bytes, at: int) -> Iterator[tuple[bytes, bytes]]:
    """(kind, body) of each box (T.800, I.4)."""
    for _ in range(_MOST_SEGMENTS):
        if at + 8 > len(content):
            return
        kind, start, end = read_box(content, at, len(content))
        if end < start:
            raise corrupt("a JPEG 2000 box that ends before it begins")
        yield kind, content[start:end]
        at = end
    raise too_much(f"more than {_MOST_SEGMENTS} boxes in a JPEG 2000 file")


def _read_siz(stream: bytes) -> _Siz:
    if not stream.startswith(CODESTREAM):
        raise corrupt("a JPEG 2000 codestream begins with its size")
    right, bottom, left, top, tile_width, tile_height, tile_left, tile_top, count = struct.unpack_from(">8IH", stream, 8)
    if not 1 <= count <= 4:
        raise not_read(f"a JPEG 2000 file of {count} components; 1 to 4 are read")
    components = [struct.unpack_from(">BBB", stream, 42 + 3 * n) for n in range(count)]
    wh = right - left, bottom - top
    if min(*wh, tile_width, tile_height, *(side for _, *steps in components for side in steps)) < 1:
        raise corrupt("a JPEG 2000 file without pixels")
    if tile_left > left or tile_top > top:
        raise corrupt("a JPEG 2000 file whose tiles begin within its pixels")
    return _Siz(wh, (tile_width, tile_height), (left, top, tile_left, tile_top), components)


def _read_cuts(stream: bytes, components: int) -> _Cuts:
    """The finest cuts of the main header and of all tile parts' headers."""
    cuts = _Cuts()
    _read_segments(stream, 2, components, cuts)
    for parts, found in enumerate(_TILE_PART.finditer(stream)):
        if parts > 4 * _MOST_TILES:
            raise too_much(f"more than {parts} tile parts in a JPEG 2000 file")
        _read_segments(stream, found.start() + 12, components, cuts)
    return cuts


def _read_segments(stream: bytes, at: int, components: int, cuts: _Cuts) -> None:
    """Reads the segments of one header, up to its end."""
    while cuts.segments < _MOST_SEGMENTS:
        cuts.segments += 1
        (marker,) = struct.unpack_from(">H", stream, at)
        if marker in (_SOT, _SOD):
            return
        if marker not in _MARKERS:
            raise corrupt(f"a JPEG 2000 marker 0x{marker:04x} where none may stand")
        (length,) = struct.unpack_from(">H", stream, at + 2)
        body = stream[at + 4 : at + 2 + length]
        if marker == _COD:
            cuts.layers = max(cuts.layers, struct.unpack_from(">H", body, 2)[0])
            _read_style(body[0], body[5:], cuts)
        elif marker == _COC:
            wide = 1 if components < 257 else 2
            _read_style(body[wide], body[wide + 1 :], cuts)
        elif marker == _POC:
            cuts.orders += len(body) // 7
        at += 2 + max(length, 2)
    raise too_much(f"more than {_MOST_SEGMENTS} segments in the headers of a JPEG 2000 file")


def _read_style(style: int, body: bytes, cuts: _Cuts) -> None:
    levels, width_log2, height_log2 = struct.unpack_from(">BBB", body)
    cuts.levels = max(cuts.levels, levels)
    cuts.block = min(cuts.block, 4 << (width_log2 & 15), 4 << (height_log2 & 15))
    if style & 1:
        cuts.precinct_log2 = min([cuts.precinct_log2, *(min(size & 15, size >> 4) for size in body[5 : 6 + levels])])


def _cost(siz: _Siz, cuts: _Cuts) -> tuple[float, float]:
    """(seconds, bytes) that the cuts take beside the pixels: measured as 7 us a tile, 3.3 us a precinct, 50 ns a packet."""
    if siz.tiles > _MOST_TILES or cuts.levels > 32:
        raise corrupt(f"a JPEG 2000 file of {siz.tiles} tiles and {cuts.levels} levels")
    tile_wh = [min(part, whole) for part, whole in zip(siz.tile_wh, siz.wh, strict=True)]
    precincts = blocks = 0.0
    for level in range(cuts.levels + 1):
        resolution = [math.ceil(side / 2**level) for side in tile_wh]
        precincts += math.prod(math.ceil(side / 2**cuts.precinct_log2) + 1 for side in resolution)
        blocks += math.prod(math.ceil(side / cuts.block) + 1 for side in resolution)
    parts = siz.tiles * len(siz.components)
    packets = parts * precincts * cuts.layers * cuts.orders
    seconds = 7e-6 * siz.tiles + 3.3e-6 * parts * precincts + 50e-9 * packets
    return seconds, 14e3 * siz.tiles + len(siz.components) * (1800 * precincts + 400 * blocks) + 2 * packets / siz.tiles


def _opencv_reads(siz: _Siz, colour: int) -> bool:
    """Whether OpenCV can; it would fail on the others only after it has decoded them."""
    plain = all(7 <= depth <= 15 and (across, down) == (1, 1) for depth, across, down in siz.components)  # 8 to 16 bits, unsigned
    return plain and len(siz.components) != 2 and colour != _CMYK and not any(siz.offsets[:2])


def _boxed(siz: _Siz, colour: int, stream: bytes) -> bytes:
    """A JP2 file of the codestream and what its pixels mean; nothing else."""
    count = len(siz.components)
    allowed = {1: (_GREY,), 2: (_GREY,), 3: (_SRGB, _SYCC), 4: (_SRGB, _CMYK)}[count]
    depths = bytes(depth for depth, _, _ in siz.components)
    ihdr = struct.pack(">IIHBBBB", siz.wh[1], siz.wh[0], count, depths[0] if len(set(depths)) == 1 else 255, 7, 0, 0)
    boxes = [(b"ihdr", ihdr)] + ([(b"bpcc", depths)] if len(set(depths)) > 1 else [])
    boxes.append((b"colr", struct.pack(">BBBI", 1, 0, 0, colour if colour in allowed else allowed[0])))
    inner = b"".join(_box(*box) for box in boxes)
    return BOXES + _box(b"ftyp", b"jp2 \0\0\0\0jp2 ") + _box(b"jp2h", inner) + _box(b"jp2c", stream)


def _box(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(body), kind) + body
