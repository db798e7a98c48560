"""Beam's in-memory runner, extended to run streams: in this process, with nothing beyond pip.

A stream of this project is one fused stage from pulling to publishing, so this runner can finalize a bundle, and acknowledge its
messages, when all of its steps have ended. A stage behind a shuffle would read from memory whose messages are acknowledged
already. Beam's own `DirectRunner` would choose another runner for a stream, which acknowledges before anything is processed.

The runner runs one bundle after the other, so each message waits for all earlier ones. Beam's `--direct_num_workers` does not
help: its workers begin each turn together and wait for the slowest. So the stream runs twice in parallel. The two copies share
the messages in hand, the images in progress and the model, as all steps of one process do.
"""

from __future__ import annotations

import contextlib
import copy
import os
import queue
import sys
import threading
from typing import Any

from apache_beam.options.pipeline_options import DirectOptions, StandardOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineResult, PipelineState

from pipeline.beam_internals import add_up_metrics_at_once

_WAKE_SECONDS = 0.2  # another thread may get a signal; Python runs its handler when the main thread wakes up
_COPIES = 2  # one reads images while the other detects and publishes


class InMemoryRunner(FnApiRunner):
    """Runs a batch job as Beam does, and a stream in threads."""

    def run_via_runner_api(self, pipeline_proto: Any, options: Any) -> Any:
        """Runs a batch job to its end; returns a running stream at once."""
        add_up_metrics_at_once()
        if options.view_as(DirectOptions).direct_running_mode == "multi_processing":
            _share_packages()
        if not options.view_as(StandardOptions).streaming:
            return super().run_via_runner_api(pipeline_proto, options)
        running = _RunningStream()
        for number in range(_COPIES):
            job = copy.deepcopy(pipeline_proto)  # Beam changes its argument
            running.begin(f"stream {number}", super().run_via_runner_api, job, options)
        return running


class _RunningStream(PipelineResult):
    """A stream that runs in daemon threads."""

    def __init__(self) -> None:
        super().__init__(PipelineState.RUNNING)
        self._running = 0
        self._ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def begin(self, name: str, run: Any, *arguments: Any) -> None:
        self._running += 1
        threading.Thread(target=self._run, args=(run, *arguments), name=name, daemon=True).start()

    def wait_until_finish(self, duration: int | None = None) -> str:
        """Waits for all threads; raises the first failure at once."""
        while self._running:
            with contextlib.suppress(queue.Empty):
                failure = self._ended.get(timeout=_WAKE_SECONDS)
                if failure is not None:
                    self._state = PipelineState.FAILED
                    raise failure
                self._running -= 1
        self._state = PipelineState.DONE
        return str(self._state)

    def _run(self, run: Any, *arguments: Any) -> None:
        try:
            run(*arguments)
        except Exception as err:  # noqa: BLE001  raised by `wait_until_finish`
            self._ended.put(err)
        else:
            self._ended.put(None)


def _share_packages() -> None:
    """Makes worker processes import from the paths of this one, and not from the current folder first (Python 3.11)."""
    os.environ["PYTHONPATH"] = os.pathsep.join(part or os.getcwd() for part in sys.path)
    os.environ["PYTHONSAFEPATH"] = "1"
