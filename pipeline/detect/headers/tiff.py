"""TIFF (revision 6.0) and BigTIFF: the first directory, each of whose tags stands there once.

Readers differ on what the second of two equal tags means, follow each tag's values wherever they stand, and take memory for a
tile before they look at its bytes. So all of it is added up first.
"""

from __future__ import annotations

import dataclasses
import math
import struct

from pipeline.detect.headers.deflate import check_deflate
from pipeline.detect.headers.header import Header, Size, corrupt, not_read, too_much
from pipeline.detect.headers.jpeg import read_frame

_WIDTH, _LENGTH, _BITS, _COMPRESSION, _STRIPS, _ORIENTATION, _SAMPLES, _ROWS, _STRIP_SIZES = (
    256,
    257,
    258,
    259,
    273,
    274,
    277,
    278,
    279,
)
_PLANAR, _TILE_WIDTH, _TILE_LENGTH, _TILES, _TILE_SIZES = 284, 322, 323, 324, 325
_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_NUMBERS = {1: "B", 3: "H", 4: "I", 16: "Q"}
_NONE, _JPEG, _DEFLATE = 1, 7, (8, 32946)
_COMPRESSIONS = {_NONE, 2, 3, 4, 5, _JPEG, *_DEFLATE, 32773, 50000}  # plain, CCITT, LZW, JPEG, Deflate, PackBits, Zstandard
_PRIVATE = 32768  # tags from here on say nothing of the pixels
_MOST_PARTS = 100_000
_LARGE_TILE = 1 << 22


