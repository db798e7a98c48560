"""Beam's in-memory runner, which runs streams of this project as well: in this process, with nothing beyond pip.

It can because such a stream is one fused stage from pulling to publishing. A bundle is finalized, so its messages are
acknowledged, when all of its steps have ended; a stage behind a shuffle would be fed from memory that is acknowledged already.
Beam's own `DirectRunner` would choose another runner for a stream, one that acknowledges before anything is processed.

The runner takes one bundle after the other, so a message waits for all that came before it. Beam's `--direct_num_workers` does
not mend that: its workers begin each turn together and wait for the slowest. So the stream runs twice side by side; what the two
must share (messages in hand, images under way, the model) they share as steps of one process do.
"""

from __future__ import annotations

import contextlib
import copy
import os
import queue
import sys
import threading
from collections.abc import Iterable
from typing import Any

from apache_beam.metrics import monitoring_infos
from apache_beam.options.pipeline_options import DirectOptions, StandardOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner, fn_runner
from apache_beam.runners.runner import PipelineResult, PipelineState

_WAKE_SECONDS = 0.2  # a signal may come to another thread; its handler runs when the main thread is awake
_SIDE_BY_SIDE = 2  # while one bundle's images are detected and published, another's are read


class InMemoryRunner(FnApiRunner):
    """Runs a batch job as Beam does; a stream in threads, until each has come to its end."""

    def run_via_runner_api(self, pipeline_proto: Any, options: Any) -> Any:
        """Runs a job; of a stream it gives back at once what its end can be waited for with."""
        _merge_metrics_at_once()
        if options.view_as(DirectOptions).direct_running_mode == "multi_processing":
            _share_packages()
        if not options.view_as(StandardOptions).streaming:
            return super().run_via_runner_api(pipeline_proto, options)
        running = _RunningStream()
        for number in range(_SIDE_BY_SIDE):
            job = copy.deepcopy(pipeline_proto)  # Beam changes what it is given
            running.begin(f"stream {number}", super().run_via_runner_api, job, options)
        return running


class _RunningStream(PipelineResult):
    """A stream that runs in threads, which do not keep the process alive."""

    def __init__(self) -> None:
        super().__init__(PipelineState.RUNNING)
        self._running = 0
        self._ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def begin(self, name: str, run: Any, *arguments: Any) -> None:
        self._running += 1
        threading.Thread(target=self._run, args=(run, *arguments), name=name, daemon=True).start()

    def wait_until_finish(self, duration: int | None = None) -> str:
        """Waits for all of its threads; raises at once what one of them fails with."""
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
    """Has worker processes take packages from where this one does, rather than from the current folder first (Python 3.11)."""
    os.environ["PYTHONPATH"] = os.pathsep.join(part or os.getcwd() for part in sys.path)
    os.environ["PYTHONSAFEPATH"] = "1"


def _merge_metrics_at_once() -> None:
    """Has the runner add up each bundle's metrics when the bundle has ended.

    Beam 2.77's `run_stages` puts a generator over the bundle's metrics and the generator before in their place, and nobody
    consumes it before the job ends: each bundle's metrics are kept, 20 kB and more a turn, and a stream has no end.
    """
    fn_runner.consolidate_monitoring_infos = _consolidated


def _consolidated(infos: Iterable[Any]) -> list[Any]:
    return list(monitoring_infos.consolidate(infos))
