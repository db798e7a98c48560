"""A feeder process that decodes images, and that would end if it started a program.

with DecodingProcess() as process:
    outcome = process.decode(content)
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from pathlib import Path

import pytest

from pipeline.feed.chunks import FedChunk
from pipeline.feed.feeder import Feeder
from pipeline.feed.fit import ModelInput
from pipeline.records import EncodedImage, ImageRef
from tests.feed.feeding import LIMITS

_SITECUSTOMIZE = """
import os, sys
programs = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn", "socket.connect"}
sys.addaudithook(lambda event, _: os._exit(99) if event in programs else None)
with open("/proc/self/comm", "w") as name:
    name.write("audited")
"""
_TO = ModelInput((8, 8), "stretch", "darknet", 0)
_SMALL_GIF = b"GIF89a\1\0\1\0\x80\0\0" + bytes(6) + b",\0\0\0\0\1\0\1\0\0\2\2\x44\1\0;"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an image ended.

    Attributes:
      end: `pixels`, the reason of an `ImageError`, or what must not be, `error`: an exception, or a program that was started.
      message: The error's.
      image_wh: Size of the upright image, where there is one.
      megabytes: Peak memory beyond what was held before; 0 if the process has died.
    """

    end: str
    message: str = ""
    image_wh: tuple[int, int] | None = None
    megabytes: float = 0.0


class DecodingProcess(contextlib.ExitStack):
    """The process; one that died is replaced at the next image.

    Args:
      max_pixels: As for `decode_image`.
    """

    def __init__(self, max_pixels: float = 25e6):
        super().__init__()
        patch = self.enter_context(pytest.MonkeyPatch.context())
        folder = self.enter_context(tempfile.TemporaryDirectory())
        Path(folder, "sitecustomize.py").write_text(_SITECUSTOMIZE)
        patch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
        self._feeder = self.enter_context(contextlib.closing(Feeder(1)))
        self._feeder.open(LIMITS._replace(max_pixels=max_pixels, scaled_decode=False), 1e9)

    def decode(self, content: bytes) -> Outcome:
        """Decodes an image in the process."""
        self._fed(_SMALL_GIF)  # what it imports is no image's memory
        (process,) = self._feeder._running
        assert Path(f"/proc/{process.pid}/comm").read_text() == "audited\n"
        status = Path(f"/proc/{process.pid}/status")
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak of memory begins anew
        held = _megabytes(status, "VmRSS")
        chunk, more = self._fed(content), 0.0
        with contextlib.suppress(OSError):
            more = _megabytes(status, "VmHWM") - held
        if failure := chunk.failures.get(0):
            return Outcome("error" if "exit code" in failure.message else failure.reason, failure.message, None, more)
        return Outcome("pixels", "", chunk.fitted[0].image_wh, more)

    def _fed(self, content: bytes) -> FedChunk:
        chunk = self._feeder.start([EncodedImage(ImageRef(""), content)], _TO).result()
        chunk.release()
        return chunk


def _megabytes(status: Path, name: str) -> float:
    return int(status.read_text().split(name + ":")[1].split()[0]) / 1024
