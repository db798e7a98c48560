"""Prepares a version in a process of its own, at a low priority, while this one goes on working with another.

Loading and optimising a model is seconds of Python and of one core. In this process it would take turns with the threads that
decode; at a low priority it would keep the interpreter from them while it waits for a core. What TensorFlow's loader breaks, or
keeps of memory, goes with the process. It ends at once when this one does.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import os
import pickle  # noqa: TID251  between this process and its own child, through pipes
import subprocess
import sys
import threading
from typing import Any, BinaryIO

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.prepared_model import PreparedModel
from pipeline.errors import ModelError

# packages come from where this process has them, and never from the current folder alone: it may have a `models` of its own
_START = "import sys; sys.path = [part for part in sys.path if part]; from pipeline.detect.load_in_subprocess import main; main()"
_NICENESS = 5  # at 10, beside a model that keeps each core busy, loading another takes minutes; at 19, half an hour


class Preparation:
    """A version on its way; `stop` may be called from another thread.

    Args:
      folder: Its SavedModel.
      version: Which version that is.
      model: What it does not say of itself.
      detect: How it will run.
      gpu: Whether on a GPU.
    """

    def __init__(self, folder: str, version: str, model: ModelConfig, detect: DetectConfig, *, gpu: bool):
        self._folder = folder
        self._asked = pickle.dumps((folder, version, model, detect, gpu))
        self._process = subprocess.Popen(  # noqa: S603  this Python and this module
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # of a process that has ended, closing would try again to write what is left in a buffer
            env={**os.environ, "PYTHONPATH": os.pathsep.join(part or os.getcwd() for part in sys.path)},
            start_new_session=True,  # Ctrl-C is for the job, which ends this then
        )
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, self._process.pid, own + _NICENESS)  # at once: its imports are seconds of a core as well

    def result(self) -> PreparedModel:
        """Waits for it.

        Raises:
          ModelError: The model cannot be used.
          RuntimeError: The attempt failed; another one may not.
        """
        assert self._process.stdin and self._process.stdout  # noqa: S101  they are pipes
        with self._process:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(self._asked)
            answer = self._process.stdout.read()
        if self._process.returncode:
            raise ModelError(f"model {self._folder}: the process that loads it ended with {self._process.returncode}")
        outcome = pickle.loads(answer)  # noqa: S301  written by this module
        if isinstance(outcome, Exception):
            raise outcome
        prepared: PreparedModel = outcome
        return prepared

    def stop(self) -> None:
        """Ends it; whoever waits for its result gets an error."""
        self._process.kill()


def _serve(asking: BinaryIO, answers: BinaryIO) -> None:
    folder, version, model, detect, gpu = pickle.load(asking)  # noqa: S301  written by this module
    threading.Thread(target=_end_with, args=(asking.fileno(),), daemon=True).start()
    # one thread, and no memory of a device; the optimiser asks the driver which devices there are
    narrow = dataclasses.replace(detect, device="cpu", intra_op_threads=1, inter_op_threads=1)
    pickle.dump(_prepared(folder, version, model, narrow, gpu), answers, pickle.HIGHEST_PROTOCOL)
    answers.flush()


def _prepared(folder: str, version: str, model: ModelConfig, detect: DetectConfig, gpu: bool) -> Any:
    from pipeline.detect.saved_model import prepare

    try:
        return prepare(folder, version, model, detect, gpu=gpu)
    except ModelError as err:
        return ModelError(str(err))
    except Exception as err:  # noqa: BLE001  storage that fails
        return RuntimeError(f"model {folder}: {type(err).__name__}: {' '.join(str(err).split())[:300]}")


def _end_with(pipe: int) -> None:
    """Ends this process when the one that started it has ended; what was copied is removed."""
    os.read(pipe, 1)  # not of the buffered reader, which would hold a lock when the interpreter ends
    _thread.interrupt_main()


def main() -> None:
    """What the other process does."""
    private = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # TensorFlow may print
    _serve(sys.stdin.buffer, private)
