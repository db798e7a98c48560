"""Pool of child processes that decode rarer image formats, so that an image that crashes its decoder does not crash the job.

The pool starts a child for each thread that decodes such an image at the same time, and keeps it for the next images. A child
ends when this process ends, in whatever way. A child that dies costs at most the image that it decodes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import numpy as np

from pipeline.detect.child_messages import TIMED_OUT, receive, send
from pipeline.detect.decoders import room_for
from pipeline.failures import ImageError

# with this process's own path, not with the current folder
_CODE = "import sys; sys.path[:] = {path!r}; from pipeline.detect.decoding_child import serve; serve()"

_BYTES_PER_PIXEL = 16  # of decoding in the child


def decode_in_subprocess(name: str, content: bytes, max_pixels: float, seconds: float) -> np.ndarray:
    """Decodes an image in a child process.

    Args:
      name: Its format, as `formats.format_of` names it.
      content: The file's bytes.
      max_pixels: Most pixels that the image may have; also bounds the memory.
      seconds: Most CPU time.

    Returns:
      `(h, w, 3) uint8` RGB, upright.

    Raises:
      ImageError: The image is damaged, too large or too much work, its decoder is not installed, or its decoder died.
      OSError: No process can be started.
    """
    limits = {"format": name, "max_pixels": max_pixels, "seconds": seconds}
    with contextlib.suppress(IndexError, _DiedError):  # died: killed while idle, or by the image before this one
        return _children.idle.pop().decode(limits, content)
    return _Child().decode(limits, content)


class _Children:
    """The children of this process.

    A forked process forgets them: they belong to the other process, and end only when no process holds the other end of their
    channels.
    """

    def __init__(self) -> None:
        self.idle: list[_Child] = []  # the last one used comes last, and is used first
        self.started: set[_Child] = set()
        os.register_at_fork(after_in_child=self._forget_all)

    def _forget_all(self) -> None:
        for child in tuple(self.started):
            child.forget()
        self.idle.clear()


class _DiedError(ImageError):
    """A child ended without an answer."""


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
                stderr=subprocess.DEVNULL,  # decoders print
                env=os.environ | {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"},  # more would reserve memory
                start_new_session=True,  # Ctrl-C is for the job
            )
        _children.started.add(self)

    def decode(self, limits: dict[str, Any], content: bytes) -> np.ndarray:
        """Decodes one image; then the child is idle, or has ended."""
        try:
            fields, pixels = self._ask(limits, content)
        except (OSError, EOFError, ValueError) as err:
            self._close()
            raise self._death(limits, len(content)) from err
        except BaseException:  # the channel may hold half a message
            self._close()
            raise
        _children.idle.append(self)
        if "reason" in fields:
            raise ImageError("decode", fields["reason"], fields["message"])
        return pixels

    def forget(self) -> None:
        """Closes this process's end of the channel."""
        _children.started.discard(self)
        self._channel.close()

    def _close(self) -> None:
        self.forget()
        self._process.kill()
        self._process.wait()

    def _ask(self, limits: dict[str, Any], content: bytes) -> tuple[dict[str, Any], np.ndarray]:
        send(self._channel, limits, content)
        fields, nothing = receive(self._channel, most_bytes=0)
        if "reason" in fields:
            return fields, nothing
        with room_for((_BYTES_PER_PIXEL + 3) * fields["held_pixels"], fields["wh"]):  # the child, and the pixels here
            send(self._channel, {})
            fields, pixels = receive(self._channel, most_bytes=3 * limits["max_pixels"])
        return fields, pixels if "reason" in fields else pixels.reshape(*fields["wh"][::-1], 3)

    def _death(self, limits: dict[str, Any], size: int) -> ImageError:
        """The reason of a child's end, once it has ended."""
        code, name = self._process.returncode, limits["format"]
        if -code in TIMED_OUT:
            message = (
                f"expected at most {limits['seconds']:g} s of decoding, got {name} of {size} bytes that "
                "takes longer; max_megapixels sets the limit"
            )
            return ImageError("decode", "too_much_work", message)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return _DiedError("decode", "decoder_died", f"the process that decodes {name} ended with {how}")


_children = _Children()  # a child serves one process
