"""GIF (89a): the canvas and its first frame.

Pillow decodes: OpenCV's reader clears its table of 4,097 vectors at every clear code, so 395 KB of them took 4.8 s, and Pillow
adds comments byte string to byte string, in quadratic time. It is therefore given the first frame and nothing else.
"""

from __future__ import annotations

import struct

from pipeline.detect.headers.header import Header, corrupt, too_much

_IMAGE, _EXTENSION, _CONTROL, _NOTHING = 0x2C, 0x21, 0xF9, 0
_MOST_BLOCKS = 2_000_000  # 0.2 s; 255 bytes each are usual


def read_gif(content: bytes) -> Header:
    """Reads a GIF file; only its first frame.

    Raises:
      ImageError: There is no frame, or more bytes than its pixels can need.
    """
    width, height, flags = struct.unpack_from("<HHB", content, 6)
    start = 13 + _table_size(flags)
    at, control = _skip_extensions(content, start)
    if content[at] != _IMAGE:
        raise corrupt("a GIF without a frame")
    left, top, frame_width, frame_height, flags = struct.unpack_from("<4HB", content, at + 1)
    pixels_at = at + 10 + _table_size(flags) + 1
    try:
        end, _ = _skip_blocks(content, pixels_at, _MOST_BLOCKS)
    except IndexError:
        end = len(content)
    wh = max(width, left + frame_width), max(height, top + frame_height)  # a frame beyond the canvas enlarges it
    if not frame_width or not frame_height:
        raise corrupt("a GIF's frame without pixels")
    if end - pixels_at > 4 * frame_width * frame_height + 65536:
        raise too_much(f"{end - pixels_at} compressed bytes for {frame_width} x {frame_height} pixels in a GIF")
    pixels = wh[0] * wh[1]
    return Header(
        "GIF",
        wh,
        b"".join((content[:start], control, content[at:end], b";")),
        1e-9 * (25 * pixels + 10 * (end - at)),
        ("pillow",),
        bytes_per_pixel=12,
        cut=end == len(content),
    )


def _table_size(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _skip_extensions(content: bytes, at: int) -> tuple[int, bytes]:
    """(where the first frame begins, the last graphic control before it)."""
    control, left = b"", _MOST_BLOCKS
    while left > 0 and content[at] in (_EXTENSION, _NOTHING):
        end = at + 1  # some encoders end a run of blocks twice
        if content[at] == _EXTENSION:
            end, blocks = _skip_blocks(content, at + 2, left)
            left -= blocks
            if content[at + 1] == _CONTROL and end - at == 8:
                control = content[at:end]
        at, left = end, left - 1
    return at, control


def _skip_blocks(content: bytes, at: int, most: int) -> tuple[int, int]:
    """(position behind a run of blocks and its terminator, number of blocks)."""
    for count in range(most):
        length = content[at]
        at += 1 + length
        if not length:
            return at, count
    raise too_much(f"more than {_MOST_BLOCKS} blocks before the end of a GIF's first frame")
