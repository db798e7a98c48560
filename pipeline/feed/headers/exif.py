"""Reads the orientation from Exif or XMP."""

from __future__ import annotations

import re
import struct

_ORIENTATION = 0x0112
_TYPES = {3: "H", 4: "I"}
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation(exif: bytes, xmp: bytes = b"") -> int:
    r"""The orientation, 1 to 8, as in Exif 2.3, section 4.6.4; 1 if missing or invalid.

    Reads one tag of the first directory only: a hostile directory names the whole block as the value of each of 65,535 tags.

    Args:
      exif: A TIFF structure, with or without `Exif\0\0` before it; may be damaged.
      xmp: Used if Exif has no such tag.
    """
    try:
        value = _exif_value(exif.removeprefix(b"Exif\0\0"))
    except struct.error:
        value = None
    if value is None:
        found = _XMP.search(xmp)
        value = int(found[1]) if found else 1
    return value if 1 <= value <= 8 else 1


def _exif_value(tiff: bytes) -> int | None:
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return None
    (start,) = struct.unpack_from(order + "I", tiff, 4)
    (count,) = struct.unpack_from(order + "H", tiff, start)
    for at in range(start + 2, start + 2 + 12 * count, 12):
        tag, kind, values = struct.unpack_from(order + "HHI", tiff, at)
        if tag == _ORIENTATION:
            return int(struct.unpack_from(order + _TYPES[kind], tiff, at + 8)[0]) if kind in _TYPES and values == 1 else 0
    return None
