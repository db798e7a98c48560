"""Reads JPEG headers (ITU-T T.81) as libjpeg does: one frame, its scans, and the orientation."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from pipeline.failures import ImageError
from pipeline.feed.headers.exif import orientation
from pipeline.feed.headers.header import Header, Size, corrupt, not_read, too_much

_MARKER = re.compile(rb"\xff([\x01-\xfe])")  # skips bytes between segments, as libjpeg does
_MARKER_AFTER_SCAN = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")  # restarts belong to the scan
_PROGRESSIVE, _SOI, _EOI, _SOS, _DRI, _APP1 = 0xC2, 0xD8, 0xD9, 0xDA, 0xDD, 0xE1
_END = b"\xff\xd9"
_SOF = {0xC0, 0xC1, _PROGRESSIVE}
_OTHER_SOF = {0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
_BARE = {0x01, *range(0xD0, 0xD8)}  # markers without a segment
_TABLES = {*_SOF, 0xC4, 0xDB, 0xDC, 0xDD, 0xE0, 0xEE}  # with JFIF and Adobe, which tell the colours
_LARGE_HEADER = 256 << 10  # from here a decoder gets the tables only: OpenCV took 14 s for 59 MB of Exif
_MOST_GARBAGE = 65536
_MOST_SEGMENTS = 10_000  # an ICC profile of 16 MB takes 256
_FEW_SCANS = 64  # encoders write 10, optimisers up to 20
_Segment = tuple[int, int, int]  # marker, start of its body, its end


def read_jpeg(content: bytes) -> Header:
    """Reads a JPEG file; the first image of several (MPO). Walks the segments up to the first scan, and counts the scans.

    Raises:
      ImageError: The file is damaged, cut, or of a kind that is not read.
    """
    segments = list(_segments(content))
    frames = [(marker, content[at:end]) for marker, at, end in segments if marker in _SOF]
    if len(frames) != 1:
        raise corrupt(f"a JPEG has one frame before its pixels, got {len(frames)}")
    marker, body = frames[0]
    wh, components = _read_sof(body)
    _, at, _ = segments[-1]
    scans_at = at - 4
    cut = not content.endswith(_END) and content.find(_END, scans_at) < 0
    if cut:  # perhaps of its end alone; in what has restarts the decoder shows no difference
        if any(marker == _DRI for marker, _, _ in segments):
            raise ImageError("decode", "truncated", "the JPEG ends within its pixels (no end-of-image marker)")
        content = content.rstrip(b"\xff") + _END
    several = marker == _PROGRESSIVE or content[at : at + 1] != bytes([components])
    scans = _count_scans(content, scans_at) if several else 1
    notes = [content[at:end] for marker, at, end in segments if marker == _APP1]
    exif = next((note for note in notes if note.startswith(b"Exif\0\0")), b"")
    xmp = next((note for note in notes if note.startswith(b"http://ns.adobe.com/xap/1.0/\0")), b"")
    return Header(
        "JPEG",
        wh,
        content if scans_at < _LARGE_HEADER else _only_tables(content, segments),
        # worst case: 3 ns a pixel, 1 ns a pixel and scan, 20 (several scans: 40) ns a byte
        1e-9 * (wh[0] * wh[1] * (3 + scans) + len(content) * (40 if scans > 1 else 20)) * (1 + cut),
        orientation=orientation(exif, xmp),
        bytes_per_pixel=12,
        scales=scans == 1,
        cut=cut,
    )


def _only_tables(content: bytes, segments: list[_Segment]) -> bytes:
    """The file without segments on which no pixel depends."""
    tables = (content[at - 4 : end] for marker, at, end in segments if marker in _TABLES)
    return b"".join((b"\xff\xd8", *tables, memoryview(content)[segments[-1][1] - 4 :]))


def _segments(content: bytes) -> Iterator[_Segment]:
    """All segments up to and with the start of the first scan."""
    marker, end = 0, 2
    for _ in range(_MOST_SEGMENTS):
        marker, at, end = _next_segment(content, end, _MARKER, _MOST_GARBAGE)
        if marker == _EOI:
            raise corrupt("the JPEG ends before its pixels")
        yield marker, at, end
        if marker == _SOS:
            return
    raise too_much(f"more than {_MOST_SEGMENTS} segments before the JPEG's pixels")


def _next_segment(content: bytes, at: int, pattern: re.Pattern[bytes], within: int) -> _Segment:
    """The next marker that has a segment, or ends the image."""
    while found := pattern.search(content, at, at + within):
        marker, at = content[found.end() - 1], found.end()
        if marker == _EOI:
            return marker, at, at
        if marker in _OTHER_SOF:
            raise not_read(f"a JPEG coded in a rare way (SOF{marker - 0xC0}); baseline and progressive are read")
        if marker == _SOI or (marker < 0xC0 and marker not in _BARE):
            raise corrupt(f"a JPEG marker 0x{marker:02x} where none may stand")
        if marker not in _BARE:
            length = int.from_bytes(content[at : at + 2], "big")
            if length < 2 or at + length > len(content):
                raise corrupt("a JPEG segment reaches beyond the file")
            return marker, at + 2, at + length
    raise corrupt("the JPEG ends before its pixels")


def _read_sof(body: bytes) -> tuple[Size, int]:
    """Returns (size, number of components)."""
    if len(body) < 6:
        raise corrupt("a JPEG frame is cut")
    bits, height, width, components = struct.unpack_from(">BHHB", body)
    if bits != 8:
        raise not_read(f"a JPEG of {bits} bits; 8 are read")
    if not width or not height or not 1 <= components <= 4:
        raise corrupt(f"a JPEG of {width} x {height} pixels in {components} components")
    return (width, height), components


def _count_scans(content: bytes, at: int) -> int:
    """An upper bound on the number of scans; exact if there may be many."""
    most = content.count(b"\xff\xda", at)  # in the pixels' own bytes it cannot stand
    if most <= _FEW_SCANS:
        return max(most, 2)
    scans = 0
    for _ in range(_MOST_SEGMENTS):
        try:
            marker, _, at = _next_segment(content, at, _MARKER_AFTER_SCAN, len(content))
        except ImageError:
            return max(scans, 2)  # a decoder stops there as well
        if marker == _EOI:
            return max(scans, 2)
        scans += marker == _SOS
    raise too_much(f"more than {_MOST_SEGMENTS} segments between the JPEG's scans")
