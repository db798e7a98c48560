"""Decodes rarer image formats in a child process, so that an image that breaks its decoder does not break this process.

Children are started when they are first needed, and stay for the next images: one for each thread that decodes such an image at
the same time, so that a folder of TIFF files is decoded on as many cores as a folder of JPEG files. A child ends when this
process ends, however that happens. A child that dies costs at most the one image that it has in hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import numpy as np

from pipeline.detect.child_messages import TIMED_OUT, receive, send
from pipeline.detect.decoders import one_large_at_a_time
from pipeline.failures import ImageError

# with this process's own path, and not what lies in the folder in which it runs
_CODE = "import sys; sys.path[:] = {path!r}; from pipeline.detect.decoding_child import serve; serve()"


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """An image to be decoded.

    Attributes:
      name: Its format, as `formats.format_of` names it.
      content: The file's bytes.
      max_pixels: Most pixels that it may have; also bounds the memory.
      seconds: CPU time that it may take.
    """

    name: str
    content: bytes
    max_pixels: float
    seconds: float


def decode_in_subprocess(request: Request) -> np.ndarray:
    """Decodes an image in a child process.

    Returns:
      `(h, w, 3) uint8` RGB, upright.

    Raises:
      ImageError: It is damaged, too large or too much work, its decoder is not installed, or its decoder died.
      OSError: No process can be started.
    """
    with contextlib.suppress(IndexError, _DiedError):  # died: killed while it waited, or broken by an image before this one
        return _idle.pop().decode(request)
    return _Child().decode(request)


class _DiedError(ImageError):
    """A child has ended without an answer."""


class _Child:
    """One child process, for one image at a time."""

    def __init__(self) -> None:
        self._channel, its_end = socket.socketpair()
        for end in (self._channel, its_end):
            end.settimeout(None)  # Beam's sign-in at Google sets a default for all sockets
        with its_end:
            self._process = subprocess.Popen(  # noqa: S603  a command of ours
                [sys.executable, "-c", _CODE.format(path=sys.path)],
                stdin=its_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what decoders print
                env=os.environ | {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"},  # more would reserve memory
                start_new_session=True,  # Ctrl-C is for the job
            )
        _started.add(self)

    def decode(self, request: Request) -> np.ndarray:
        """Decodes one image; the child is for the next one then, or has ended."""
        try:
            fields, pixels = self._ask(request)
        except (OSError, EOFError, ValueError) as err:
            self.close()
            raise self._death(request) from err
        except BaseException:  # what it is to answer next is not known
            self.close()
            raise
        _idle.append(self)
        if "reason" in fields:
            raise ImageError("decode", fields["reason"], fields["message"])
        return pixels

    def close(self) -> None:
        """Ends it."""
        self.forget()
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """Closes this process's end."""
        _started.discard(self)
        self._channel.close()

    def _ask(self, request: Request) -> tuple[dict[str, Any], np.ndarray]:
        limits = {"format": request.name, "max_pixels": request.max_pixels, "seconds": request.seconds}
        send(self._channel, limits, request.content)
        fields, pixels = receive(self._channel, most_bytes=0)
        if "reason" in fields:
            return fields, pixels
        with one_large_at_a_time(fields["held_pixels"]):
            send(self._channel, {})
            fields, pixels = receive(self._channel, most_bytes=3 * request.max_pixels)
        return fields, pixels if "reason" in fields else pixels.reshape(*fields["wh"][::-1], 3)

    def _death(self, request: Request) -> ImageError:
        """Why it ended; to be asked once it has."""
        code = self._process.returncode
        if -code in TIMED_OUT:
            message = (
                f"expected at most {request.seconds:g} s of decoding, got {request.name} of {len(request.content)} bytes that "
                "takes longer; max_megapixels sets the limit"
            )
            return ImageError("decode", "too_much_work", message)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return _DiedError("decode", "decoder_died", f"the process that decodes {request.name} ended with {how}")


def _forget_all() -> None:
    """After a fork: the children are the other process's, and end only when nobody else holds its end of their channels."""
    for child in tuple(_started):
        child.forget()
    _idle.clear()


_idle: list[_Child] = []  # the one that was in use last comes last, and is used first
_started: set[_Child] = set()
os.register_at_fork(after_in_child=_forget_all)
