"""JPEG (ITU-T T.81), as libjpeg walks it: one frame, its scans, and which way is up."""

from __future__ import annotations

import dataclasses
import re
import struct

from pipeline.detect.headers.exif import orientation
from pipeline.detect.headers.header import Header, Size, corrupt, not_read, too_much
from pipeline.failures import ImageError

_MARKER = re.compile(rb"\xff([\x01-\xfe])")  # whatever stands between two segments is skipped, as libjpeg does
_MARKER_AFTER_SCAN = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")  # restarts belong to the scan
_SOF, _SOI, _EOI, _SOS, _APP1 = (0xC0, 0xC1, 0xC2), 0xD8, 0xD9, 0xDA, 0xE1
_OTHER_SOF = {0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
_BARE = {0x01, *range(0xD0, 0xD8)}  # markers without a segment
_MOST_SEGMENTS = 10_000  # an ICC profile of 16 MB takes 256
_FEW_SCANS = 64  # encoders write 10, optimisers up to 20


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """What decoding a JPEG stream takes: its frame, and how often its blocks are gone through.

    Attributes:
      wh: Width and height.
      scans: Passes over the pixels; at most so many where it is more than one.
      scans_at: Where the first scan begins.
      exif: The first Exif segment, or nothing.
      xmp: The first XMP segment, or nothing.
    """

    wh: Size
    scans: int
    scans_at: int
    exif: bytes = b""
    xmp: bytes = b""

    def seconds(self, size: int) -> float:
        """Worst case for a stream of `size` bytes: 3 ns a pixel, 1 ns a pixel and scan, 20 (several scans: 40) ns a byte."""
        pixels = self.wh[0] * self.wh[1]
        return 1e-9 * (pixels * (3 + self.scans) + size * (40 if self.scans > 1 else 20))


def read_jpeg(content: bytes) -> Header:
    """Reads a JPEG file; the first image of several (MPO).

    Raises:
      ImageError: It is damaged, cut, or of a kind that is not read.
    """
    frame = read_frame(content)
    if not content.endswith(b"\xff\xd9") and content.find(b"\xff\xd9", frame.scans_at) < 0:
        raise ImageError("decode", "truncated", "the JPEG ends within its pixels (no end-of-image marker)")
    return Header(
        "JPEG",
        frame.wh,
        content,
        frame.seconds(len(content)),
        orientation=orientation(frame.exif, frame.xmp),
        bytes_per_pixel=12,
        scales=frame.scans == 1,
    )


def read_frame(content: bytes) -> Frame:
    """Walks the segments of a JPEG stream up to its first scan, and counts the scans.

    Raises:
      ImageError: There is no frame or more than one, or it is of a kind that is not read.
    """
    frame: tuple[Size, int, bool] | None = None
    exif = xmp = b""
    at = 2
    for _ in range(_MOST_SEGMENTS):
        marker, at, end = _next_segment(content, at, _MARKER)
        if marker == _EOI:
            break
        if marker in _SOF:
            if frame:
                raise corrupt("the JPEG declares two frames")
            frame = _read_sof(content[at:end], progressive=marker == 0xC2)
        elif marker == _SOS:
            if frame is None:
                raise corrupt("the JPEG's pixels begin before their size is given")
            wh, components, progressive = frame
            several = progressive or content[at : at + 1] != bytes([components])
            return Frame(wh, _count_scans(content, at - 4) if several else 1, at - 4, exif, xmp)
        elif marker == _APP1:
            segment = content[at:end]
            if segment.startswith(b"Exif\0\0"):
                exif = exif or segment
            elif segment.startswith(b"http://ns.adobe.com/xap/1.0/\0"):
                xmp = xmp or segment
        at = end
    else:
        raise too_much(f"more than {_MOST_SEGMENTS} segments before the JPEG's pixels")
    raise corrupt("the JPEG ends before its pixels")


def _next_segment(content: bytes, at: int, pattern: re.Pattern[bytes]) -> tuple[int, int, int]:
    """The next marker that has a segment (or ends the image): (marker, start of its body, its end)."""
    while found := pattern.search(content, at):
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


def _read_sof(body: bytes, *, progressive: bool) -> tuple[Size, int, bool]:
    """(size, number of components, progressive) of a start of frame."""
    if len(body) < 6:
        raise corrupt("a JPEG frame is cut")
    bits, height, width, components = struct.unpack_from(">BHHB", body)
    if bits != 8:
        raise not_read(f"a JPEG of {bits} bits; 8 are read")
    if not width or not height or components not in (1, 3, 4):
        raise corrupt(f"a JPEG of {width} x {height} pixels in {components} components")
    return (width, height), components, progressive


def _count_scans(content: bytes, at: int) -> int:
    """At most how many scans there are; counted exactly where they look like many."""
    most = content.count(b"\xff\xda", at)  # in the pixels' own bytes it cannot stand
    if most <= _FEW_SCANS:
        return max(most, 2)
    scans = 0
    for _ in range(_MOST_SEGMENTS):
        try:
            marker, _, at = _next_segment(content, at, _MARKER_AFTER_SCAN)
        except ImageError:
            return max(scans, 2)  # a decoder stops there as well
        if marker == _EOI:
            return max(scans, 2)
        scans += marker == _SOS
    raise too_much(f"more than {_MOST_SEGMENTS} segments between the JPEG's scans")
