"""Coordinate search over the detector's settings: each candidate races against the best so far, in turns, in one run.

The machine may be busy with other work. So only ratios of neighbouring turns count, and the winner has to beat the settings of
the start in every round of a final race.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from models.evaluate.agreement import compare
from pipeline.errors import InputError, ModelError
from pipeline.own_python import command_of, environment

ROUNDS = 3  # of a race; a candidate that is clearly slower ends after one
FINAL_ROUNDS = 7  # who is not faster wins all of them by chance once in 128 times
TURN_SECONDS = 1.5  # longer than any batch; a turn of latencies takes twice as long
_HOPELESS = 0.85  # of the rate of the best, in the first round
_GAIN = 1.02  # smaller gains are not worth a setting

Settings = Mapping[str, Any]


class Trial:
    """A process that has loaded the detector with some settings; a context manager.

    Args:
      configs: Config files of the job.
      settings: What differs from them, by dotted key.
      photos: Paths of images.
      turn_s: Seconds of a turn.

    Raises:
      ModelError: The detector cannot be loaded so.
    """

    def __init__(self, configs: Sequence[str], settings: Settings, photos: Sequence[str], turn_s: float):
        self._turn_s = turn_s
        self._process = subprocess.Popen(  # noqa: S603  this Python and a module of this program
            command_of("pipeline.tuning.trial"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
            start_new_session=True,  # Ctrl-C is for the command, which then ends this process
        )
        try:
            self._ask({"config": list(configs), "overrides": dict(settings), "photos": list(photos)})
        except BaseException:
            self.close()
            raise

    def throughput(self) -> float:
        """Images per second, in one turn."""
        rate: float = self._ask({"measure": "throughput", "seconds": self._turn_s})["throughput"]
        return rate

    def latency_ms(self, rate: float) -> float:
        """99th percentile of the time from an image's arrival to its result; `rate` images a second, 0: one at a time."""
        taken = self._ask({"measure": "latency", "rate": rate, "seconds": 2 * self._turn_s})["latency"]
        return float(np.percentile(taken, 99)) * 1e3

    def memory_mb(self) -> float:
        """Resident memory."""
        resident: float = self._ask({"measure": "memory"})["memory"]
        return resident

    def rows(self) -> list[dict[str, Any]]:
        """What the model finds in the photos."""
        found: list[dict[str, Any]] = self._ask({"measure": "rows"})["rows"]
        return found

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:
            pass

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout  # noqa: S101  they are pipes
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise ModelError(f"the process ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ModelError(answer["error"])
        return answer


class Result(NamedTuple):
    """What came of a candidate.

    Attributes:
      settings: What differs from the start, by dotted key.
      ratios: Its images per second divided by those of the best so far, in neighbouring turns.
      speed: Its images per second, divided by those of the start.
      rate: Images per second, the median of its turns.
      alone_ms: 99th percentile of the latency of images that come one at a time.
      half_load_ms: The same while images arrive at half the rate.
      memory_mb: Resident memory.
      agreement: Share of objects that it and the start both find.
      refused: Why it cannot be used; empty if it can.
    """

    settings: Settings
    ratios: Sequence[float] = ()
    speed: float = 0.0
    rate: float = 0.0
    alone_ms: float = 0.0
    half_load_ms: float = 0.0
    memory_mb: float = 0.0
    agreement: float = 1.0
    refused: str = ""

    @property
    def name(self) -> str:
        """The settings in words."""
        parts = [
            f"{key.rpartition('.')[2]} {','.join(map(str, value)) if isinstance(value, list) else value}"
            for key, value in self.settings.items()
        ]
        return ", ".join(parts) or "the settings of the start"


def race(best: Trial, other: Trial, rounds: int) -> tuple[list[float], list[float]]:
    """Lets two trials work in turns.

    Returns:
      The ratio of their rates in each round, other to best, and the other's rates.
    """
    ratios, rates = [], []
    for number in range(rounds):
        if number % 2:  # who comes second may find a warmer processor
            its, bests = other.throughput(), best.throughput()
        else:
            bests, its = best.throughput(), other.throughput()
        ratios.append(its / bests)
        rates.append(its)
        if number == 0 and ratios[0] < _HOPELESS:
            break
    return ratios, rates


def is_faster(ratios: Sequence[float]) -> bool:
    """Whether a final race was won: in each of its rounds, and by enough to matter."""
    return len(ratios) >= FINAL_ROUNDS and min(ratios) > 1 and statistics.median(ratios) >= _GAIN


class Search:
    """A search over the settings of a job's detector.

    Args:
      configs: Config files of the job; their settings are the start.
      given: What every trial changes in them, such as the model, by dotted key.
      photos: Paths of images.
      min_agreement: Candidates are refused that agree less with the start on the objects of the photos.
      seconds: No candidate begins after that.
      turn_s: Seconds of a turn.

    Attributes:
      best: The result of the settings that are the best so far.
    """

    def __init__(
        self,
        configs: Sequence[str],
        given: Settings,
        photos: Sequence[str],
        *,
        min_agreement: float,
        seconds: float,
        turn_s: float = TURN_SECONDS,
    ):
        self._configs, self._given, self._photos, self._turn_s = configs, given, photos, turn_s
        self._min_agreement = min_agreement
        self._ends = time.monotonic() + seconds
        self._expected: list[dict[str, Any]] = []
        self.best = Result({})

    def results(self, stages: Iterable[Sequence[Settings]]) -> Iterator[Result]:
        """Measures the start, then the candidates of each stage beside the best of the stages before it.

        Args:
          stages: Candidates, each as what it changes, by dotted key.

        Raises:
          InputError: None of the photos is an image.
          ModelError: The model cannot be used with the settings of the start.
        """
        with contextlib.ExitStack() as at_work:
            best = at_work.enter_context(self._trial({}))
            self._expected = best.rows()
            if not self._expected:
                raise InputError(f"input: none of the {len(self._photos)} files is an image that can be decoded")
            working = self.best = _finished(best, Result({}, [1.0], 1.0, best.throughput()))
            yield self.best
            for stage in stages:
                if working is not self.best and time.monotonic() < self._ends:
                    at_work.pop_all().close()
                    working, best = self.best, at_work.enter_context(self._trial(self.best.settings))
                results = []
                for settings in ({**working.settings, **change} for change in stage):
                    if settings != working.settings and time.monotonic() < self._ends:
                        results.append(self._result(settings, best, working))
                        yield results[-1]
                faster = [one for one in results if one.ratios and min(one.ratios) > 1 and one.speed >= _GAIN * working.speed]
                self.best = max(faster, key=lambda one: one.speed, default=self.best)

    def final(self, settings: Settings) -> list[float]:
        """The ratios of the rates with these settings and with those of the start, in a race of new processes."""
        with self._trial({}) as start, self._trial(settings) as best:
            return race(start, best, FINAL_ROUNDS)[0]

    def _trial(self, settings: Settings) -> Trial:
        return Trial(self._configs, {**self._given, **settings}, self._photos, self._turn_s)

    def _result(self, settings: Settings, best: Trial, of_best: Result) -> Result:
        try:
            with self._trial(settings) as trial:
                agreement = compare(trial.rows(), self._expected, match="path")["agreement"]
                if agreement < self._min_agreement:
                    why = f"it finds other objects: agreement {agreement:.3f}, wanted {self._min_agreement}"
                    return Result(settings, agreement=agreement, refused=why)
                ratios, rates = race(best, trial, ROUNDS)
                speed = of_best.speed * statistics.median(ratios)
                return _finished(trial, Result(settings, ratios, speed, statistics.median(rates), agreement=agreement))
        except ModelError as err:
            return Result(settings, refused=str(err))


def _finished(trial: Trial, result: Result) -> Result:
    """With its memory, and with its latencies unless it is too slow for them to matter."""
    result = result._replace(memory_mb=trial.memory_mb())
    if statistics.median(result.ratios) < _HOPELESS:
        return result
    return result._replace(alone_ms=trial.latency_ms(0.0), half_load_ms=trial.latency_ms(result.rate / 2))
