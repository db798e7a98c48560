"""The child process that decodes rarer image formats, one image at a time; `decode_in_subprocess.py` starts it.

    parent                                   child
    format, limits, the file's bytes   ->    opens the image
                                       <-    its size in pixels
    go on (one large image at a time)  ->    decodes it
                                       <-    its pixels

In place of an answer the child may send a reason why not. While it works, the kernel ends it when its time is over or its
parent has ended. It imports neither TensorFlow nor Beam.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import math
import os
import re
import resource
import signal
import socket
from collections.abc import Iterator

import cv2
import numpy as np
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    Jpeg2KImagePlugin,
    PpmImagePlugin,
    TgaImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
)

from pipeline.detect.child_messages import TIMED_OUT, receive, send
from pipeline.detect.decoders import one_line, opencv_pixels, pillow_pixels, to_8_bit, turn_upright
from pipeline.detect.headers.exif import orientation
from pipeline.detect.headers.header import Size, corrupt, not_read, too_large
from pipeline.failures import ImageError

# Pillow imports all of its formats if one of these is missing
PLUGINS = (BmpImagePlugin, GifImagePlugin, Jpeg2KImagePlugin, PpmImagePlugin, TgaImagePlugin, TiffImagePlugin)

_WAITS = 20  # an image may take this many times its CPU time in all: ends a decoder that hangs, spares one on a busy machine
_BYTES_PER_PIXEL = 16  # of decoding; images that take more may have fewer pixels
_BYTES_PER_BYTE = 4  # of the file: the copies that decoders make
_MORE_BYTES = 96 << 20
_BITS_PER_SAMPLE = 258  # a tag of TIFF
_OPENCV_FIRST = {"BMP", "TIFF", "PPM", "HDR"}  # OpenCV scales 16 bits; Pillow gets what OpenCV cannot read
_OPENCV_JPEG2000_MODES = {"L", "RGB", "RGBA", "I;16"}
_RADIANCE_SIZE = re.compile(rb"-Y +(\d{1,9}) +\+X +(\d{1,9})\n")  # the one orientation that OpenCV reads
_RADIANCE_START = b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n"


@dataclasses.dataclass(frozen=True, slots=True)
class _Opened:
    """An image whose header is read; `image` is None if Pillow cannot read it."""

    name: str
    content: np.ndarray
    wh: Size
    image: Image.Image | None = None


def serve() -> None:
    """Answers messages on standard input, a socket, until its other end closes."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (*TIMED_OUT, signal.SIGIO):
        signal.signal(number, signal.SIG_DFL)  # ends the process, also within native code; the parent may have ignored it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Image.MAX_IMAGE_PIXELS = None  # `_check_size` has the limit
    with socket.socket(fileno=0) as channel, contextlib.suppress(OSError, EOFError):
        fcntl.fcntl(channel, fcntl.F_SETOWN, os.getpid())
        while True:
            _answer(channel)


def _answer(channel: socket.socket) -> None:
    asked, content = receive(channel)
    try:
        with _bounded(channel, asked["seconds"], content.size):
            opened = _open(asked["format"], content)
            held_pixels = _check_size(opened, asked["max_pixels"])
        send(channel, {"held_pixels": held_pixels, "wh": opened.wh})
        receive(channel)
        with _bounded(channel, asked["seconds"], content.size, held_pixels):
            pixels = _decode(opened)
    except ImageError as err:
        send(channel, {"reason": err.reason, "message": str(err)})
    else:
        send(channel, {"wh": pixels.shape[1::-1]}, pixels.reshape(-1).data)


