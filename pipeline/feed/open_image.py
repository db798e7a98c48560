"""Opens an image file: its size, its orientation, and what decoding takes, without memory for its pixels.

Pillow opens files lazily, and gives their size. Only of PNG and WebP the size is read here, at its fixed place: Pillow refuses
PNG files with long texts, and takes memory for the canvas of a WebP.
"""

from __future__ import annotations

import dataclasses
import io
import re
import struct

from PIL import Image, Jpeg2KImagePlugin, JpegImagePlugin, TgaImagePlugin, TiffImagePlugin, WebPImagePlugin

from models.base.project import pip_install
from pipeline.failures import ImageError
from pipeline.feed.decoders import opencv_8_bit
from pipeline.feed.readable_formats import Size, corrupt, not_read

# Pillow imports all of its formats if one is missing that is read
Image.preinit()  # BMP, GIF, JPEG, PNM and PNG
PLUGINS = (Jpeg2KImagePlugin, TgaImagePlugin, TiffImagePlugin, WebPImagePlugin)
Image.MAX_IMAGE_PIXELS = None  # `decode_image` has the limit

_ORIENTATION = 0x0112  # a tag of Exif
_PNG_EXIF = re.compile(rb"eXIf(?=II\*\0|MM\0\*)")
_WEBP_EXIF = re.compile(rb"EXIF.{4}(?:Exif\0\0)?(?=II\*\0|MM\0\*)", re.DOTALL)
_PNG_END = b"IEND\xaeB`\x82"
_JPEG_END, _JPEG_RESTARTS = b"\xff\xd9", b"\xff\xdd\0\4"
_BITS_PER_SAMPLE = 258  # a tag of TIFF
_JPEG2000_SECONDS = 1.5  # a megapixel; without loss it takes 0.36
_RADIANCE_SIZE = re.compile(rb"-Y +(\d{1,9}) +\+X +(\d{1,9})\n")  # the one orientation that OpenCV reads
_RADIANCE_START = b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n"


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedImage:
    """An image file whose size is known.

    Attributes:
      format: Pillow's name for it; `HDR` for Radiance.
      content: The bytes for OpenCV.
      wh: Width and height of the pixels as they are stored, before `orientation`.
      orientation: As in Exif 2.3, section 4.6.4: 1 to 8; 1 also where the decoder applies it.
      bytes_per_pixel: Peak memory of decoding for each pixel of `wh`, as measured; where OpenCV fails, Pillow may take 16.
      seconds_per_megapixel: Most CPU time of decoding: four times what was measured, or more.
      scales: Whether decoding at reduced scale takes less memory: JPEG whose pixels come in one pass.
      cut: Whether the file is shorter than its own lengths say; a JPEG: lacks the marker of its end, which `content` has.
      image: Pillow's, if it has opened the file.
    """

    format: str
    content: bytes
    wh: Size
    orientation: int = 1
    bytes_per_pixel: float = 16.0
    seconds_per_megapixel: float = 0.2
    scales: bool = False
    cut: bool = False
    image: Image.Image | None = None


def open_image(name: str, content: bytes) -> OpenedImage:
    """Opens an image file.

    Args:
      name: Its format, as `format_of` names it.
      content: The file's bytes.

    Raises:
      ImageError: It cannot be decoded. Pillow's errors are raised as they are.
    """
    if name == "JPEG":
        return _open_jpeg(content)
    if name == "PNG":
        return _open_png(content)
    if name == "WEBP":
        return _open_webp(content)
    if name == "HDR":
        return _open_radiance(content)
    return _open_other(name, content)


def open_with_pillow(name: str, content: bytes) -> Image.Image:
    """Opens a file with Pillow as an image of this format alone."""
    return Image.open(io.BytesIO(content), formats=(name,))


def orientation(image: Image.Image) -> int:
    """The orientation, 1 to 8, as in Exif 2.3, section 4.6.4, in Exif or else XMP; 1 if missing, invalid or damaged."""
    try:
        value = image.getexif().get(_ORIENTATION)
    except Exception:  # noqa: BLE001  Pillow's errors for damaged blocks are of many classes
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _orientation_in(exif: bytes, xmp: bytes = b"") -> int:
    image = Image.Image()
    image.info = {"exif": exif, "xmp": xmp}
    return orientation(image)


