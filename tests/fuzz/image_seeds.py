"""Small valid images of every format that is read, in the variants that take different ways through a decoder."""

from __future__ import annotations

import functools

import cv2
import numpy as np
import pillow_heif
from PIL import Image

from tests.hostile_images import encoded

_RGB = cv2.resize(np.random.default_rng(7).integers(0, 255, (5, 7, 3), np.uint8), (61, 43), interpolation=cv2.INTER_CUBIC)
_IMAGE = Image.fromarray(_RGB)
_GREY, _BITS, _PALETTE = _IMAGE.convert("L"), _IMAGE.convert("1"), _IMAGE.quantize(16)
_ALPHA = Image.fromarray(np.dstack([_RGB, _RGB[..., :1]]))
_EXIF = Image.Exif()
_EXIF[0x0112] = 6


def _frames() -> dict[str, object]:
    """Options for further frames; new ones, since Pillow leaves settings of one format on them."""
    return {"save_all": True, "append_images": [_IMAGE.rotate(180), _GREY.convert("RGB")]}


def _opencv(extension: str, pixels: np.ndarray, *options: int) -> bytes:
    return cv2.imencode(extension, pixels, list(options))[1].tobytes()


@functools.cache
def seeds() -> dict[str, list[bytes]]:
    """Format -> its seeds."""
    pillow_heif.register_heif_opener()
    return {
        "JPEG": [
            encoded(_IMAGE, "JPEG", exif=_EXIF, quality=90),
            encoded(_IMAGE, "JPEG", progressive=True, subsampling=0),
            encoded(_GREY, "JPEG", restart_marker_rows=1),
            encoded(_IMAGE.convert("CMYK"), "JPEG"),
            encoded(_IMAGE, "MPO", **_frames()),
        ],
        "PNG": [
            encoded(_IMAGE, "PNG", exif=_EXIF, dpi=(72, 72)),
            encoded(_PALETTE, "PNG", transparency=3),
            encoded(_IMAGE, "PNG", **_frames()),
            encoded(Image.fromarray(_RGB[..., 0].astype(np.uint16) * 257), "PNG"),
            encoded(_ALPHA, "PNG"),
        ],
        "GIF": [
            encoded(_PALETTE, "GIF", transparency=2),
            encoded(_IMAGE, "GIF", **_frames()),
            encoded(_GREY, "GIF", interlace=0),
        ],
        "BMP": [encoded(image, "BMP") for image in (_IMAGE, _PALETTE, _BITS, _ALPHA)],
        "TIFF": [
            encoded(_IMAGE, "TIFF"),
            encoded(_IMAGE, "TIFF", compression="tiff_lzw", tiffinfo={278: 5, 317: 2}),
            encoded(_IMAGE, "TIFF", compression="tiff_adobe_deflate", big_tiff=True),
            encoded(_IMAGE, "TIFF", compression="jpeg"),
            encoded(_BITS, "TIFF", compression="group4"),
            encoded(_BITS, "TIFF", compression="group3"),
            encoded(_GREY, "TIFF", compression="packbits", exif=_EXIF),
            encoded(Image.fromarray(_RGB[..., 0].astype(np.float32)), "TIFF"),
            encoded(_IMAGE, "TIFF", **_frames()),
            encoded(_IMAGE, "TIFF", compression="zstd"),
            _opencv(".tiff", _RGB.astype(np.uint16) * 257),
        ],
        "WEBP": [
            encoded(_IMAGE, "WEBP"),
            encoded(_ALPHA, "WEBP", lossless=True),
            encoded(_ALPHA, "WEBP", exif=_EXIF, quality=50),
            encoded(_IMAGE, "WEBP", **_frames()),
        ],
        "JPEG2000": [
            encoded(_IMAGE, "JPEG2000"),
            encoded(_IMAGE, "JPEG2000", no_jp2=True, irreversible=True, tile_size=(16, 16)),
            encoded(_ALPHA, "JPEG2000", precinct_size=(32, 32), codeblock_size=(16, 16), progression="RPCL"),
            encoded(_GREY, "JPEG2000", quality_layers=[20, 5], quality_mode="rates"),
        ],
        "AVIF": [
            encoded(_IMAGE, "AVIF", exif=_EXIF),
            encoded(_ALPHA, "AVIF", subsampling="4:4:4"),
            encoded(_GREY, "AVIF"),
            encoded(_IMAGE, "AVIF", **_frames()),
        ],
        "HEIF": [
            encoded(_IMAGE, "HEIF", exif=_EXIF.tobytes()),
            encoded(_ALPHA, "HEIF"),
            encoded(_GREY, "HEIF"),
            encoded(_IMAGE, "HEIF", **_frames()),
        ],
        "PNM": [
            *(encoded(image, "PPM") for image in (_IMAGE, _GREY, _BITS)),
            b"P3\n# text\n61 43\n255\n" + b" ".join(b"%d" % value for value in _RGB.ravel()) + b"\n",
            _opencv(".pgm", _RGB[..., 0], cv2.IMWRITE_PXM_BINARY, 0),
        ],
        "HDR": [_opencv(".hdr", _RGB.astype(np.float32) / 99)],
        "TGA": [
            encoded(_IMAGE, "TGA"),
            encoded(_PALETTE, "TGA", compression="tga_rle"),
            encoded(_ALPHA, "TGA", compression="tga_rle", orientation=-1),
        ],
    }
