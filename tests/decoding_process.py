"""A child process that decodes what it is sent, within bounds of memory and time that the kernel keeps, and starts no program
but the pipeline's own decoding child.

    with DecodingProcess() as process:
        outcome = process.decode(content)

A crash, an exception other than `ImageError`, too much time or an attempt to start a program is an outcome too: it is what the
tests look for.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import resource
import signal
import struct
import subprocess
import sys
import traceback
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parent.parent
PROGRAMS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn", "socket.connect"}
SECONDS = 12.0  # of CPU for one image; the limit of `decode_image` is an estimate of 5
CHILD_SECONDS = 5.0  # what the pipeline's decoding child may take
SMALL_GIF = b"GIF89a\1\0\1\0\x80\0\0" + bytes(6) + b",\0\0\0\0\1\0\1\0\0\2\2\x44\1\0;"
_LIBC = ctypes.CDLL(None)
MEGABYTES = 4096  # of address space beyond what the process begins with


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an image ended.

    Attributes:
      end: `pixels`, the reason of an `ImageError`, or what must not be: `error`, `died`, `program`.
      message: The error's, or the traceback.
      image_wh: Size of the upright image, where there is one.
      seconds: CPU time, with that of the pipeline's decoding child.
      expected_seconds: What its header was taken to cost, where it could be read; the limit of what is decoded in that child.
      megabytes: Peak memory beyond what was held before, with that of the pipeline's decoding child.
    """

    end: str
    message: str = ""
    image_wh: tuple[int, int] | None = None
    seconds: float = 0.0
    expected_seconds: float = 0.0
    megabytes: float = 0.0


class DecodingProcess:
    """The child; one that died is replaced at the next image.

    Args:
      max_pixels: As for `decode_image`.
      seconds: CPU time after which the kernel ends the child.
      cwd: Where `pipeline` is imported from.
    """

    def __init__(self, max_pixels: float = 25e6, seconds: float = SECONDS, cwd: Path = REPO):
        self._command = [sys.executable, __file__, str(max_pixels), str(seconds)]
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None

    def decode(self, content: bytes) -> Outcome:
        """Decodes an image in the child."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, cwd=self._cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(struct.pack(">I", len(content)) + content)
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer:
            fields = json.loads(answer)
            return Outcome(**fields | {"image_wh": tuple(fields.get("image_wh", ())) or None})
        code = self._process.wait()
        self._process = None
        return Outcome("died", f"of {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}")

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


def _memory(name: str, pid: int | str = "self") -> float:
    """A line of a process's status (VmHWM, VmSize, VmRSS), in megabytes."""
    return int(Path(f"/proc/{pid}/status").read_text().split(name + ":")[1].split()[0]) / 1024


class _Used:
    """What this process and the pipeline's decoding child use from now on; of a child that dies, nothing is known."""

    def __init__(self) -> None:
        self._processes = [psutil.Process(), *psutil.Process().children()]
        for process in self._processes:
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak begins anew
        self._before = [self._of(process) for process in self._processes]

    def fields(self) -> dict[str, float]:
        """CPU time, peak memory."""
        seconds = megabytes = 0.0
        for process, before in zip(self._processes, self._before, strict=True):
            with contextlib.suppress(psutil.Error, OSError, IndexError):
                after = self._of(process)
                seconds, megabytes = seconds + after[0] - before[0], megabytes + _memory("VmHWM", process.pid) - before[1]
        return {"seconds": seconds, "megabytes": megabytes}

    def _of(self, process: psutil.Process) -> tuple[float, float]:
        return sum(process.cpu_times()[:2]), _memory("VmRSS", process.pid)


def _expected_seconds(content: bytes) -> float:
    from pipeline.detect.headers.formats import format_of, is_decoded_in_subprocess, read_header

    return CHILD_SECONDS if is_decoded_in_subprocess(format_of(content)) else read_header(content).seconds


def _decode(content: bytes, max_pixels: float, programs: list[str]) -> dict[str, object]:
    from pipeline.detect.decode import decode_image
    from pipeline.failures import ImageError

    decode_image(SMALL_GIF, max_pixels)  # the decoding child is there: its imports are not this image's
    _LIBC.malloc_trim(0)
    used = _Used()
    outcome: dict[str, object]
    try:
        decoded = decode_image(content, max_pixels)
        assert decoded.pixels.shape == (*decoded.image_wh[::-1], 3) and decoded.pixels.dtype == "uint8"
        outcome = {"end": "pixels", "image_wh": decoded.image_wh}
    except ImageError as err:
        assert "\n" not in str(err)
        outcome = {"end": err.reason, "message": str(err)}
    except BaseException:  # noqa: BLE001  whatever it is, it is found
        outcome = {"end": "error", "message": traceback.format_exc()}
    outcome |= used.fields()
    with contextlib.suppress(Exception):
        outcome["expected_seconds"] = _expected_seconds(content)
    if programs:
        outcome |= {"end": "program", "message": programs.pop()}
    return outcome


def _serve(max_pixels: float, seconds: float) -> None:
    import pipeline.detect.decode  # noqa: F401  before memory is bounded

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size = int((_memory("VmSize") + MEGABYTES) * (1 << 20))
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    programs: list[str] = []

    def watch(event: str, args: tuple[object, ...]) -> None:
        if event in PROGRAMS and "pipeline.detect.decoding_child" not in str(args):
            programs.append(event)

    sys.addaudithook(watch)
    answers = sys.stdout.buffer
    while header := sys.stdin.buffer.read(4):
        content = sys.stdin.buffer.read(*struct.unpack(">I", header))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # counts CPU time, also within native code, and ends the process
        outcome = _decode(content, max_pixels, programs)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(outcome).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    sys.path.insert(0, ".")
    _serve(float(sys.argv[1]), float(sys.argv[2]))
