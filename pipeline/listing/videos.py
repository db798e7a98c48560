"""Reads frames of video files at a fixed rate, one at a time, through PyAV; the rest behind damage becomes one dead letter.

A frame travels as a JPEG of quality 95 with full colour (4:4:4). Measured for a frame of 1920 x 1080 with noise, encoded
and decoded: JPEG 30 ms and 0.9 MB (mean error 1.8 of 255), PNG 239 ms and 3.4 MB, BMP 28 ms and 6.2 MB, ten of which would fill
64 MB; and a JPEG may be decoded at reduced scale.
"""

from __future__ import annotations

import contextlib
import errno
import math
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from msgspec.structs import replace

from models.base.image_uris import video_frame
from models.base.project import pip_install
from pipeline.failures import ImageError
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.storage.fetch import RETRY_SECONDS, open_file, storage_failures
from pipeline.storage.store import retried
from pipeline.storage.stores import store_of

_DEMUXERS = "mov,matroska,avi"  # others, such as those of playlists, open what a file names, on disks and networks
_KINDS = "MP4, QuickTime, Matroska, WebM or AVI"
_SEEK_EARLIER_S = 2  # frames are stored in another order than they are shown
_EARLY_END_S = 0.5  # headers give the duration about so exactly
_HEADER_BYTES, _GAP_S = 200, 0.01  # at most, between two packets of an undamaged Matroska file
_MOST_PIXELS = 2**31 - 1


def images_of_video(video: ImageRef, fps: float, max_megapixels: float) -> Iterator[EncodedImage | DeadLetter]:
    """The frames of one video, each decoded when it is asked for.

    Args:
      video: The file. `<file>#t=<seconds>` names one frame: the first one at or after this time.
      fps: Frames a second: of each multiple of 1/fps the first frame at or after it, to the millisecond.
      max_megapixels: Videos with larger frames are refused before one is decoded.

    Yields:
      For each frame a JPEG, upright; one dead letter of the video for all frames behind damage. A frame's URI is
      `<file>#t=<seconds>`, the first millisecond that shows it; its generation is that of the file.
    """
    path, wanted_ms = video_frame(video.uri) or (video.uri, None)
    failed = video
    try:
        with storage_failures(path):
            generation = retried(store_of(path).look_up, RETRY_SECONDS)(path).generation
        failed = replace(video, generation=generation)
        with open_file(path, generation) as file, _opened(boxes := _Boxes(file), path, max_megapixels * 1e6) as container:
            asked = time.monotonic()
            for ms, frame in _selected(container, boxes, path, fps, wanted_ms):
                content = _as_jpeg(frame)
                ref = ImageRef(f"{path}#t={ms / 1000:.3f}", generation, len(content), extra=video.extra)
                yield EncodedImage(ref, content, time.monotonic() - asked, time.time())
                asked, failed = time.monotonic(), video  # a generation would make all of it done, also frames without a row
    except ImageError as err:
        yield err.failure.dead_letter(failed)


