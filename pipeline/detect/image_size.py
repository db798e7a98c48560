"""Width and height as a file's first bytes declare them, for files whose header Pillow refuses but OpenCV may read."""

from __future__ import annotations

import io
import re
import struct

from PIL import TiffImagePlugin

Size = tuple[int, int]

_RADIANCE_SIZE = re.compile(rb"\n[-+]([XY]) (\d{1,9}) [-+][XY] (\d{1,9})\n")
_HEADER_BYTES = 65536


def declared_wh(content: bytes) -> Size | None:
    """The size that a PNG, BMP, Radiance HDR, JPEG 2000 or TIFF file declares; None where it shows none.

    Sources: PNG (RFC 2083, 4.1.1), BMP (BITMAPCOREHEADER, BITMAPINFOHEADER), https://paulbourke.net/dataformats/pic,
    JPEG 2000 (ITU-T T.800, A.5.1), TIFF 6.0.
    """
    try:
        return _read_wh(content)
    except Exception:  # noqa: BLE001  the file is damaged already, in whatever way
        return None


def _read_wh(content: bytes) -> Size | None:
    if content.startswith(b"\x89PNG"):
        return struct.unpack_from(">II", content, 16)
    if content.startswith(b"BM"):
        is_core = content[14:18] == b"\x0c\x00\x00\x00"
        width, height = struct.unpack_from("<HH" if is_core else "<ii", content, 18)
        return abs(width), abs(height)
    if content.startswith(b"#?"):
        return _radiance_wh(content)
    if content.startswith((b"II*\0", b"MM\0*")):
        tags = TiffImagePlugin.ImageFileDirectory_v2(content[:8])
        file = io.BytesIO(content)
        file.seek(tags.next)
        tags.load(file)
        return int(tags[TiffImagePlugin.IMAGEWIDTH]), int(tags[TiffImagePlugin.IMAGELENGTH])
    codestream = content.find(b"\xff\x4f\xff\x51", 0, _HEADER_BYTES)
    if codestream >= 0:
        right, bottom, left, top = struct.unpack_from(">4I", content, codestream + 8)
        return right - left, bottom - top
    return None


def _radiance_wh(content: bytes) -> Size | None:
    found = _RADIANCE_SIZE.search(content[:_HEADER_BYTES])
    if not found:
        return None
    sizes = int(found[2]), int(found[3])
    return sizes if found[1] == b"X" else sizes[::-1]