def _open_jpeg(content: bytes) -> OpenedImage:
    """Opens a JPEG file; the first image of several (MPO)."""
    file = io.BytesIO(content)
    image = JpegImagePlugin.JpegImageFile(file)
    scan, components = file.tell(), image.layers  # the pixels begin there
    cut = not content.endswith(_JPEG_END) and content.find(_JPEG_END, scan) < 0
    if cut:  # perhaps of its end alone; in what has restarts the decoder shows no difference
        if content.find(_JPEG_RESTARTS, 0, scan) >= 0:
            raise ImageError("decode", "truncated", "the JPEG ends within its pixels (no end-of-image marker)")
        content = content.rstrip(b"\xff") + _JPEG_END
    all_components = b"\xff\xda\0" + bytes([6 + 2 * components, components])
    in_one_pass = "progressive" not in image.info and content.startswith(all_components, scan - 8 - 2 * components)
    return OpenedImage(
        "JPEG",
        content,
        image.size,
        orientation(image) if image.info.keys() & {"exif", "xmp"} else 1,
        bytes_per_pixel=7 if in_one_pass and not cut else 12,
        seconds_per_megapixel=0.05,
        scales=in_one_pass,
        cut=cut,
    )


def _open_png(content: bytes) -> OpenedImage:
    if content[12:16] != b"IHDR" or len(content) < 24:
        raise corrupt("a PNG begins with its size")
    found = _PNG_EXIF.search(content)
    exif = content[found.end() :] if found else b""
    wh = struct.unpack_from(">II", content, 16)
    return OpenedImage("PNG", content, wh, _orientation_in(exif), bytes_per_pixel=15, cut=content.rfind(_PNG_END) < 0)


def _open_webp(content: bytes) -> OpenedImage:
    """Opens a WebP file (RFC 9649); the canvas of an animation."""
    kind, exif, xmp = content[12:16], b"", b""
    if kind == b"VP8X":
        wh = 1 + int.from_bytes(content[24:27], "little"), 1 + int.from_bytes(content[27:30], "little")
        found = _WEBP_EXIF.search(content)
        exif, xmp = content[found.end() :] if found else b"", content
    elif kind == b"VP8L":
        packed = int.from_bytes(content[21:25], "little")
        wh = 1 + (packed & 0x3FFF), 1 + (packed >> 14 & 0x3FFF)
    elif kind == b"VP8 ":
        wh = int.from_bytes(content[26:28], "little") & 0x3FFF, int.from_bytes(content[28:30], "little") & 0x3FFF
    else:
        raise corrupt("a WebP begins with its size or its pixels")
    cut = int.from_bytes(content[4:8], "little") + 8 > len(content)
    return OpenedImage("WEBP", content, wh, _orientation_in(exif, xmp), cut=cut)


def _open_radiance(content: bytes) -> OpenedImage:
    """Opens a Radiance picture, which Pillow does not read; OpenCV gets three lines of header, as it fails at most others."""
    end = content.find(b"\n\n")
    found = _RADIANCE_SIZE.match(content, end + 2) if end >= 0 else None
    if not found:
        raise corrupt("a Radiance picture without its size, -Y height +X width, behind the first empty line")
    if b"FORMAT=32-bit_rle_xyze" in content[:end]:
        raise not_read("a Radiance picture in XYZE; RGBE is read")
    return OpenedImage("HDR", _RADIANCE_START + content[found.start() :], (int(found[2]), int(found[1])))


def _open_other(name: str, content: bytes) -> OpenedImage:
    if name == "PPM":
        content += b"\n"  # OpenCV reads a last number up to what follows it
    if name == "HEIF":
        _import_heif()
    try:
        image = open_with_pillow(name, content)
    except Exception:
        # OpenCV reads some BMP files that Pillow does not
        pixels = opencv_8_bit(name, content) if name in ("BMP", "TIFF", "PPM") else None
        if pixels is None:
            raise
        return OpenedImage(name, content, pixels.shape[1::-1])
    upright = orientation(image) if name == "AVIF" else 1  # the decoders of the others turn the pixels themselves
    seconds = _JPEG2000_SECONDS if image.format == "JPEG2000" else 0.2
    return OpenedImage(name, content, image.size, upright, _bytes_per_pixel(image), seconds, image=image)


def _bytes_per_pixel(image: Image.Image) -> float:
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        bits = image.tag_v2.get(_BITS_PER_SAMPLE, (1,))
        return 7.0 if image.mode in ("L", "RGB") and {*bits} == {8} else max(16.0, 12 + float(sum(bits)) / 8)
    if image.format == "JPEG2000":
        return max(20, 4 + 5.5 * len(image.getbands()))
    return 16.0


def _import_heif() -> None:
    try:
        import pillow_heif
    except ImportError as err:
        message = f"HEIC and HEIF need pillow-heif: {pip_install('heif')}"
        raise ImageError("decode", "no_decoder", message) from err
    pillow_heif.options.DECODE_THREADS = 1  # images are decoded side by side already
    pillow_heif.register_heif_opener()
