"""Image formats by the first bytes of a file (magic numbers)."""

from __future__ import annotations

HEAD_BYTES = 32
"""First bytes that show the format of nearly every file; a longer list of ISO brands may need more."""

_STARTS = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),  # BigTIFF
    (b"MM\0+", "TIFF"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000"),  # in boxes
    (b"\xff\x4f\xff\x51", "JPEG2000"),  # bare
    (b"#?RADIANCE\n", "HDR"),
    (b"#?RGBE\n", "HDR"),
    *((b"P%d%c" % (kind, space), "PPM") for kind in range(1, 7) for space in b" \t\r\n"),
)
_ANY_START = tuple(start for start, _ in _STARTS)  # most names and JSON are none of these: one call says so
# of ISO/IEC 14496-12, 4.3; a file may name several, and AVIF files name those of HEIF as well
_BRANDS = (
    ("AVIF", {b"avif", b"avis"}),
    ("HEIF", {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"}),
)
_MOST_BRANDS_BYTES = 4096


def format_by_start(content: bytes) -> str:
    r"""The format that the first bytes of a file claim, by Pillow's name for it; `HDR` for Radiance, empty for none.

    >>> [format_by_start(start) for start in (b"GIF89a..", b"RIFF....WEBPVP8 ", b"\0\0\0\x14ftypmif1....avif", b"text")]
    ['GIF', 'WEBP', 'AVIF', '']
    """
    if content.startswith(_ANY_START):
        for start, name in _STARTS:
            if content.startswith(start) and len(content) > len(start):
                return name
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "WEBP"
    if content[4:8] != b"ftyp":
        return ""
    end = min(int.from_bytes(content[:4], "big"), _MOST_BRANDS_BYTES)
    brands = {content[at : at + 4] for at in (8, *range(16, end - 3, 4))}
    return next((name for name, of_format in _BRANDS if brands & of_format), "")
