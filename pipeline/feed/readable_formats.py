"""Formats that are read, and their decoders. A file's first bytes choose the one decoder that gets the file.

| format | comes from | decoded by |
|---|---|---|
| JPEG, MPO | cameras, the web | OpenCV |
| PNG | screens, data sets | OpenCV |
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

from pipeline.failures import ImageError
from pipeline.image_formats import format_by_start

NAMES = "JPEG, PNG, GIF, BMP, TIFF, WebP, JPEG 2000, AVIF, HEIC, PNM, Radiance HDR and Targa"

Size = tuple[int, int]
"""Width and height."""

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


def corrupt(message: str) -> ImageError:
    """The error for an image that contradicts itself or its format."""
    return ImageError("decode", "corrupt", f"damaged image: {message}")


def not_read(message: str) -> ImageError:
    """The error for a kind of image that is not supported."""
    return ImageError("decode", "not_an_image", f"expected an image, got {message}")


def too_large(most: str, wh: Size) -> ImageError:
    """The error for an image above `max_megapixels`."""
    message = f"expected at most {most}, got {wh[0]} x {wh[1]} pixels; max_megapixels sets the limit"
    return ImageError("decode", "too_large", message)