@dataclasses.dataclass(frozen=True, slots=True)
class _Directory:
    """The tags of a directory: tag -> (type, number of values, where they stand)."""

    content: bytes
    order: str
    tags: dict[int, tuple[int, int, int]]

    def numbers(self, tag: int, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        if tag not in self.tags:
            return default
        kind, count, at = self.tags[tag]
        if kind not in _NUMBERS or not 0 < count <= _MOST_PARTS or at + count * _BYTES[kind] > len(self.content):
            raise corrupt(f"TIFF tag {tag} with {count} values of type {kind}")
        return struct.unpack_from(f"{self.order}{count}{_NUMBERS[kind]}", self.content, at)

    def number(self, tag: int, default: int | None = None) -> int:
        values = self.numbers(tag, () if default is None else (default,))
        if len(values) != 1:
            raise corrupt(f"TIFF tag {tag} needs one value, got {len(values)}")
        return values[0]


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """How the pixels are cut: parts (strips or tiles) of `part_wh`, `across` x `down` of them for each plane."""

    part_wh: Size
    across: int
    down: int
    planes: int
    bits: int
    compression: int

    @property
    def parts(self) -> int:
        return self.across * self.down * self.planes

    @property
    def pixels(self) -> int:
        """With what tiles hold beyond the image."""
        return self.part_wh[0] * self.part_wh[1] * self.across * self.down

    @property
    def raw(self) -> int:
        """Bytes of all pixels, unpacked."""
        return self.pixels * self.bits // 8 + self.parts


def read_tiff(content: bytes) -> Header:
    """Reads a TIFF file; only its first page.

    Raises:
      ImageError: It is damaged, contradicts itself, is packed in a way that is not read, or has more parts than it can need.
    """
    directory, next_at = _read_directory(content)
    wh = directory.number(_WIDTH), directory.number(_LENGTH)
    layout = _read_layout(directory, wh)
    spans = _read_spans(directory, layout)
    seconds = _seconds(content, layout, spans)
    turned = directory.numbers(_ORIENTATION, (1,))[0] >= 5
    return Header(
        "TIFF",
        wh[::-1] if turned else wh,  # both decoders turn a TIFF's pixels upright themselves
        _first_page(content, next_at),
        seconds,
        ("opencv", "pillow"),
        bytes_per_pixel=(12 + layout.bits / 8) * layout.pixels / (wh[0] * wh[1]),
    )


def _read_directory(content: bytes) -> tuple[_Directory, int]:
    """(the first directory, where it names the second)."""
    order = "<" if content.startswith(b"II") else ">"
    big = content[2:4] in (b"\x2b\0", b"\0\x2b")
    start: int = struct.unpack_from(order + ("8xQ" if big else "4xI"), content)[0]
    count: int = struct.unpack_from(order + ("Q" if big else "H"), content, start)[0]
    entry, inline, at = struct.Struct(order + ("HHQ" if big else "HHI")), 8 if big else 4, start + (8 if big else 2)
    tags: dict[int, tuple[int, int, int]] = {}
    values = 0
    if count > 65535:
        raise too_much(f"{count} tags in a TIFF")
    for _ in range(count):
        tag, kind, number = entry.unpack_from(content, at)
        size = number * _BYTES.get(kind, 1)
        where = at + entry.size
        if size > inline:
            (where,) = struct.unpack_from(order + ("Q" if big else "I"), content, where)
            values += min(size, len(content))
        if tag in tags and tag < _PRIVATE:
            raise corrupt(f"the TIFF gives tag {tag} twice")
        tags[tag] = kind, number, where
        at += entry.size + inline
    if values > 2 * len(content) + 65536:
        raise too_much(f"{values} bytes of tags in a TIFF of {len(content)} bytes")
    return _Directory(content, order, tags), at


def _read_layout(directory: _Directory, wh: Size) -> _Layout:
    samples = directory.number(_SAMPLES, 1)
    all_bits = directory.numbers(_BITS, (1,))
    planes = samples if directory.number(_PLANAR, 1) == 2 else 1
    compression = directory.number(_COMPRESSION, _NONE)
    if compression not in _COMPRESSIONS:
        raise not_read(
            f"a TIFF with compression {compression}; plain, CCITT, LZW, JPEG, Deflate, PackBits and Zstandard are read"
        )
    if not all(0 < side < 2**31 for side in wh) or not 1 <= samples <= 8 or max(all_bits) > 64:
        raise corrupt(f"a TIFF of {wh[0]} x {wh[1]} pixels in {samples} samples of {max(all_bits)} bits")
    tiled = _TILE_WIDTH in directory.tags
    if (tiled and _STRIPS in directory.tags) or (_TILES if tiled else _STRIPS) not in directory.tags:
        raise corrupt("a TIFF has strips or tiles")
    if tiled:
        part_wh = directory.number(_TILE_WIDTH), directory.number(_TILE_LENGTH)
    else:
        part_wh = wh[0], min(directory.number(_ROWS, wh[1]), wh[1])
    if not all(0 < side < 2**31 for side in part_wh):
        raise corrupt("a TIFF of strips or tiles without pixels")
    if math.prod(part_wh) > max(math.prod(wh), _LARGE_TILE):
        raise too_much(f"tiles of {part_wh[0]} x {part_wh[1]} pixels in a TIFF of {wh[0]} x {wh[1]}")
    across, down = (math.ceil(side / part) for side, part in zip(wh, part_wh, strict=True))
    return _Layout(part_wh, across, down, planes, samples * max(all_bits), compression)


def _read_spans(directory: _Directory, layout: _Layout) -> list[tuple[int, int]]:
    """(start, end) of each part's bytes."""
    offsets_tag, sizes_tag = (_TILES, _TILE_SIZES) if _TILES in directory.tags else (_STRIPS, _STRIP_SIZES)
    if layout.parts > _MOST_PARTS:
        raise too_much(f"{layout.parts} strips or tiles in a TIFF, more than {_MOST_PARTS}")
    offsets = directory.numbers(offsets_tag)
    sizes = directory.numbers(sizes_tag)
    if layout.compression == _NONE and not sizes and layout.parts == 1:
        sizes = (len(directory.content),)  # some old writers leave it out
    if len(offsets) != layout.parts or len(sizes) != layout.parts:
        raise corrupt(f"a TIFF of {layout.parts} strips or tiles with {len(offsets)} offsets and {len(sizes)} sizes")
    most = len(directory.content)
    spans = [(min(at, most), min(at + size, most)) for at, size in zip(offsets, sizes, strict=True)]
    taken = sum(end - at for at, end in spans)
    raw = layout.raw
    if taken > 2 * most or (layout.compression != _NONE and taken > 3 * raw + 65536):
        raise too_much(f"{taken} bytes of strips or tiles for {raw} bytes of pixels in a TIFF of {most} bytes")
    return spans


def _seconds(content: bytes, layout: _Layout, spans: list[tuple[int, int]]) -> float:
    taken = sum(end - at for at, end in spans)
    plain = (
        1e-9 * (layout.pixels * (12 + layout.bits * 0.6) + taken * (1 if layout.compression == _NONE else 30))
        + 3e-6 * layout.parts
    )
    if layout.compression in _DEFLATE:
        view = memoryview(content)
        check_deflate([[view[at:end]] for at, end in spans], layout.raw)
    if layout.compression != _JPEG:
        return plain
    seconds = 0.0
    for at, end in spans:
        stream = content[at:end]
        frame = read_frame(stream)
        if frame.wh[0] > layout.part_wh[0] or frame.wh[1] > layout.part_wh[1]:
            raise corrupt(f"a TIFF whose JPEG has {frame.wh} pixels in a part of {layout.part_wh}")
        seconds += frame.seconds(len(stream))
    return plain + seconds


def _first_page(content: bytes, next_at: int) -> bytes:
    """The file without a second directory: OpenCV counts them all."""
    width = 8 if content[2:4] in (b"\x2b\0", b"\0\x2b") else 4
    if not any(content[next_at : next_at + width]):
        return content
    return content[:next_at] + bytes(width) + content[next_at + width :]
