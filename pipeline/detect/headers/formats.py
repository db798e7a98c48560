"""Which formats are read, and by whom: the file's first bytes decide, once, and no decoder is asked for any other format.

| format | read because | decoded by |
|---|---|---|
| JPEG, MPO | cameras, the web | OpenCV, here |
| PNG | screens, data sets | OpenCV, above 4 MB Pillow; here |
| WebP | the web | OpenCV, here |
| GIF | the web | Pillow, apart |
| BMP | Windows, microscopes | OpenCV or Pillow, apart |
| TIFF | scanners, microscopes, maps | OpenCV or Pillow, apart |
| JPEG 2000 | satellites, archives | OpenCV or Pillow, apart |
| AVIF | phones, the web | Pillow, apart |
| HEIC, HEIF | phones | Pillow with pillow-heif (the extra `heif`), apart |
| PNM | tools and papers on vision | OpenCV or Pillow, apart |
| Radiance HDR | panoramas | OpenCV, apart |
| Targa (version 2) | renderers | Pillow, apart |

Here: in this process, after a module of this folder has read the header and bounded what decoding costs. Apart: in a child
process that the kernel bounds (`decode_in_subprocess.py`).

Not read, although Pillow could: what it gives to other programs (EPS, WMF, and IPTC, in which any of its formats may be nested),
what it decodes while it opens it (ICO, ICNS), and formats in which photographs do not come (PSD, PCX, DDS, FITS, XBM and others).
"""

from __future__ import annotations

import struct

from pipeline.detect.headers import jpeg, png, webp
from pipeline.detect.headers.header import Header, corrupt, not_read

NAMES = "JPEG, PNG, GIF, BMP, TIFF, WebP, JPEG 2000, AVIF, HEIC, PNM, Radiance HDR and Targa"

_READERS = {"JPEG": jpeg.read_jpeg, "PNG": png.read_png, "WEBP": webp.read_webp}
_STARTS = (
    (b"\xff\xd8\xff", "JPEG"),
    (png.SIGNATURE, "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
    (b"#?RADIANCE\n", "HDR"),
    (b"#?RGBE\n", "HDR"),
    *((b"P%d%c" % (kind, space), "PPM") for kind in range(1, 7) for space in b" \t\r\n"),
)
_TARGA_END = b"TRUEVISION-XFILE.\0"
# of ISO/IEC 14496-12, 4.3; a file may name several, and AVIF files name those of HEIF as well
_BRANDS = (
    ("AVIF", {b"avif", b"avis"}),
    ("HEIF", {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"}),
)


def format_of(content: bytes) -> str:
    """The format that a file's first bytes (of Targa: its last) claim, by the name that Pillow has for it; `HDR` for Radiance.

    Raises:
      ImageError: It is none that is read.
    """
    for start, name in _STARTS:
        if content.startswith(start) and len(content) > len(start):
            return name
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "WEBP"
    if content[4:8] == b"ftyp" and (name := _format_by_brand(content)):
        return name
    if content.endswith(_TARGA_END) and len(content) > 44:
        return "TGA"
    # four bytes tell what it is; more of a file that is no image may be what nobody should read in a row
    raise not_read(f"{len(content)} bytes that start with {content[:4]!r}; {NAMES} are read")


def is_decoded_in_subprocess(name: str) -> bool:
    """Whether a child process decodes images of this format."""
    return name not in _READERS


def read_header(content: bytes) -> Header:
    """What a JPEG, PNG or WebP file says of itself.

    Raises:
      ImageError: It is of no format that is read, its header is damaged, or it has more parts than an image can need.
    """
    try:
        return _READERS[format_of(content)](content)
    except (struct.error, IndexError, OverflowError) as err:  # a length or offset points beyond the file
        raise corrupt("it ends too early, or points beyond the end of the file") from err


def _format_by_brand(content: bytes) -> str:
    end = min(int.from_bytes(content[:4], "big"), 4096)
    brands = {content[at : at + 4] for at in (8, *range(16, end - 3, 4))}
    return next((name for name, of_format in _BRANDS if brands & of_format), "")
