"""Boxes: how AVIF (ISO/IEC 14496-12, 4.2) and JPEG 2000 (ITU-T T.800, I.4) files are cut alike."""

from __future__ import annotations

import struct


def read_box(content: bytes, at: int, end: int) -> tuple[bytes, int, int]:
    """The box that begins at `at`, within what ends at `end`.

    Returns:
      Its type, where its body begins, and where it ends, as it says itself: that may be before its beginning or beyond `end`.
    """
    length, kind = struct.unpack_from(">I4s", content, at)
    start = at + 8
    if length == 1:
        (length,) = struct.unpack_from(">Q", content, start)
        start += 8
    return kind, start, at + length if length else end
