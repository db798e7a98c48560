"""A child process that decodes what it is sent as a feeder process does, within the same bounds, and starts no program.

    with DecodingProcess() as process:
        outcome = process.decode(content)

A crash, an exception other than `ImageError` or an attempt to start a program is an outcome too: it is what the tests look for.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PROGRAMS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn", "socket.connect"}
SMALL_GIF = b"GIF89a\1\0\1\0\x80\0\0" + bytes(6) + b",\0\0\0\0\1\0\1\0\0\2\2\x44\1\0;"
_LIBC = ctypes.CDLL(None)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an image ended.

    Attributes:
      end: `pixels`, the reason of an `ImageError`, or what must not be: `error`, `program`.
      message: The error's, or the traceback.
      image_wh: Size of the upright image, where there is one.
      seconds: CPU time.
      megabytes: Peak memory beyond what was held before; 0 if the process has died.
    """

    end: str
    message: str = ""
    image_wh: tuple[int, int] | None = None
    seconds: float = 0.0
    megabytes: float = 0.0


class DecodingProcess:
    """The child; one that died is replaced at the next image.

    Args:
      max_pixels: As for `decode_image`.
      seconds: CPU time after which the kernel ends the child; None: as of a feeder process.
    """

    def __init__(self, max_pixels: float = 25e6, seconds: float | None = None):
        from pipeline.feed.decode import most_seconds

        self._seconds = seconds or most_seconds(max_pixels)
        self._command = [sys.executable, "-m", "tests.decoding_process", str(max_pixels), str(self._seconds)]
        self._process: subprocess.Popen[bytes] | None = None

    def decode(self, content: bytes) -> Outcome:
        """Decodes an image in the child."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(struct.pack(">I", len(content)) + content)
            self._process.stdin.flush()
        if answer := self._process.stdout.readline():
            fields = json.loads(answer)
            return Outcome(**fields | {"image_wh": tuple(fields.get("image_wh", ())) or None})
        return self._death()

    def _death(self) -> Outcome:
        from pipeline.feed.bounds import TIMED_OUT

        assert self._process
        code = self._process.wait()
        self._process = None
        if -code in TIMED_OUT:
            return Outcome("too_much_work", signal.Signals(-code).name, None, self._seconds)
        return Outcome("decoder_died", f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}")

    def close(self) -> None:
        """Ends the child."""
        if self._process:
            assert self._process.stdin and self._process.stdout
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait()

    def __enter__(self) -> DecodingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _memory(name: str) -> float:
    """A line of this process's status (VmHWM, VmRSS), in megabytes."""
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) / 1024


@contextlib.contextmanager
def _room(needed_bytes: float, _wh: tuple[int, int]) -> Iterator[None]:
    """As that of a feeder process, with room for all."""
    from pipeline.feed.bounds import limit_memory
    from pipeline.feed.work import ANY_ROOM

    if needed_bytes > ANY_ROOM:
        limit_memory(needed_bytes)
    yield


def _decode(content: bytes, max_pixels: float, seconds: float) -> dict[str, object]:
    from pipeline.failures import ImageError
    from pipeline.feed.bounds import bounded
    from pipeline.feed.decode import decode_image

    try:
        with bounded(seconds, len(content)):
            decoded = decode_image(content, max_pixels, room=_room)
        assert decoded.pixels.shape == (*decoded.image_wh[::-1], 3) and decoded.pixels.dtype == "uint8"
        return {"end": "pixels", "image_wh": decoded.image_wh}
    except ImageError as err:
        assert "\n" not in str(err)
        return {"end": err.reason, "message": str(err)}
    except MemoryError:
        return {"end": "too_large"}
    except BaseException:  # noqa: BLE001  whatever it is, it is found
        return {"end": "error", "message": traceback.format_exc()}


def _serve(max_pixels: float, seconds: float) -> None:
    from pipeline.feed.bounds import set_up
    from pipeline.feed.decode import decode_image

    set_up()
    decode_image(SMALL_GIF, max_pixels)  # what it imports is no image's memory
    programs: list[str] = []
    sys.addaudithook(lambda event, _: programs.append(event) if event in PROGRAMS else None)
    answers = sys.stdout.buffer
    while header := sys.stdin.buffer.read(4):
        content = sys.stdin.buffer.read(*struct.unpack(">I", header))
        _LIBC.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
        held, began = _memory("VmRSS"), time.process_time()
        outcome = _decode(content, max_pixels, seconds)
        outcome |= {"seconds": time.process_time() - began, "megabytes": _memory("VmHWM") - held}
        if programs:
            outcome |= {"end": "program", "message": programs.pop()}
        answers.write(json.dumps(outcome).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    _serve(float(sys.argv[1]), float(sys.argv[2]))
