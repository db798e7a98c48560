"""Beam's in-memory runner in threads, extended to run streams: in this process, with nothing beyond pip.

A job's steps run in threads of their own, while the main thread waits for signals. Python raises a signal's KeyboardInterrupt in
the main thread, between any two instructions. If these take or release a lock of `threading`, the lock stays locked, and the
process hangs at its end (https://github.com/python/cpython/issues/74174).

A stream of this project is one fused stage from pulling to publishing, so this runner can finalize a bundle, and acknowledge its
messages, when all of its steps have ended. A stage behind a shuffle would read from memory whose messages are acknowledged
already. Beam's own `DirectRunner` would choose another runner for a stream, which acknowledges before anything is processed.

The runner runs one bundle after the other, so each message waits for all earlier ones. Beam's `--direct_num_workers` does not
help: its workers begin each turn together and wait for the slowest. So the stream runs twice in parallel. The two copies share
the messages in flight, the images in progress and the model, as all steps of one process do.
"""

from __future__ import annotations

import _thread
import contextlib
import copy
import os
import queue
import time
from typing import Any

from apache_beam.options.pipeline_options import DirectOptions, StandardOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineResult, PipelineState

from pipeline.beam_internals import add_up_metrics_at_once
from pipeline.errors import ConfigError
from pipeline.limits import PROCESSES, available_cpus
from pipeline.own_python import environment
from pipeline.process import PROCESS

_WAKE_SECONDS = 0.2  # another thread may get a signal; Python runs its handler when the main thread wakes up
_CANCEL_SECONDS = 20.0  # a step that does not end by then, such as one that waits for storage, ends with the process
_LOOK_SECONDS = 0.02
_COPIES = 2  # one reads images while the other detects and publishes


def check(options: Any) -> None:
    """Refuses workers that would not be started: Beam itself would only warn.

    Raises:
      ConfigError: There are some.
    """
    direct = options.view_as(DirectOptions)
    if direct.direct_num_workers != 1 and direct.direct_running_mode in (None, "in_memory"):
        raise ConfigError(
            f"direct_num_workers {direct.direct_num_workers}: expected --direct_running_mode multi_processing beside it; one "
            "process uses all cores"
        )


class InMemoryRunner(FnApiRunner):
    """Runs a batch job as Beam does, and a stream; both in threads."""

    def run_pipeline(self, pipeline: Any, options: Any) -> Any:
        """For Beam, 0 workers are as many as the machine has cores, not the container."""
        direct = options.view_as(DirectOptions)
        direct.direct_num_workers = direct.direct_num_workers or available_cpus()
        return super().run_pipeline(pipeline, options)

    def run_via_runner_api(self, pipeline_proto: Any, options: Any) -> Any:
        """Runs a batch job to its end; returns a running stream at once."""
        add_up_metrics_at_once()
        running, run = _RunningJob(), super().run_via_runner_api
        elsewhere = options.view_as(DirectOptions).direct_running_mode == "multi_processing"
        if elsewhere:  # its workers import from the paths of this process, and not from the current folder first (Python 3.11)
            workers = str(options.view_as(DirectOptions).direct_num_workers)
            os.environ.update(environment(), PYTHONSAFEPATH="1", **{PROCESSES: workers})
        if options.view_as(StandardOptions).streaming:
            for _ in range(_COPIES):
                running.begin(run, copy.deepcopy(pipeline_proto), options)  # Beam changes its argument
            return running
        if elsewhere:  # a KeyboardInterrupt ends Beam's processes, too
            return run(pipeline_proto, options)
        try:
            running.begin(run, pipeline_proto, options)
            running.wait_until_finish()
        except KeyboardInterrupt:
            running.cancel()
            raise
        return running.result


class _RunningJob(PipelineResult):
    """A job that runs in daemon threads.

    Attributes:
      result: What Beam returned for the copy that ended last.
    """

    def __init__(self) -> None:
        super().__init__(PipelineState.RUNNING)
        self.result: PipelineResult | None = None
        self._begun = self._waited_for = 0
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()  # in C, so that signals do it no harm

    def begin(self, run: Any, *arguments: Any) -> None:
        self._begun += 1
        _thread.start_new_thread(self._run, (run, *arguments))  # a `threading.Thread` takes locks to start

    def wait_until_finish(self, duration: int | None = None) -> str:
        """Waits for all threads; raises the first failure at once."""
        while self._waited_for < self._begun:
            with contextlib.suppress(queue.Empty):
                failure = self._ended.get(timeout=_WAKE_SECONDS)
                self._waited_for += 1
                if failure is not None:
                    self._state = PipelineState.FAILED
                    raise failure
        self._state = PipelineState.DONE
        return str(self._state)

    def cancel(self) -> str:
        """Cancels the steps, and waits until they have ended."""
        PROCESS.stopped = True
        late = time.monotonic() + _CANCEL_SECONDS
        while self._waited_for + self._ended.qsize() < self._begun and time.monotonic() < late:
            time.sleep(_LOOK_SECONDS)
        self._state = PipelineState.CANCELLED
        return str(self._state)

    def _run(self, run: Any, *arguments: Any) -> None:
        try:
            self.result = run(*arguments)
        except BaseException as err:  # noqa: BLE001  raised by `wait_until_finish`
            self._ended.put(err)
        else:
            self._ended.put(None)