class _Boxes:
    """A file that notes the boxes of an MP4 file as its demuxer reads them: it passes over damaged ones, and reports nothing.

    Attributes:
      are_fragments: Whether frames lie in fragments, of which no header gives the number.
      media_bytes: What all `mdat` boxes hold.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._size: int = file.seek(0, 2)
        self._next: float = 0
        self.are_fragments, self.media_bytes = False, 0
        file.seek(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    @property
    def is_whole(self) -> bool:
        """Whether one box came after the other up to the end of the file."""
        return self._next == self._size

    def read(self, size: int) -> bytes:
        at = self._file.tell()
        content: bytes = self._file.read(size)
        while at <= self._next < at + len(content):
            self._file.seek(int(self._next))
            header = self._file.read(16)
            length, kind, long_length = int.from_bytes(header[:4], "big"), header[4:8], int.from_bytes(header[8:], "big")
            length = long_length if length == 1 else length or (self._size - int(self._next) if kind == b"mdat" else 0)
            self.are_fragments |= kind == b"moof"
            self.media_bytes += length - (16 if header[:4] == b"\0\0\0\1" else 8) if kind == b"mdat" else 0
            self._next += length if length >= 8 else math.inf
            self._file.seek(at + len(content))
        return content


@contextlib.contextmanager
def _opened(file: Any, path: str, max_pixels: float) -> Iterator[Any]:
    """The container of a video; its only stream that is decoded is the best one."""
    try:
        import av
    except ImportError as err:
        message = f"{path}: videos are decoded by PyAV: {pip_install('video')}"
        raise ImageError("decode", "no_decoder", message) from err
    most = {"max_pixels": str(int(min(max_pixels, _MOST_PIXELS)))}
    with _damage(lambda why: f"{path} is damaged, or no {_KINDS} ({why})"):
        options = {"format_whitelist": _DEMUXERS, **most}
        container = av.open(file, "r", options=options, metadata_errors="replace", io_open=_open_nothing)
    with container:
        codec = getattr(container.streams.best("video"), "codec_context", None)
        if codec is None:
            reason = "no_image" if len(container.streams) else "broken_file"
            raise ImageError("read", reason, f"{path} has no video stream that can be decoded")
        if codec.width * codec.height > max_pixels:
            message = f"expected at most {max_pixels / 1e6:g} megapixels, got a video of {codec.width} x {codec.height} pixels"
            raise ImageError("decode", "too_large", f"{message}; max_megapixels sets the limit")
        codec.options, codec.thread_count = most, 1  # the job has as many threads as cores
        yield container


def _open_nothing(url: str, flags: int, options: dict[str, str]) -> Any:
    raise PermissionError(f"a video may not open {url!r}")


def _selected(container: Any, boxes: _Boxes, path: str, fps: float, wanted_ms: int | None) -> Iterator[tuple[int, Any]]:
    """The wanted frame, or those at `fps`; each with its time in milliseconds."""
    due = wanted_ms or 0
    if due > _SEEK_EARLIER_S * 1000:
        with _damage(lambda why: f"{path} is damaged: no place in it can be found ({why})"):
            container.seek((due - _SEEK_EARLIER_S * 1000) * 1000 + (container.start_time or 0))
    ms = None
    for ms, frame in _frames(container, path, boxes if wanted_ms is None else None):
        if ms < due:
            continue
        yield ms, frame
        if wanted_ms is not None:
            return
        due = next_due(ms, Fraction(str(fps)))
    if wanted_ms is not None:
        raise ImageError("read", "not_found", f"{path} has no frame at or after {wanted_ms / 1000:.3f} s")
    if ms is None:
        raise ImageError("read", "no_image", f"{path} has no frame")


def next_due(ms: int, fps: Fraction) -> int:
    """The first multiple of 1/fps after a time, in whole milliseconds.

    >>> next_due(0, Fraction(3)), next_due(334, Fraction(3)), next_due(1999, Fraction(1)), next_due(2000, Fraction("0.5"))
    (333, 666, 2000, 4000)
    """
    return math.floor(math.ceil((ms + 1) * fps / 1000) * 1000 / fps)


def _frames(container: Any, path: str, boxes: _Boxes | None) -> Iterator[tuple[int, Any]]:
    """All frames from where a container stands, each with the first millisecond that shows it; of a whole file with its boxes.

    Raises:
      ImageError: Of damage; nothing behind it is read.
    """
    import av

    start, stream = Fraction(container.start_time or 0, av.time_base), container.streams.best("video")
    ms, end, has_key = 0, start, False
    read_to, in_order = math.inf, "matroska" in container.format.name
    unread_bytes = 0

    def message(why: str) -> str:
        return f"{path} is damaged behind {ms / 1000:.3f} s ({why}): later frames cannot be read"

    with _damage(message):
        for packet in container.demux():  # of all streams: any of them may be the one that lasts to the end
            unread_bytes -= packet.size
            if packet.is_corrupt:
                raise ValueError("a part is not all there")
            if packet.pts is not None and packet.stream.type in ("video", "audio"):
                missing = packet.pts * packet.time_base - end
                # the demuxer of Matroska passes over damage to the next cluster, and reports nothing
                if in_order and (packet.pos or 0) > read_to + _HEADER_BYTES and missing > _GAP_S:
                    raise ValueError(f"the next {float(missing):.3f} s are not there")
                end = max(end, (packet.pts + (packet.duration or 0)) * packet.time_base)
            read_to = read_to if packet.pos is None else packet.pos + packet.size
            # a recording may begin amid a group of pictures
            has_key = has_key or (packet.stream is stream and packet.is_keyframe)
            for frame in packet.decode() if has_key and packet.stream is stream else ():
                if frame.is_corrupt or frame.pts is None:
                    raise ValueError("a frame is not all there" if frame.is_corrupt else "a frame has no time")
                ms = max(0, math.ceil((frame.pts * frame.time_base - start) * 1000))
                yield ms, frame
        if (container.duration or 0) / av.time_base - float(end - start) > _EARLY_END_S:
            raise ValueError(f"it ends at {float(end - start):.3f} s of {container.duration / av.time_base:.3f}")
        # the demuxer makes other packets of subtitles than the file has
        unread_bytes += boxes.media_bytes if boxes and {each.type for each in container.streams} <= {"video", "audio"} else 0
        if boxes and boxes.are_fragments and (unread_bytes > 0 or not boxes.is_whole):
            raise ValueError("not all of its fragments are there")


@contextlib.contextmanager
def _damage(message: Callable[[str], str]) -> Iterator[None]:
    """Maps what the decoder refuses to the `ImageError` of a damaged file; failures of storage pass."""
    import av

    try:
        yield
    except (av.FFmpegError, OSError, ValueError) as err:
        # damaged files make the decoder seek to places that no file has
        if not isinstance(err, av.FFmpegError) and getattr(err, "errno", errno.EINVAL) != errno.EINVAL:
            raise
        why = " ".join(str(getattr(err, "strerror", "") or err).split())[:200] or type(err).__name__
        raise ImageError("read", "broken_file", message(why)) from err


def _as_jpeg(frame: Any) -> bytes:
    """A frame, upright, as its display matrix says."""
    import cv2

    how = (cv2.IMWRITE_JPEG_QUALITY, 95, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444)
    pixels = np.rot90(frame.to_ndarray(format="bgr24", threads=1), round(frame.rotation / 90))
    return bytes(cv2.imencode(".jpg", np.ascontiguousarray(pixels), how)[1])
