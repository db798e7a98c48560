"""Jobs in a process that stays: a command after the other, without TensorFlow's start for each, killed where a test wants it.

The process reads commands on its standard input and answers on its standard output; what the jobs print goes to its log.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conftest import REPO
from tests.processes import end_group, wait_until

KILLED = -signal.SIGKILL


class DrivenJobs:
    """Runs command lines of this project one after the other.

    Args:
      log: Where their output goes.
      **environment: More environment variables.
    """

    def __init__(self, log: Path, **environment: str):
        self.log = log
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, module: str, *argv: object, renames: int | None = None) -> int:
        """Runs a command and returns its exit code; `renames`: it is killed when it has given so many files their names."""
        self.begin(module, *argv, renames=renames)
        return self.end()

    def begin(self, module: str, *argv: object, renames: int | None = None) -> None:
        """Starts a command."""
        if self._process is None:
            command = [sys.executable, "-m", "tests.driven_jobs"]
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=REPO,
                    env={**os.environ, **self._environment},
                    start_new_session=True,
                )
        said = {"module": module, "argv": [str(value) for value in argv], "renames": renames}
        self._pipe("stdin").write(json.dumps(said).encode() + b"\n")
        self._pipe("stdin").flush()

    def begin_stream(self, *argv: object) -> None:
        """Starts a streaming job, and waits until it reads messages."""
        before = self.log.read_text().count("\nreading ") if self.log.exists() else 0
        self.begin("pipeline.run", *argv)
        wait_until(lambda: self.log.read_text().count("\nreading ") > before, self.log.read_text, self._process)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    def end(self) -> int:
        """Waits for the command's end; returns its exit code."""
        assert self._process is not None
        answer = self._pipe("stdout").readline()
        if answer:
            return int(answer)
        code, self._process = self._process.wait(), None
        return code

    def close(self) -> None:
        """Ends the process, with its whole group."""
        if self._process is not None:
            end_group(self._process)
            self._process = None

    def _pipe(self, name: str) -> Any:
        return getattr(self._process, name)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    left: list[int] = []

    def die(event: str, args: Sequence[Any]) -> None:
        if left and event == "os.rename":
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    for line in sys.stdin:
        said = json.loads(line)
        print("\n$", said["module"], *said["argv"], said["renames"], flush=True)
        left[:] = [] if said["renames"] is None else [said["renames"]]
        code = importlib.import_module(said["module"]).main(said["argv"])
        left.clear()
        print(code, file=answers, flush=True)


if __name__ == "__main__":
    _serve()
