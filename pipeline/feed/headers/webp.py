"""Reads WebP headers (RFC 9649): the canvas, and the chunks of the first frame."""

from __future__ import annotations

import struct

from pipeline.feed.headers.exif import orientation
from pipeline.feed.headers.header import Header, Size, corrupt, too_much

_FRAME = (b"ALPH", b"VP8 ", b"VP8L")
_METADATA = 0x2C  # flags of VP8X: profile, Exif, XMP
_ANIMATED = 0x02
_MOST_CHUNKS = 100_000
_LEAST_BYTES = 32  # OpenCV refuses shorter files


def read_webp(content: bytes) -> Header:
    """Reads a WebP file; of an animation the first frame.

    Raises:
      ImageError: The file is damaged.
    """
    chunks = _first_chunks(content)
    canvas = chunks.get(b"VP8X")
    if canvas is not None and (len(canvas) != 10 or content[12:16] != b"VP8X"):
        raise corrupt("a WebP's VP8X chunk has ten bytes and comes first")
    animated = bool(canvas and canvas[0] & _ANIMATED)
    kept: dict[bytes, bytes] = {kind: chunks[kind] for kind in ((b"ANIM", b"ANMF") if animated else _FRAME) if kind in chunks}
    if len(kept.keys() - {b"ALPH"}) != (2 if animated else 1):
        raise corrupt("a WebP has one frame, or is an animation of some")
    wh = _canvas_wh(canvas) if canvas else _frame_wh(chunks)
    if canvas:
        kept = {b"VP8X": bytes([canvas[0] & ~_METADATA]) + canvas[1:], **kept}
    body = b"".join(struct.pack("<4sI", kind, len(chunk)) + chunk + bytes(len(chunk) % 2) for kind, chunk in kept.items())
    clean = b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body
    return Header(
        "WEBP",
        wh,
        clean.ljust(_LEAST_BYTES, b"\0"),
        1e-9 * (25 * wh[0] * wh[1] + (10 if b"VP8L" in kept else 65) * len(body)),
        orientation=orientation(chunks.get(b"EXIF", b""), chunks.get(b"XMP ", b"")),
        bytes_per_pixel=16 if animated else 9,
        cut=struct.unpack_from("<I", content, 4)[0] + 8 > len(content),
    )


def _first_chunks(content: bytes) -> dict[bytes, bytes]:
    """The first chunk of each kind, perhaps cut."""
    chunks: dict[bytes, bytes] = {}
    at = 12
    for _ in range(_MOST_CHUNKS):
        if at + 8 > len(content):
            return chunks
        kind, length = struct.unpack_from("<4sI", content, at)
        if kind not in chunks:
            chunks[kind] = content[at + 8 : at + 8 + length]
        at += 8 + length + length % 2
    raise too_much(f"more than {_MOST_CHUNKS} chunks in a WebP")


def _canvas_wh(canvas: bytes) -> Size:
    return 1 + int.from_bytes(canvas[4:7], "little"), 1 + int.from_bytes(canvas[7:10], "little")


def _frame_wh(chunks: dict[bytes, bytes]) -> Size:
    """The size in a lossy (RFC 6386, 9.1) or lossless (RFC 9649, 3.4) frame."""
    lossy, lossless = chunks.get(b"VP8 ", b""), chunks.get(b"VP8L", b"")
    if lossy[3:6] == b"\x9d\x01\x2a" and len(lossy) >= 10:
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", lossy, 6))
        if width and height:
            return width, height
    elif lossless[:1] == b"\x2f" and len(lossless) >= 5:
        (packed,) = struct.unpack_from("<I", lossless, 1)
        return 1 + (packed & 0x3FFF), 1 + (packed >> 14 & 0x3FFF)
    raise corrupt("a WebP without a frame")
