"""`detect-objects tune`, `python -m pipeline.tune`: finds the settings with which this machine detects fastest.

    detect-objects tune --model models/yolov4 --input 'photos/*.jpg'
    detect-objects run --config tuned.yaml --model models/yolov4 --input 'photos/**/*.jpg' --output out/

The settings of the start are the defaults, or those of --config. Candidates change engine and precision, then the batches in
flight, the threads, the batch sizes, the decoders and the cores, each on top of the best so far. Each runs in a process of its
own, and each of its turns lies between two turns of the start, so that other work on the machine slows both. At the end the best
races against the start. Only what is faster beyond doubt (a paired t-test of seven rounds, 95 %), and by two percent, is written.

Exit code 0: done, also where nothing is faster; 1: the model cannot be used; 2: a wrong command or place; 130: stopped.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import glob
import importlib.util
import itertools
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import yaml

from models.evaluate.agreement import compare
from models.evaluate.detection_rows import RowsError
from pipeline.config import Config, check_model_is_named, load_config
from pipeline.detect.detector import Detector
from pipeline.detect.load_detector import load_detector
from pipeline.detect.openvino_engine import INT8
from pipeline.detect.server_protocols import PROTOCOLS
from pipeline.detect.versions import locate
from pipeline.errors import InputError, ModelError, OutputError, UserError
from pipeline.limits import NVIDIA_DEVICES, available_cpus, machine
from pipeline.read.list_images import check_inputs, list_images
from pipeline.records import DetectedImage, EncodedImage, ImageRef, detection_row
from pipeline.storage.files import read_file, write_file

DONE, UNUSABLE, WRONG = 0, 1, 2
_MOST_PHOTOS, _MOST_BYTES = 64, 256_000_000  # in the memory of each process
_MARK = "by detect-objects tune"  # in the file that it writes
_ROUNDS, _FINAL_ROUNDS = 3, 7
_STUDENTS_T = 2.447  # two-sided 95 %, for the six degrees of freedom of the final rounds
_GAIN = 1.02  # smaller gains are not worth a setting
_START_ANSWERS_S = 600.0  # a large model on a busy machine, or a server that wakes up
_ANSWERS_S, _TIMES_START = 60.0, 6.0  # a candidate answers within so many times what the start took to load, at least 60 s
_SPAWN = multiprocessing.get_context("spawn")

Settings = Mapping[str, Any]  # what differs from the settings of the start, by dotted key


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the trials too
    try:
        _tune(flags)
    except ModelError as err:
        print(f"error: {err}", file=sys.stderr)
        return UNUSABLE
    except (UserError, RowsError, OSError) as err:
        print(f"error: {' '.join(str(err).split())}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        for trial in multiprocessing.active_children():  # one that was just being started
            trial.kill()
        print("stopped; nothing is written", file=sys.stderr)
        return 128 + signal.SIGINT
    return DONE


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="detect-objects tune",
        description="Finds the settings with which this machine detects fastest, and writes them as a config.",
        epilog="use the result with detect-objects run --config tuned.yaml; nothing else should run while it is made. "
        "exit code: 0 done, also where nothing is faster; 1 the model cannot be used; 2 wrong command or place",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", required=True, nargs="+", metavar="PATTERN", help="images like those of the jobs; the first 64 are used")
    add("--model", metavar="PATH", help="a SavedModel or a folder of versions (default: the config's)")
    add("--config", action="append", default=[], metavar="FILE", help="a job's config, whose settings are the start")
    add("--output", default="tuned.yaml", metavar="FILE", help="config to write (default: %(default)s)")
    add(
        "--budget-s",
        type=float,
        default=300.0,
        metavar="X",
        help="seconds after which no candidate begins (default: %(default)s)",
    )
    add("--min-agreement", type=float, default=0.9, metavar="X", help="least agreement with the start (default: %(default)s)")
    return parser


def _tune(flags: argparse.Namespace) -> None:
    _check_output(flags.output)
    given = {"model.path": flags.model} if flags.model else {}
    config = load_config(flags.config, given)
    photos = _first_photos(flags.input)
    check_model_is_named(config)
    with Tuner(flags.config, given, photos, min_agreement=flags.min_agreement, seconds=flags.budget_s) as tuner:
        for stage in STAGES:
            for result in tuner.results(stage(load_config(flags.config, {**given, **tuner.best.settings}))):
                print(result.line(), file=sys.stderr, flush=True)
        won, verdict = tuner.decide()
    print(verdict, file=sys.stderr)
    write_file(flags.output, _config_text(won, verdict).encode())
    print(flags.output)


def engines(config: Config) -> list[Settings]:
    """Engines and precisions, all but the config's; none for a model server."""
    detect = config.detect
    if detect.engine in PROTOCOLS:
        return []
    with_openvino = detect.device in ("auto", "cpu") and importlib.util.find_spec("openvino")
    has_int8 = with_openvino and os.path.exists(os.path.join(locate(config.model.path, config.model.model_version)[0], INT8))
    pairs = [
        *itertools.product(("tensorflow", "openvino") if with_openvino else ("tensorflow",), ("float32", "bfloat16")),
        *([("openvino", "int8")] if has_int8 else []),
    ]
    return [
        {"detect.engine": pair[0], "detect.precision": pair[1]} for pair in pairs if pair != (detect.engine, detect.precision)
    ]


