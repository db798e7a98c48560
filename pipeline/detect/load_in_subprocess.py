"""Prepares a model version in a child process at low priority, while this process keeps working with another version.

Loading and optimising a model takes seconds of Python. In this process it would compete with the threads that decode, and at a
low priority it would hold the interpreter lock while it waits for a core. A crash of the loader, or memory that it keeps, ends
with the child. The child ends at once when this process does.
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
from pipeline.own_python import command_of, environment

_NICENESS = 5  # at 10, beside a model that keeps each core busy, loading another takes minutes; at 19, half an hour


class Preparation:
    """A version that is being prepared; another thread may call `stop`.

    Args:
      folder: Its SavedModel.
      version: Its number.
      model: Its description in the config.
      detect: How to run it.
      gpu: Whether on a GPU.
    """

    def __init__(self, folder: str, version: str, model: ModelConfig, detect: DetectConfig, *, gpu: bool):
        self._folder = folder
        self._asked = pickle.dumps((folder, version, model, detect, gpu))
        self._process = subprocess.Popen(  # noqa: S603  this Python and this module
            command_of(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # else closing the pipe to an ended process would try to write the rest of the buffer
            env=environment(),
            start_new_session=True,  # Ctrl-C is for the job, which then ends this process
        )
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, self._process.pid, own + _NICENESS)  # at once: its imports take seconds too

    def result(self) -> PreparedModel:
        """Waits for the prepared model.

        Raises:
          ModelError: The model cannot be used.
          RuntimeError: This attempt failed; another one may succeed.
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
        """Ends the process; a thread that waits for its result gets an error."""
        self._process.kill()


def _serve(asking: BinaryIO, answers: BinaryIO) -> None:
    folder, version, model, detect, gpu = pickle.load(asking)  # noqa: S301  written by this module
    threading.Thread(target=_end_with, args=(asking.fileno(),), daemon=True).start()
    # one thread, and no memory of a device; the optimiser asks the driver for the devices
    narrow = dataclasses.replace(detect, device="cpu", intra_op_threads=1, concurrent_batches=1)
    pickle.dump(_prepared(folder, version, model, narrow, gpu), answers, pickle.HIGHEST_PROTOCOL)
    answers.flush()


def _prepared(folder: str, version: str, model: ModelConfig, detect: DetectConfig, gpu: bool) -> Any:
    from pipeline.detect.saved_model import prepared_model
    from pipeline.detect.tensorflow_setup import configure_tensorflow

    try:
        configure_tensorflow(detect)  # first, before an entry of the cache imports it with Keras and its warnings
        return prepared_model(folder, version, model, detect, gpu=gpu)
    except ModelError as err:
        return ModelError(str(err))
    except Exception as err:  # noqa: BLE001  storage that fails
        return RuntimeError(f"model {folder}: {type(err).__name__}: {' '.join(str(err).split())[:300]}")


def _end_with(pipe: int) -> None:
    """Ends this process, with its cleanup, once its parent has ended."""
    os.read(pipe, 1)  # unbuffered: a buffered reader would hold a lock when the interpreter ends
    _thread.interrupt_main()


def main() -> None:
    """Runs in the child process."""
    private = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # TensorFlow may print
    _serve(sys.stdin.buffer, private)
