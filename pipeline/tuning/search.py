"""Successive halving over the detector's settings, one kind after the other, in processes that take turns with the start's.

The machine may be busy with other work. So only ratios of neighbouring turns count, each candidate is compared with the same
settings of the start, and the winner has to beat them beyond doubt in a final race.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from models.evaluate.agreement import compare
from pipeline.errors import InputError, ModelError
from pipeline.limits import memory_room_bytes
from pipeline.own_python import command_of, environment

ROUNDS = 4  # of a stage: each halves the candidates, down to two
FINAL_ROUNDS = 7
_STUDENTS_T = 2.447  # two-sided 95 %, for the six degrees of freedom of so many rounds
TURN_SECONDS = 1.0  # a turn of latencies takes three times as long
AT_ONCE = 4  # candidates in memory, beside the start and the best so far
_HOPELESS = 0.85  # of the rate of the fastest
_GAIN = 1.02  # smaller gains are not worth a setting
_START_ANSWERS_S = 600.0  # a large model on a busy machine, or a server that wakes up
_ANSWERS_S, _TIMES_START = 60.0, 6.0  # a candidate answers within so many times what the start took to load, at least 60 s
_PEAK = 1.5  # memory of a trial while it loads, over the start's

Settings = Mapping[str, Any]


class Trial:
    """A process that loads the detector with some settings; a context manager.

    It loads at once, beside others. An answer that does not come in time ends the process with all of its group.

    Args:
      configs: Config files of the job.
      settings: What differs from them, by dotted key.
      photos: Paths of images.
      turn_s: Seconds of a turn.
      answers_s: Longest wait for an answer.
    """

    def __init__(self, configs: Sequence[str], settings: Settings, photos: Sequence[str], *, turn_s: float, answers_s: float):
        self._turn_s, self._answers_s = turn_s, answers_s
        self._process = subprocess.Popen(  # noqa: S603  this Python and a module of this program
            command_of("pipeline.tuning.trial"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
            start_new_session=True,  # Ctrl-C is for the command, which then ends this process
        )
        self._send({"config": list(configs), "overrides": dict(settings), "photos": list(photos)})

    def loaded(self) -> list[dict[str, Any]]:
        """Waits for the model, and returns what it finds in the photos; to be called first.

        Raises:
          ModelError: The detector cannot be loaded so, or does not answer, as in the other methods.
        """
        found: list[dict[str, Any]] = self._answer()["rows"]
        return found

    def throughput(self) -> float:
        """Images per second, in one turn."""
        rate: float = self._ask({"measure": "throughput", "seconds": self._turn_s})["throughput"]
        return rate

    def latency_ms(self, rate: float) -> float:
        """99th percentile of the time from an image's arrival to its result; `rate` images a second, 0: one at a time."""
        taken = self._ask({"measure": "latency", "rate": rate, "seconds": 3 * self._turn_s})["latency"]
        return float(np.percentile(taken, 99)) * 1e3

    def memory_mb(self) -> float:
        """Resident memory."""
        resident: float = self._ask({"measure": "memory"})["memory"]
        return resident

    def close(self) -> None:
        """Ends the process."""
        self._kill()
        with self._process:
            pass

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._send(request)
        return self._answer()

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin  # noqa: S101  it is a pipe
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout  # noqa: S101  it is a pipe
        hung = threading.Event()

        def give_up() -> None:
            hung.set()
            self._kill()

        timer = threading.Timer(self._answers_s, give_up)
        timer.daemon = True  # a signal that comes before the `finally` leaves it, and the command ends without waiting for it
        try:
            timer.start()
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if hung.is_set():
            raise ModelError(f"did not answer for {self._answers_s:.0f} s")
        if not line:
            raise ModelError(f"the process ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ModelError(answer["error"])
        return answer


@dataclasses.dataclass
class Result:
    """What came of a candidate.

    Attributes:
      settings: What differs from the start, by dotted key.
      rates: Images per second, of each turn.
      ratios: These divided by those of the start, in the turns before and after.
      alone_ms: 99th percentile of the latency of images that come one at a time.
      half_load_ms: The same while images arrive at half the rate.
      memory_mb: Resident memory.
      agreement: Share of objects that it and the start both find.
      refused: Why it has no figures; empty if it has.
    """

    settings: Settings
    rates: list[float] = dataclasses.field(default_factory=list)
    ratios: list[float] = dataclasses.field(default_factory=list)
    alone_ms: float = 0.0
    half_load_ms: float = 0.0
    memory_mb: float = 0.0
    agreement: float = 1.0
    refused: str = ""

    @property
    def speed(self) -> float:
        """Its images per second, divided by those of the start."""
        return statistics.median(self.ratios or [0.0])

    @property
    def rate(self) -> float:
        """Images per second, the median of its turns."""
        return statistics.median(self.rates or [0.0])

    @property
    def name(self) -> str:
        """The settings in words."""
        parts = [
            f"{key.rpartition('.')[2]} {','.join(map(str, value)) if isinstance(value, list) else value}"
            for key, value in self.settings.items()
        ]
        return ", ".join(parts) or "the settings of the start"


def take_turns(start: Trial, others: Iterable[tuple[Trial, Result]]) -> None:
    """Gives each trial that is not refused one turn, between two turns of the start, and adds to its result.

    Raises:
      ModelError: The start failed.
    """
    before = start.throughput()
    for trial, result in others:
        if result.refused:
            continue
        try:
            rate = trial.throughput()
        except ModelError as err:
            result.refused = str(err)
            continue
        after = start.throughput()
        result.rates.append(rate)
        result.ratios.append(2 * rate / (before + after))
        before = after


def is_faster(ratios: Sequence[float]) -> bool:
    """Whether a final race was won: beyond doubt (a paired t-test of the logarithms, 95 %), and by enough to matter."""
    if len(ratios) < FINAL_ROUNDS or statistics.median(ratios) < _GAIN:
        return False
    gains = [math.log(ratio) for ratio in ratios]
    return statistics.mean(gains) > _STUDENTS_T * statistics.stdev(gains) / math.sqrt(len(gains))


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
        min_agreement: float = 0.0,
        seconds: float = 0.0,
        turn_s: float = TURN_SECONDS,
    ):
        self._configs, self._given, self._photos, self._turn_s = configs, given, photos, turn_s
        self._min_agreement = min_agreement
        self._ends = time.monotonic() + seconds
        self._answers_s = _START_ANSWERS_S
        self._expected: list[dict[str, Any]] = []
        self.best = Result({})

    def results(self, stages: Iterable[Sequence[Settings]]) -> Iterator[Result]:
        """Measures the start, then the candidates of each stage, on top of the best of the stages before it.

        The best comes again with each stage, with new figures.

        Args:
          stages: Candidates, each as what it changes, by dotted key.

        Raises:
          InputError: None of the photos is an image, or shows an object.
          ModelError: The model cannot be used with the settings of the start.
        """
        with self.start() as start:
            first = Result({}, [start.throughput()], [1.0])
            _finish(start, first, enough=0.0)
            self.best = first
            yield first
            for stage in stages:
                changed = [{**self.best.settings, **change} for change in stage]
                left = [settings for settings in changed if settings != self.best.settings]
                while left:
                    room = min(AT_ONCE + 1, memory_room_bytes() / (_PEAK * first.memory_mb * 1e6))
                    count = max(1, min(AT_ONCE, int(room) - bool(self.best.settings)))
                    yield from self._halve(start, left[:count])
                    left = left[count:]

    def start(self) -> Trial:
        """The trial with the settings of the start, loaded; it sets how long others may take.

        Raises:
          InputError: None of the photos is an image, or shows an object.
          ModelError: The model cannot be used with these settings.
        """
        began = time.monotonic()
        start = self.trial({})
        try:
            self._expected = start.loaded()
            if not self._expected:
                raise InputError(f"input: none of the {len(self._photos)} files is an image that can be decoded")
            if not any(row["detections"] for row in self._expected):
                raise InputError(
                    f"input: no object in {len(self._expected)} images, so nothing shows what a candidate finds; give others"
                )
        except BaseException:
            start.close()
            raise
        self._answers_s = max(_ANSWERS_S, _TIMES_START * (time.monotonic() - began))
        return start

    def trial(self, settings: Settings) -> Trial:
        """A trial with these settings, which begins to load."""
        return Trial(self._configs, {**self._given, **settings}, self._photos, turn_s=self._turn_s, answers_s=self._answers_s)

    def check(self, trial: Trial, result: Result) -> None:
        """Waits until a trial is loaded; notes why it is refused."""
        try:
            result.agreement = compare(trial.loaded(), self._expected, match="path")["agreement"]
        except ModelError as err:
            result.refused = str(err)
            return
        if result.agreement < self._min_agreement:
            result.refused = f"it finds other objects: agreement {result.agreement:.3f}, wanted {self._min_agreement}"

    def final(self, settings: Settings) -> Result:
        """These settings beside those of the start, in a race of new processes."""
        result = Result(settings)
        with self.start() as start, self.trial(settings) as best:
            self.check(best, result)
            take_turns(start, [(best, result)] * FINAL_ROUNDS)
        return result

    def _halve(self, start: Trial, candidates: Sequence[Settings]) -> Iterator[Result]:
        if time.monotonic() > self._ends:
            yield from (Result(settings, refused="not tried: the time was over") for settings in candidates)
            return
        known = [self.best.settings] if self.best.settings else []
        with contextlib.ExitStack() as at_work:
            field = [(at_work.enter_context(self.trial(settings)), Result(settings)) for settings in [*known, *candidates]]
            results = [result for _, result in field]
            for trial, result in field:
                self.check(trial, result)
            for number in range(ROUNDS):
                if number == 0 or time.monotonic() < self._ends:
                    take_turns(start, field)
                kept = [] if number == ROUNDS - 1 else _better_half(field)
                enough = _HOPELESS * max(result.speed for result in results)
                for trial, result in field:
                    if (trial, result) not in kept:
                        _finish(trial, result, enough)
                        trial.close()
                        yield result
                field = kept
        self._choose(results)

    def _choose(self, results: Sequence[Result]) -> None:
        """Takes the fastest if it beat the best so far, measured beside it, in each of its turns and by enough to matter."""
        measured = [result for result in results if not result.refused]
        self.best = next((result for result in measured if result.settings == self.best.settings), self.best)
        fastest = max(measured, key=lambda result: result.speed, default=self.best)
        if min(fastest.ratios) > self.best.speed and fastest.speed >= _GAIN * self.best.speed:
            self.best = fastest


def _better_half(field: Sequence[tuple[Trial, Result]]) -> list[tuple[Trial, Result]]:
    """The faster half, but two at least; without those that are refused, or far behind the first."""
    ranked = sorted((one for one in field if not one[1].refused), key=lambda one: one[1].speed, reverse=True)
    return [one for one in ranked[: max(2, math.ceil(len(ranked) / 2))] if one[1].speed >= _HOPELESS * ranked[0][1].speed]


def _finish(trial: Trial, result: Result, enough: float) -> None:
    """Adds the memory, and the latencies unless it is too slow for them to matter."""
    if result.refused:
        return
    try:
        result.memory_mb = trial.memory_mb()
        if result.speed >= enough:
            result.alone_ms, result.half_load_ms = trial.latency_ms(0.0), trial.latency_ms(result.rate / 2)
    except ModelError as err:
        result.refused = str(err)
