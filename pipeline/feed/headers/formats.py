"""Formats that are read, and their decoders. A file's first bytes choose the one decoder that gets the file.

| format | comes from | decoded by |
|---|---|---|
| JPEG, MPO | cameras, the web | OpenCV |
| PNG | screens, data sets | OpenCV, above 4 MB Pillow |
| WebP | the web | OpenCV |
| GIF | the web | Pillow |
| BMP | Windows, microscopes | OpenCV or Pillow |
| TIFF | scanners, microscopes, maps | OpenCV or Pillow |
| JPEG 2000 | satellites, archives | OpenCV or Pillow |
| AVIF | phones, the web | Pillow |
| HEIC, HEIF | phones | Pillow with pillow-heif (the extra `heif`) |
| PNM | tools and papers on vision | OpenCV or Pillow |
| Radiance HDR | panoramas | OpenCV |
| Targa (version 2) | renderers | Pillow |

Not read, although Pillow could: formats that it passes to other programs (EPS, WMF, and IPTC, which may nest any format), formats
that it decodes while it opens them (ICO, ICNS), and formats without photographs (PSD, PCX, DDS, FITS, XBM and others).
"""

from __future__ import annotations

import struct

from pipeline.feed.headers import jpeg, png, webp
from pipeline.feed.headers.header import Header, corrupt, not_read
from pipeline.image_formats import format_by_start

NAMES = "JPEG, PNG, GIF, BMP, TIFF, WebP, JPEG 2000, AVIF, HEIC, PNM, Radiance HDR and Targa"

_READERS = {"JPEG": jpeg.read_jpeg, "PNG": png.read_png, "WEBP": webp.read_webp}
_TARGA_END = b"TRUEVISION-XFILE.\0"


def format_of(content: bytes) -> str:
    """The format that a file's first bytes (of Targa: its last bytes) claim, by Pillow's name for it; `HDR` for Radiance.

    Raises:
      ImageError: No format that is read.
    """
    if name := format_by_start(content):
        return name
    if content.endswith(_TARGA_END) and len(content) > 44:
        return "TGA"
    # four bytes show the type; more of a file that is no image might put secrets into a row
    raise not_read(f"{len(content)} bytes that start with {content[:4]!r}; {NAMES} are read")


def has_header(name: str) -> bool:
    """Whether `read_header` reads images of this format."""
    return name in _READERS


def read_header(content: bytes) -> Header:
    """Reads the header of a JPEG, PNG or WebP file.

    Raises:
      ImageError: The format is not read, the header is damaged, or the file has more parts than an image can need.
    """
    try:
        return _READERS[format_of(content)](content)
    except (struct.error, IndexError, OverflowError) as err:  # a length or offset points beyond the file
        raise corrupt("it ends too early, or points beyond the end of the file") from err