def concurrent_batches(config: Config) -> list[Settings]:
    """Batches in flight: one, as many as CPUs, and twice that."""
    cpus = available_cpus()
    return _each("concurrent_batches", {1, cpus, 2 * cpus} - {config.detect.concurrent_batches})


def threads(config: Config) -> list[Settings]:
    """Threads inside an operation: one, or all."""
    if config.detect.engine in PROTOCOLS:
        return []
    return _each("intra_op_threads", {1, available_cpus()} - {config.detect.intra_op_threads})


def batch_sizes(config: Config) -> list[Settings]:
    """Up to so many images in a batch; none for OpenVINO, which takes one at a time."""
    if config.detect.engine == "openvino" or config.model.path.endswith(".onnx"):
        return []
    most = (1, 8, 16, 64) if glob.glob(NVIDIA_DEVICES) else (1, 8, 16)
    ladders = [[2**power for power in range(each.bit_length())] for each in most]
    return [{"detect.batch_sizes": sizes} for sizes in ladders if sizes != list(config.detect.batch_sizes)]


def decoders(config: Config) -> list[Settings]:
    """Images decoded in parallel: half as many as CPUs, and twice as many."""
    cpus = available_cpus()
    return _each("feeder_processes", {max(1, cpus // 2), 2 * cpus} - {config.detect.feeder_processes or cpus})


STAGES = (engines, concurrent_batches, threads, batch_sizes, decoders)  # what matters most comes first


def _each(key: str, values: Iterable[int | None]) -> list[Settings]:
    return [{f"detect.{key}": value} for value in sorted(each for each in values if each)]


class Trial:
    """A process that runs the detector with some settings; a context manager.

    It begins to load at once. If an answer does not come in time, the process ends with all of its group.

    Args:
      configs: Config files of the job.
      settings: What differs from them, by dotted key.
      photos: Paths of images.
      answers_s: Longest wait for an answer.
    """

    def __init__(self, configs: Sequence[str], settings: Settings, photos: Sequence[str], *, answers_s: float):
        self._answers_s = answers_s
        self._connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, configs, settings, photos))
        self._process.start()
        theirs.close()

    def rows(self) -> list[dict[str, Any]]:
        """Waits for the model, and returns what it finds in the photos; to be called first.

        Raises:
          ModelError: The detector cannot be loaded so, or does not answer.
        """
        found: list[dict[str, Any]] = self._answer()
        return found

    def rate(self, seconds: float) -> float:
        """Images per second, in a turn of so many seconds.

        Raises:
          ModelError: The process does not answer.
        """
        with contextlib.suppress(BrokenPipeError):
            self._connection.send(seconds)
        rate: float = self._answer()
        return rate

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_error: object) -> None:
        self._kill()
        self._connection.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()

    def _answer(self) -> Any:
        if not self._connection.poll(self._answers_s):
            self._kill()
            raise ModelError(f"did not answer for {self._answers_s:.0f} s")
        try:
            answer = self._connection.recv()
        except EOFError:
            self._process.join()
            raise ModelError(f"the process ended with exit code {self._process.exitcode}") from None
        if isinstance(answer, ModelError):
            raise answer
        return answer


