"""AVIF (HEIF, ISO/IEC 23008-12, with AV1): the items of the still image, and the frames that they really hold.

The size that a file's boxes give need not be that of its AV1 stream: libavif decodes what is there and scales it. So the stream's
own sequence headers are read.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

from pipeline.detect.headers.boxes import read_box
from pipeline.detect.headers.exif import orientation
from pipeline.detect.headers.header import Header, Size, corrupt, not_read, too_much

_MOST_BOXES = 10_000
_MOST_EXTENTS = 16  # one for each layer
_MOST_TEXT = 65_536
_MOST_UNITS = 100_000
_SEQUENCE, _FRAME_HEADERS = 1, {3, 6, 7}  # AV1 (version 1.0.0 with errata 1), 6.2.2
# orientations of Exif, by quarter turns against the clock, then by mirror: none, top to bottom, left to right
_TURNS = ((1, 4, 2), (8, 5, 7), (3, 2, 4), (6, 7, 5))


@dataclasses.dataclass(frozen=True, slots=True)
class _Box:
    kind: bytes
    at: int  # of the type
    start: int
    end: int


def read_avif(content: bytes) -> Header:
    """Reads an AVIF file; of a sequence, its still image.

    Raises:
      ImageError: It is damaged, or its parts are laid out in a way that is not read.
    """
    top = list(_boxes(content, 0, len(content)))
    metas = [box for box in top if box.kind == b"meta"]
    if len(metas) != 1:
        raise not_read(f"an AVIF with {len(metas)} still images")
    meta = {}
    for box in _boxes(content, metas[0].start + 4, metas[0].end):
        if box.kind in meta and box.kind not in {b"uuid", b"free"}:
            raise corrupt(f"an AVIF with several {box.kind!r} boxes")
        meta[box.kind] = box
    if not {b"pitm", b"iinf", b"iloc", b"iprp"} <= meta.keys():
        raise corrupt("an AVIF without a primary image")
    primary = _number(content, meta[b"pitm"].start + 4, 2 if content[meta[b"pitm"].start] == 0 else 4)
    items = _read_items(content, meta[b"iinf"])
    places = _read_places(content, meta)
    wh, turns, mirror = _read_properties(content, meta[b"iprp"], primary)
    streams = [places.get(item, b"") for item, (kind, _) in items.items() if kind == b"av01"]
    pixels, decoded = _measure(streams)
    changed = bytearray(content)
    changed[8 : top[0].end] = content[8 : top[0].end].replace(b"avis", b"avif")  # else a sequence's frames would be read
    for at in [box.at for box in top if box.kind == b"moov"] + [at for kind, at in items.values() if kind == b"Exif"]:
        changed[at : at + 4] = b"free"  # in AVIF no pixel depends on it
    texts = b"".join(places.get(item, b"")[:_MOST_TEXT] for item, (kind, _) in items.items() if kind == b"mime")
    whole = wh[0] * wh[1]
    return Header(
        "AVIF",
        wh,
        bytes(changed),
        1e-9 * (20 * whole + 25 * decoded + 110 * sum(map(len, streams))),
        ("pillow",),
        orientation=_TURNS[turns][mirror] if turns or mirror else orientation(b"", texts),
        bytes_per_pixel=20 * max(whole, pixels) / whole,
    )


def _number(content: bytes, at: int, size: int) -> int:
    if at + size > len(content):
        raise corrupt("the AVIF ends within its header")
    return int.from_bytes(content[at : at + size], "big")


def _boxes(content: bytes, at: int, end: int) -> Iterator[_Box]:
    for _ in range(_MOST_BOXES):
        if at + 8 > end:
            return
        kind, start, stop = read_box(content, at, end)
        if not start <= stop <= end:
            raise corrupt(f"an AVIF's {kind!r} box reaches beyond its place")
        yield _Box(kind, at + 4, start, stop)
        at = stop
    raise too_much(f"more than {_MOST_BOXES} boxes in an AVIF")


def _read_items(content: bytes, iinf: _Box) -> dict[int, tuple[bytes, int]]:
    """Item -> (its type, where that stands)."""
    items = {}
    for box in _boxes(content, iinf.start + (6 if content[iinf.start] == 0 else 8), iinf.end):
        version = content[box.start]
        if box.kind != b"infe" or version < 2:
            raise corrupt("an AVIF's list of items with something else in it")
        wide = 2 if version == 2 else 4
        item, at = _number(content, box.start + 4, wide), box.start + 6 + wide
        if item in items:
            raise corrupt(f"an AVIF that lists item {item} twice")
        items[item] = content[at : at + 4], at
    return items


def _read_places(content: bytes, meta: dict[bytes, _Box]) -> dict[int, bytes]:
    """Item -> its bytes (ISO/IEC 14496-12, 8.11.3)."""
    iloc = meta[b"iloc"]
    version, packed = content[iloc.start], _number(content, iloc.start + 4, 2)
    offset_size, length_size, base_size, index_size = (
        packed >> 12,
        packed >> 8 & 15,
        packed >> 4 & 15,
        packed & 15 if version else 0,
    )
    wide = 2 if version < 2 else 4
    count, at = _number(content, iloc.start + 6, wide), iloc.start + 6 + wide
    if count > _MOST_BOXES:
        raise too_much(f"{count} items in an AVIF")
    places: dict[int, bytes] = {}
    held = 0
    for _ in range(count):
        item = _number(content, at, wide)
        at += wide
        inside = _number(content, at, 2) & 15 if version else 0
        at += 2 * bool(version) + 2
        base, extents = _number(content, at, base_size), _number(content, at + base_size, 2)
        at += base_size + 2
        if inside > 1 or extents > _MOST_EXTENTS or item in places:
            raise not_read(f"an AVIF whose item {item} lies in {extents} pieces, or in another one")
        start, end = (meta[b"idat"].start, meta[b"idat"].end) if inside and b"idat" in meta else (0, len(content))
        places[item] = b""
        for _ in range(extents):
            offset = start + base + _number(content, at + index_size, offset_size)
            length = _number(content, at + index_size + offset_size, length_size)
            at += index_size + offset_size + length_size
            piece = content[offset : min(offset + length, end) if length else end]
            held += len(piece)
            if held > 2 * len(content):
                raise too_much("an AVIF whose items share their bytes")
            places[item] += piece
    return places


def _read_properties(content: bytes, iprp: _Box, primary: int) -> tuple[Size, int, int]:
    """(size, quarter turns against the clock, mirror) of the primary image."""
    inner = list(_boxes(content, iprp.start, iprp.end))
    containers, tables = ([box for box in inner if box.kind == kind] for kind in (b"ipco", b"ipma"))
    if len(containers) != 1 or len(tables) != 1:
        raise corrupt("an AVIF has one list of properties, and one of whose they are")
    known = list(_boxes(content, containers[0].start, containers[0].end))
    own = [known[n - 1] for n in _properties_of(content, tables[0], primary) if 0 < n <= len(known)]
    sizes = {content[box.start + 4 : box.start + 12] for box in own if box.kind == b"ispe"}
    if len(sizes) != 1:
        raise corrupt(f"an AVIF has one size, got {len(sizes)}")
    wh = struct.unpack(">II", sizes.pop())
    if not all(wh):
        raise corrupt("an AVIF without pixels")
    turns = next((content[box.start] & 3 for box in own if box.kind == b"irot"), 0)
    mirror = next((1 + (content[box.start] & 1) for box in own if box.kind == b"imir"), 0)
    return wh, turns, mirror


def _properties_of(content: bytes, ipma: _Box, wanted: int) -> list[int]:
    """Numbers of an item's properties (ISO/IEC 23008-12, 9.3.1)."""
    wide_items, wide_numbers = 2 if content[ipma.start] < 1 else 4, content[ipma.start + 3] & 1
    at, size, found = ipma.start + 8, 1 + wide_numbers, []
    for _ in range(min(_number(content, ipma.start + 4, 4), _MOST_BOXES)):
        item, count = _number(content, at, wide_items), _number(content, at + wide_items, 1)
        at += wide_items + 1
        if item == wanted:
            found += [_number(content, at + n * size, size) & (0x7FFF if wide_numbers else 0x7F) for n in range(count)]
        at += count * size
    return found


