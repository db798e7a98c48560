"""Structure-aware mutation: an image is cut where its format cuts it, pieces are changed, and lengths and checksums are mended.

A file with one flipped bit rarely comes far: a length or checksum is wrong. What has its parts doubled, swapped, or set to
numbers at the edges, and is otherwise whole, reaches the code behind.
"""

from __future__ import annotations

import itertools
import random
import re
import struct
import zlib
from collections.abc import Callable
from typing import Literal

Pieces = list[bytes]
_EDGES = (
    *range(5),
    *(2**n + m for n in (3, 4, 5, 6, 7, 8, 12, 14, 15, 16, 20, 24, 30, 31, 32) for m in (-1, 0, 1)),
    300,
    5000,
    10**5,
)
_OF_PLACES = {"TIFF", "AVIF", "HEIF", "BMP", "TGA"}  # whose parts are found by their place
_MOST_BYTES = 4 << 20


def mutate(name: str, content: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """A changed image.

    Args:
      name: Its format, one of `FORMATS`.
      content: The image.
      others: More of the same format, from which pieces may come.
      rng: Decides.
    """
    split, join, length_of_name = FORMATS[name]
    pieces = split(content)
    for _ in range(1 + int(rng.expovariate(0.5))):
        keeps_places = name in _OF_PLACES and rng.random() < 0.9
        if pieces and rng.random() < 0.55:
            at = _choose(pieces, rng)
            kept = length_of_name(pieces[at]) if rng.random() < 0.9 else 0
            changed = pieces[at][:kept] + _change_bytes(pieces[at][kept:], rng, keeps_places=keeps_places)
            pieces = [*pieces[:at], changed, *pieces[at + 1 :]]
        elif len(pieces) > 2 or not keeps_places:
            pieces = _change_pieces(pieces, split(rng.choice(others)), rng)
    content = join(pieces) if rng.random() < 0.85 else b"".join(pieces)
    if rng.random() < 0.1:
        content = content[: rng.randrange(len(content) + 1)]
    return content[:_MOST_BYTES]


def _choose(pieces: Pieces, rng: random.Random) -> int:
    """A piece; less often the first one, without which nothing is recognised."""
    return rng.randrange(len(pieces)) if rng.random() < 0.3 else rng.randrange(min(1, len(pieces) - 1), len(pieces))


def _change_pieces(pieces: Pieces, others: Pieces, rng: random.Random) -> Pieces:
    """Drops, repeats or swaps a piece, or takes one of another image."""
    if not pieces:
        return others
    at, choice = _choose(pieces, rng), rng.random()
    if choice < 0.2:
        return pieces[:at] + pieces[at + 1 :]
    if choice < 0.45:
        times = rng.choice((1, 1, 1, 2, 10, 100, 3000))
        return pieces[:at] + [pieces[at]] * min(times, max(1, _MOST_BYTES // (len(pieces[at]) + 1))) + pieces[at:]
    if choice < 0.65:
        other = _choose(pieces, rng)
        swapped = pieces.copy()
        swapped[at], swapped[other] = pieces[other], pieces[at]
        return swapped
    if choice < 0.85:
        return [*pieces[:at], rng.choice(others), *pieces[at:]]
    return [*pieces[:at], others[min(at, len(others) - 1)], *pieces[at + 1 :]]


def _change_bytes(piece: bytes, rng: random.Random, *, keeps_places: bool) -> bytes:
    """Changes some bytes, most often the first ones of the piece: they mean most."""
    changed = bytearray(piece)
    for _ in range(1 + int(rng.expovariate(0.7))):
        at = min(int(rng.expovariate(1 / 12)), len(changed)) if rng.random() < 0.6 else rng.randrange(len(changed) + 1)
        choice = rng.random() * (0.65 if keeps_places else 1)
        if choice < 0.45:
            width = rng.choice((1, 1, 2, 2, 4, 4, 8))
            order = rng.choice(("big", "little"))
            width = min(width, len(changed) - at)
            changed[at : at + width] = (rng.choice(_EDGES) % 256**width).to_bytes(width, order)
        elif choice < 0.65 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif choice < 0.8:
            changed[at : at + 1] = rng.randbytes(rng.choice((1, 1, 2, 8)))
        elif choice < 0.9:
            del changed[at : at + rng.choice((1, 2, 4, 30))]
        else:
            end = min(len(changed), at + rng.choice((1, 3, 16, 200)))
            changed[at:at] = changed[at:end] * rng.choice((1, 2, 50, 1000))
    return bytes(changed[:_MOST_BYTES])


def _split_jpeg(content: bytes) -> Pieces:
    """Each marker with what follows it."""
    at = [found.start() for found in re.finditer(rb"\xff[\x01-\xfe]", content)]
    return [content[start:end] for start, end in zip([0, *at], [*at, len(content)], strict=True) if end > start]


def _join_jpeg(pieces: Pieces) -> bytes:
    return b"".join(
        piece[:2] + struct.pack(">H", min(len(piece) - 2, 65535)) + piece[4:]
        if piece[1:2] in _JPEG_SEGMENTS and len(piece) >= 4
        else piece
        for piece in pieces
    )


_JPEG_SEGMENTS = [bytes([marker]) for marker in (*range(0xC0, 0xD0), 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE)]


def _split_png(content: bytes) -> Pieces:
    pieces, at = [content[:8]], 8
    while at + 12 <= len(content):
        end = at + 12 + int.from_bytes(content[at : at + 4], "big")
        pieces.append(content[at + 4 : end - 4])
        at = end
    return pieces


def _join_png(pieces: Pieces) -> bytes:
    chunks = (struct.pack(">I", max(len(piece) - 4, 0)) + piece + struct.pack(">I", zlib.crc32(piece)) for piece in pieces[1:])
    return pieces[0] + b"".join(chunks) if pieces else b""


def _split_riff(content: bytes) -> Pieces:
    pieces, at = [content[:12]], 12
    while at + 8 <= len(content):
        length = int.from_bytes(content[at + 4 : at + 8], "little")
        pieces.append(content[at : at + 4] + content[at + 8 : at + 8 + length])
        at += 8 + length + length % 2
    return pieces


def _join_riff(pieces: Pieces) -> bytes:
    body = b"".join(
        piece[:4] + struct.pack("<I", max(len(piece) - 4, 0)) + piece[4:] + bytes(len(piece) % 2) for piece in pieces[1:]
    )
    return pieces[0][:4] + struct.pack("<I", 4 + len(body)) + pieces[0][8:12] + body if pieces else b""


def _split_boxes(content: bytes) -> Pieces:
    """Boxes; of those that hold others, what is inside too: the piece then begins with the names around it, each with a slash."""
    return _boxes_within(content, b"")


_HOLDERS = {b"meta": 4, b"iprp": 0, b"ipco": 0, b"iinf": 6, b"jp2h": 0, b"moov": 0}


def _boxes_within(content: bytes, around: bytes) -> Pieces:
    pieces, at = [], 0
    while at + 8 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, at)
        end = at + length if length >= 8 else len(content)
        body = content[at + 8 : end]
        if kind in _HOLDERS:
            skip = _HOLDERS[kind]
            pieces.append(around + kind + b"/" + body[:skip])
            pieces += _boxes_within(body[skip:], around + kind + b"/")
        else:
            pieces.append(around + kind + body)
        at = end
    return pieces


def _join_boxes(pieces: Pieces) -> bytes:
    return _boxes_of(pieces, b"")


def _boxes_of(pieces: Pieces, around: bytes) -> bytes:
    joined, at = b"", 0
    while at < len(pieces):
        piece = pieces[at].removeprefix(around)
        kind, body, at = piece[:4], piece[4:], at + 1
        if body[:1] == b"/" and kind in _HOLDERS:
            inside = around + kind + b"/"
            until = next((n for n in range(at, len(pieces)) if not pieces[n].startswith(inside)), len(pieces))
            body, at = body[1:] + _boxes_of(pieces[at:until], inside), until
        joined += struct.pack(">I", (8 + len(body)) % 2**32) + kind + body
    return joined


def _split_jpeg2000(content: bytes) -> Pieces:
    """A codestream by the markers of its header and its tile parts; the boxes around it are one piece."""
    start = max(content.find(b"\xff\x4f\xff\x51"), 0)
    pixels = content.find(b"\xff\x90", start)
    found = [*re.finditer(rb"\xff[\x4f-\x65]", content[:pixels]), *re.finditer(rb"\xff\x90\0\x0a", content)]
    stops = [mark.start() for mark in found if mark.start() >= start] + [len(content)]
    return [content[:start]] + [content[first:last] for first, last in itertools.pairwise(stops)]


def _join_jpeg2000(pieces: Pieces) -> bytes:
    stream = b"".join(
        piece[:2] + struct.pack(">H", min(len(piece) - 2, 65535)) + piece[4:]
        if piece[:1] == b"\xff" and b"\x50" < piece[1:2] < b"\x65"
        else piece
        for piece in pieces[1:]
    )
    return (pieces[0] if pieces else b"") + stream


def _split_tiff(content: bytes) -> Pieces:
    """The whole file, then a copy of each entry of its first directory."""
    entry = struct.Struct(("<" if content[:2] == b"II" else ">") + ("HHQ8s" if b"+" in content[2:4] else "HHI4s"))
    start, count, at = _tiff_directory(content)
    return [
        content,
        *(content[first : first + entry.size] for first in range(start + at, start + at + entry.size * count, entry.size)),
    ]


def _tiff_directory(content: bytes) -> tuple[int, int, int]:
    """(where the first directory stands, its number of entries, where these begin in it)."""
    order: Literal["little", "big"] = "little" if content[:2] == b"II" else "big"
    big = b"+" in content[2:4]
    start = int.from_bytes(content[8:16] if big else content[4:8], order)
    return start, min(int.from_bytes(content[start : start + (8 if big else 2)], order), 100), 8 if big else 2


def _join_tiff(pieces: Pieces) -> bytes:
    """A directory of the entries at the end: what they point at stays where it is."""
    if not pieces:
        return b""
    content, entries = pieces[0], pieces[1:]
    order = "<" if content[:2] == b"II" else ">"
    if b"+" in content[2:4]:
        head, number, size = content[:8] + struct.pack(order + "Q", len(content)), struct.pack(order + "Q", len(entries)), 20
    else:
        head, number, size = (
            content[:4] + struct.pack(order + "I", len(content)),
            struct.pack(order + "H", len(entries) % 65536),
            12,
        )
    return head + content[len(head) :] + number + b"".join(entry[:size].ljust(size, b"\0") for entry in entries) + bytes(8)


def _split_gif(content: bytes) -> Pieces:
    """Header and table, then each block that begins with one of GIF's three introducers, roughly."""
    at = [13 + (3 << (content[10] & 7) + 1 if len(content) > 10 and content[10] & 0x80 else 0)]
    at += [found.start() for found in re.finditer(rb"(?<=\0)[\x21\x2c\x3b]", content) if found.start() > at[0]]
    return [content[start:end] for start, end in zip([0, *at], [*at, len(content)], strict=True)]


def _split_head(size: int) -> Callable[[bytes], Pieces]:
    return lambda content: [content[:size], content[size:]]


def _split_lines(content: bytes) -> Pieces:
    lines = content[:200].splitlines(keepends=True)
    return [*lines, content[200:]]


def _plain(pieces: Pieces) -> bytes:
    return b"".join(pieces)


def _names(length: int) -> Callable[[bytes], int]:
    return lambda _: length


def _length_of_path(piece: bytes) -> int:
    return piece.rfind(b"/", 0, 40) + 5


# format -> (cuts an image into pieces, puts pieces together again, how many bytes of a piece say what it is)
FORMATS: dict[str, tuple[Callable[[bytes], Pieces], Callable[[Pieces], bytes], Callable[[bytes], int]]] = {
    "JPEG": (_split_jpeg, _join_jpeg, _names(4)),
    "PNG": (_split_png, _join_png, _names(4)),
    "GIF": (_split_gif, _plain, _names(2)),
    "BMP": (_split_head(54), _plain, _names(2)),
    "TIFF": (_split_tiff, _join_tiff, _names(2)),
    "WEBP": (_split_riff, _join_riff, _names(4)),
    "JPEG2000": (_split_jpeg2000, _join_jpeg2000, _names(4)),
    "AVIF": (_split_boxes, _join_boxes, _length_of_path),
    "HEIF": (_split_boxes, _join_boxes, _length_of_path),
    "PNM": (_split_lines, _plain, _names(0)),
    "HDR": (_split_lines, _plain, _names(0)),
    "TGA": (_split_head(18), _plain, _names(0)),
}
