"""Which formats are read, and by whom: the file's first bytes decide, once, and no decoder is asked for any other format.

| format | read because | decoded by | what bounds it |
|---|---|---|---|
| JPEG, MPO | cameras, the web | OpenCV | pixels x scans and bytes |
| PNG | screens, data sets | OpenCV; above 4 MB Pillow | unpacked bytes; texts, profiles and later frames are taken out |
| GIF | the web | Pillow | the canvas; the first frame alone is kept |
| BMP | Windows, microscopes | OpenCV, Pillow | the header's size |
| TIFF | scanners, microscopes, maps | OpenCV, Pillow | tiles, strips, bytes of tags; the first page alone is kept |
| WebP | the web | OpenCV | the canvas; the first frame alone is kept |
| JPEG 2000 | satellites, archives | OpenCV or Pillow | tiles, precincts, code blocks and packets |
| AVIF | phones, the web | Pillow | the AV1 stream's own frames |
| PNM | tools and papers on vision | OpenCV | the header's size |
| Radiance HDR | panoramas | OpenCV | the header's size |
| Targa (version 2) | renderers | Pillow | the header's size |

Not read, although Pillow could: what it gives to other programs (EPS, WMF, and IPTC, in which any of its formats may be nested),
what it decodes while it opens it (ICO, ICNS), and formats in which photographs do not come (PSD, PCX, DDS, FITS, XBM and others).
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from pipeline.detect.headers import avif, bitmaps, gif, jpeg, jpeg2000, png, tiff, webp
from pipeline.detect.headers.header import Header, corrupt, not_read

NAMES = "JPEG, PNG, GIF, BMP, TIFF, WebP, JPEG 2000, AVIF, PNM, Radiance HDR and Targa"
_BRANDS = {b"avif", b"avis"}

_STARTS: tuple[tuple[bytes, Callable[[bytes], Header]], ...] = (
    (b"\xff\xd8\xff", jpeg.read_jpeg),
    (png.SIGNATURE, png.read_png),
    (b"GIF87a", gif.read_gif),
    (b"GIF89a", gif.read_gif),
    (b"BM", bitmaps.read_bmp),
    (b"II*\0", tiff.read_tiff),
    (b"MM\0*", tiff.read_tiff),
    (b"II+\0", tiff.read_tiff),
    (b"MM\0+", tiff.read_tiff),
    (jpeg2000.BOXES, jpeg2000.read_jpeg2000),
    (jpeg2000.CODESTREAM, jpeg2000.read_jpeg2000),
    (b"#?RADIANCE\n", bitmaps.read_radiance),
    (b"#?RGBE\n", bitmaps.read_radiance),
    *((b"P%d%c" % (kind, space), bitmaps.read_pnm) for kind in range(1, 7) for space in b" \t\r\n"),
)


def read_header(content: bytes) -> Header:
    """What an image file says of itself.

    Raises:
      ImageError: It is of no format that is read, its header is damaged, or it has more parts than an image can need.
    """
    read = _reader(content)
    if read is None:
        # four bytes tell what it is; more of a file that is no image may be what nobody should read in a row
        raise not_read(f"{len(content)} bytes that start with {content[:4]!r}; {NAMES} are read")
    try:
        return read(content)
    except (struct.error, IndexError, OverflowError) as err:  # a length or offset points beyond the file
        raise corrupt("it ends too early, or points beyond the end of the file") from err


def _reader(content: bytes) -> Callable[[bytes], Header] | None:
    for start, read in _STARTS:
        if content.startswith(start) and len(content) > len(start):
            return read
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return webp.read_webp
    if content[4:8] == b"ftyp" and _is_avif(content):
        return avif.read_avif
    if content.endswith(bitmaps.TARGA_END) and len(content) > 44:
        return bitmaps.read_targa
    return None


def _is_avif(content: bytes) -> bool:
    end = min(int.from_bytes(content[:4], "big"), 4096)
    return any(content[at : at + 4] in _BRANDS for at in (8, *range(16, end - 3, 4)))