def _measure(streams: list[bytes]) -> tuple[int, int]:
    """(pixels of the largest frame of each AV1 stream, pixels of all their frames) (5.3 of its specification)."""
    pixels = decoded = units = 0
    for stream in streams:
        largest = frames = at = 0
        while at < len(stream):
            kind, at, length = _read_unit(stream, at)
            if kind == _SEQUENCE:
                width, height = _sequence_wh(_Bits(stream[at : at + 256]))
                largest = max(largest, width * height)
            frames += kind in _FRAME_HEADERS
            at, units = at + length, units + 1
            if units > _MOST_UNITS:
                raise too_much(f"more than {_MOST_UNITS} units in an AVIF")
        pixels, decoded = pixels + largest, decoded + largest * max(frames, 1)
    return pixels, decoded


def _read_unit(stream: bytes, at: int) -> tuple[int, int, int]:
    """(type, where its body begins, its length)."""
    head = stream[at]
    at += 2 if head & 4 else 1
    length = len(stream) - at
    if head & 2:
        length, at = _leb128(stream, at)
    return head >> 3 & 15, at, length


def _leb128(stream: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 56, 7):
        value |= (stream[at] & 0x7F) << shift
        at += 1
        if not stream[at - 1] & 0x80:
            break
    return value, at


class _Bits:
    """Reads numbers of so many bits, the highest bit first."""

    def __init__(self, content: bytes):
        self._value, self._left = int.from_bytes(content, "big"), 8 * len(content)

    def __call__(self, count: int) -> int:
        self._left -= count
        if self._left < 0:
            raise corrupt("an AV1 sequence header is cut")
        return self._value >> self._left & (1 << count) - 1


def _sequence_wh(bits: _Bits) -> Size:
    """The largest frame that a sequence header (5.5.1) allows."""
    bits(4)  # profile, still picture
    if bits(1):  # reduced header
        bits(5)
    else:
        _skip_operating_points(bits)
    width_bits, height_bits = bits(4) + 1, bits(4) + 1
    return bits(width_bits) + 1, bits(height_bits) + 1


def _skip_operating_points(bits: _Bits) -> None:
    delay_bits = 0
    if bits(1):  # timing info
        bits(64)
        if bits(1):  # equal intervals, whose length is a variable code (4.10.3)
            zeros = next((n for n in range(32) if bits(1)), 32)
            bits(zeros if zeros < 32 else 0)
        if bits(1):  # decoder model
            delay_bits = bits(5) + 1
            bits(42)
    display_delay = bits(1)
    for _ in range(bits(5) + 1):
        bits(12)
        if bits(5) > 7:
            bits(1)
        if delay_bits and bits(1):
            bits(2 * delay_bits + 1)
        if display_delay and bits(1):
            bits(4)