@contextlib.contextmanager
def _bounded(channel: socket.socket, seconds: float, size: int, held_pixels: float = 0.0) -> Iterator[None]:
    """Bounds time and memory, ends the process with its parent, and turns errors into `ImageError`."""
    flags = fcntl.fcntl(channel, fcntl.F_GETFL)
    _limit_memory(int(_BYTES_PER_PIXEL * held_pixels + _BYTES_PER_BYTE * size + _MORE_BYTES))
    _limit_time(seconds)
    fcntl.fcntl(channel, fcntl.F_SETFL, flags | os.O_ASYNC)  # the parent sends nothing now: SIGIO means it has ended
    try:
        yield
    except ImageError:
        raise
    except Exception as err:
        raise _refusal(err) from err
    finally:
        fcntl.fcntl(channel, fcntl.F_SETFL, flags)
        _limit_time(0)
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_time(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU
    signal.setitimer(signal.ITIMER_REAL, seconds * _WAITS)


def _limit_memory(more_bytes: int) -> None:
    """Limits the address space to its current size and this many bytes more."""
    with open("/proc/self/statm") as statm:
        held_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = held_bytes + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def _refusal(err: Exception) -> ImageError:
    text = one_line(err)
    if isinstance(err, MemoryError) or "out of memory" in text or "error -9" in text:
        return ImageError("decode", "too_large", "decoding takes more memory than an image of its size needs")
    if isinstance(err, UnidentifiedImageError):
        return corrupt("Pillow cannot read it")
    if "unsupported" in text.lower():
        return not_read(f"one of a kind that is not read: {text}")
    reason = "truncated" if "truncated" in text.lower() else "corrupt"
    return ImageError("decode", reason, f"the image cannot be decoded: {text}")


def _open(name: str, content: np.ndarray) -> _Opened:
    if name == "HDR":
        return _open_radiance(content.tobytes())
    if name == "PPM":
        content = np.append(content, np.uint8(ord("\n")))  # OpenCV reads a last number up to what follows it
    if name == "HEIF":
        _import_heif()
    return _open_with_pillow(name, content)


def _open_with_pillow(name: str, content: np.ndarray) -> _Opened:
    try:
        image = Image.open(io.BytesIO(content.tobytes()), formats=(name,))
        return _Opened(name, content, image.size, image)
    except Exception:
        pixels = _opencv_8_bit(name, content) if name in _OPENCV_FIRST else None  # it reads some BMP files that Pillow does not
        if pixels is None:
            raise
        return _Opened(name, content, pixels.shape[1::-1])


def _check_size(opened: _Opened, max_pixels: float) -> float:
    """Refuses an image that is too large; returns its pixels, weighted by the memory that each takes to decode."""
    pixels, most = math.prod(opened.wh), f"{max_pixels / 1e6:g} megapixels"
    if pixels > max_pixels:
        raise too_large(most, opened.wh)
    more = max(1.0, _bytes_per_pixel(opened) / _BYTES_PER_PIXEL)
    if pixels * more > max_pixels:
        raise too_large(f"{max_pixels / more / 1e6:.3g} megapixels of such {opened.name}", opened.wh)
    return pixels * more


def _bytes_per_pixel(opened: _Opened) -> float:
    """Peak memory of decoding, as measured."""
    image = opened.image
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return 12 + float(sum(image.tag_v2.get(_BITS_PER_SAMPLE, (1,)))) / 8
    if image and opened.name == "JPEG2000":
        return max(20, 4 + 5.5 * len(image.getbands()))
    return _BYTES_PER_PIXEL


def _open_radiance(content: bytes) -> _Opened:
    """Opens a Radiance picture, which Pillow does not read; OpenCV gets three lines of header, as it fails at most others."""
    end = content.find(b"\n\n")
    found = _RADIANCE_SIZE.match(content, end + 2) if end >= 0 else None
    if not found:
        raise corrupt("a Radiance picture without its size, -Y height +X width, behind the first empty line")
    if b"FORMAT=32-bit_rle_xyze" in content[:end]:
        raise not_read("a Radiance picture in XYZE; RGBE is read")
    plain = np.frombuffer(_RADIANCE_START + content[found.start() :], np.uint8)
    return _Opened("HDR", plain, (int(found[2]), int(found[1])))


def _opencv_8_bit(name: str, content: np.ndarray) -> np.ndarray | None:
    if name != "TIFF":
        return opencv_pixels(content)
    pixels = opencv_pixels(content, cv2.IMREAD_COLOR_BGR | cv2.IMREAD_ANYDEPTH)  # as RGB, OpenCV 4.14 makes 16 bits black
    if pixels is None:
        return None
    return (pixels if pixels.dtype == np.uint8 else to_8_bit(pixels))[..., ::-1]


def _import_heif() -> None:
    try:
        import pillow_heif
    except ImportError as err:
        message = "HEIC and HEIF need pillow-heif: pip install 'hybrid-detection-pipeline[heif]'"
        raise ImageError("decode", "no_decoder", message) from err
    pillow_heif.options.DECODE_THREADS = 1  # images are decoded side by side already
    pillow_heif.register_heif_opener()


def _decode(opened: _Opened) -> np.ndarray:
    """The upright pixels."""
    image, pixels = opened.image, None
    if opened.name in _OPENCV_FIRST or (image and opened.name == "JPEG2000" and image.mode in _OPENCV_JPEG2000_MODES):
        pixels = _opencv_8_bit(opened.name, opened.content)
    if pixels is None and image:
        pixels = pillow_pixels(image)
    if pixels is None:
        raise ImageError("decode", "corrupt", "the pixels cannot be decoded")
    if pixels.shape[1::-1] != opened.wh:
        raise corrupt(f"it says {opened.wh[0]} x {opened.wh[1]} pixels, the image has other ones")
    if image and opened.name == "AVIF":  # the decoders of the others turn the pixels themselves
        return turn_upright(pixels, orientation(image.info.get("exif", b""), image.info.get("xmp", b"")))
    return np.ascontiguousarray(pixels)