def _serve(connection: Connection, configs: Sequence[str], settings: Settings, photos: Sequence[str]) -> None:
    """Runs in the process of a trial: answers with the rows of the photos, then with a rate for each number of seconds."""
    os.setsid()  # Ctrl-C is for the command, which then ends this process
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1), os.dup2(nothing, 2)  # TensorFlow prints
    try:
        config = load_config(configs, settings)
        images = [EncodedImage(ImageRef(uri), read_file(uri)) for uri in photos]
        detector = load_detector(config.model, config.detect)
        connection.send([detection_row(found) for found in detector.detect(images) if isinstance(found, DetectedImage)])
        with contextlib.suppress(EOFError):
            while True:
                connection.send(_throughput(detector, images, connection.recv()))
    except (UserError, OSError) as err:
        connection.send(ModelError(" ".join(str(err).split())))
    os._exit(0)  # nothing is left to do, and TensorFlow's threads would wait for each other


def _throughput(detector: Detector, photos: Sequence[EncodedImage], seconds: float) -> float:
    """Images per second while as many are in flight as the detector can use."""
    images = itertools.cycle(photos)
    ahead = detector.model.engine.images_in_flight + 2 * available_cpus()
    in_flight = collections.deque(detector.start([next(images)]) for _ in range(ahead))

    def finish(count: int) -> None:
        for _ in range(count):
            in_flight.popleft().result()
            in_flight.append(detector.start([next(images)]))

    finish(ahead // 2)  # until batches and threads are busy
    began, done = time.monotonic(), 0
    while (elapsed := time.monotonic() - began) < seconds or not done:
        finish(1)
        done += 1
    for result in in_flight:
        result.result()
    return done / elapsed


@dataclasses.dataclass
class Result:
    """What came of a candidate.

    Attributes:
      settings: What differs from the start, by dotted key.
      rates: Images per second, of each turn.
      ratios: These divided by those of the start, in the turns before and after.
      refused: Why it has no figures; empty if it has.
    """

    settings: Settings
    rates: list[float] = dataclasses.field(default_factory=list)
    ratios: list[float] = dataclasses.field(default_factory=list)
    refused: str = ""

    @property
    def speed(self) -> float:
        """Its images per second, divided by those of the start; the median of its turns."""
        return statistics.median(self.ratios or [0.0])

    @property
    def name(self) -> str:
        """The settings in words."""
        return ", ".join(
            f"{key.rpartition('.')[2]} {','.join(map(str, value)) if isinstance(value, list) else value}"
            for key, value in self.settings.items()
        )

    def line(self) -> str:
        """What came of it, for people."""
        return f"{self.name}: {self.refused or f'{statistics.median(self.rates):.1f} images/s, {self.speed:.2f} of the start'}"


def is_faster(ratios: Sequence[float]) -> bool:
    """Whether a final race was won: beyond doubt (a paired t-test of the logarithms, 95 %), and by enough to matter."""
    if len(ratios) < _FINAL_ROUNDS or statistics.median(ratios) < _GAIN:
        return False
    gains = [math.log(ratio) for ratio in ratios]
    return statistics.mean(gains) > _STUDENTS_T * statistics.stdev(gains) / math.sqrt(len(gains))


def better(best: Result, other: Result) -> Result:
    """The other one if it beat the best so far in each of its turns, and by enough to matter."""
    speed = best.speed or 1.0  # the start itself has no turns
    wins = not other.refused and min(other.ratios) > speed and other.speed >= _GAIN * speed
    return other if wins else best


class Tuner:
    """Measures settings of a job's detector beside those of the start; a context manager that ends the start's process.

    Args:
      configs: Config files of the job; their settings are the start.
      given: What every trial changes in them, such as the model, by dotted key.
      photos: Paths of images.
      min_agreement: Candidates are refused that agree less with the start on the objects of the photos.
      seconds: No candidate begins after that.
      turn_s: Seconds of a turn.

    Attributes:
      best: The result of the settings that are the best so far.

    Raises:
      InputError: None of the photos is an image, or shows an object.
      ModelError: The model cannot be used with the settings of the start.
    """

    def __init__(
        self,
        configs: Sequence[str],
        given: Settings,
        photos: Sequence[str],
        *,
        min_agreement: float = 0.0,
        seconds: float = 0.0,
        turn_s: float = 1.0,
    ):
        self._configs, self._given, self._photos, self._turn_s = configs, given, photos, turn_s
        self._min_agreement = min_agreement
        self._ends = time.monotonic() + seconds
        self._answers_s = _START_ANSWERS_S
        self._open = contextlib.ExitStack()
        self.best = Result({})

    def __enter__(self) -> Tuner:
        began = time.monotonic()
        with self._open:
            self._start = self._open.enter_context(self._trial({}))
            self._expected = self._start.rows()
            if not self._expected:
                raise InputError(f"input: none of the {len(self._photos)} files is an image that can be decoded")
            if not any(row["detections"] for row in self._expected):
                raise InputError(
                    f"input: no object in {len(self._expected)} images, so nothing shows what a candidate finds; give others"
                )
            self._open = self._open.pop_all()
        self._answers_s = max(_ANSWERS_S, _TIMES_START * (time.monotonic() - began))
        return self

    def __exit__(self, *_error: object) -> None:
        self._open.close()

    def results(self, candidates: Iterable[Settings]) -> Iterator[Result]:
        """Measures candidates, each as what it changes in the settings that were the best before."""
        base = self.best.settings
        for change in candidates:
            result = Result({**base, **change})
            if time.monotonic() > self._ends:
                result.refused = "not tried: the time was over"
            else:
                self._measure(result, _ROUNDS)
            self.best = better(self.best, result)
            yield result

    def decide(self) -> tuple[Settings, str]:
        """Races the best against the start; returns the settings that won, none if it is not certain, and a verdict."""
        final = Result(self.best.settings)
        if not final.settings:
            return {}, "Nothing is faster than the settings of the start."
        self._measure(final, _FINAL_ROUNDS)
        if final.refused:
            return {}, f"Cannot tell whether {final.name} is faster: {final.refused}. The settings of the start stay."
        least, most = min(final.ratios), max(final.ratios)
        measured = f"{final.speed:.2f} times the start ({least:.2f} to {most:.2f} in {len(final.ratios)} rounds)"
        if is_faster(final.ratios):
            return final.settings, f"{final.name}: {measured}."
        return {}, f"Cannot tell whether {final.name} is faster: {measured}. The settings of the start stay."

    def _trial(self, settings: Settings) -> Trial:
        return Trial(self._configs, {**self._given, **settings}, self._photos, answers_s=self._answers_s)

    def _measure(self, result: Result, rounds: int) -> None:
        """Adds figures, or why there are none.

        Raises:
          ModelError: The start failed.
        """
        with self._trial(result.settings) as trial:
            result.refused = self._refusal(trial)
            if result.refused:
                return
            before = self._start.rate(self._turn_s)
            for _ in range(rounds):
                try:
                    rate = trial.rate(self._turn_s)
                except ModelError as err:
                    result.refused = str(err)
                    return
                after = self._start.rate(self._turn_s)
                result.rates.append(rate)
                result.ratios.append(2 * rate / (before + after))
                before = after

    def _refusal(self, trial: Trial) -> str:
        """Why a candidate is not measured; empty if it finds what the start finds."""
        try:
            agreement = compare(trial.rows(), self._expected, match="path")["agreement"]
        except ModelError as err:
            return str(err)
        if agreement >= self._min_agreement:
            return ""
        return f"it finds other objects: agreement {agreement:.3f}, wanted {self._min_agreement}"


def _check_output(path: str) -> None:
    """Refuses to replace what this command did not write."""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
        if _MARK not in file.read(4096):
            raise OutputError(f"output {path}: is a file that this command did not write; give another --output")


def _first_photos(patterns: Sequence[str]) -> list[str]:
    """The first images that fit into memory."""
    check_inputs({pattern: (pattern,) for pattern in patterns})
    photos: list[str] = []
    room = _MOST_BYTES
    named = (ref for ref in list_images(patterns) if isinstance(ref, ImageRef))
    for ref in itertools.islice(named, _MOST_PHOTOS):
        room -= ref.size_bytes
        if photos and room < 0:
            break
        photos.append(ref.uri)
    if not photos:
        raise InputError(f"input {' '.join(patterns)}: names no image")
    return photos


def _config_text(settings: Settings, verdict: str) -> str:
    detect = {key.rpartition(".")[2]: value for key, value in settings.items()}
    tree = {"detect": detect} if detect else {}
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return f"# Written {_MARK}, {today}, on {machine()}. {verdict}\n{yaml.safe_dump(tree, sort_keys=False)}"


if __name__ == "__main__":
    sys.exit(main())
