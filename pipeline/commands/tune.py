"""`detect-objects tune`: finds the settings with which this machine detects fastest.

    detect-objects tune --model models/yolov4 --input 'photos/*.jpg'
    python -m pipeline.run --config tuned.yaml --model models/yolov4 --input 'photos/**/*.jpg' --output out/

The settings of the start are the defaults, or those of --config. Candidates change engine and precision, and on a GPU whether XLA
compiles, then the batches in flight, the threads, the batch sizes and the feeder processes, each on top of the best so far. Each
runs in a process of its own, as a job does and on the same GPU as the start, and each of its turns lies between two turns of the
start, so that other work on the machine slows both. At the end the best races against the start. Only what is faster beyond doubt
(a paired t-test of seven rounds, 95 %), and by two percent, is written.

Exit code 0: done, also where nothing is faster; 1: the model cannot be used, or the disk is full; 2: a wrong command or
place; 130: stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import yaml

from models.evaluate.agreement import compare
from models.evaluate.detection_rows import RowsError
from pipeline.config import Config, check_model_is_named, load_config
from pipeline.config.engines import ENGINES, SERVER, engines_for
from pipeline.config.paths import local_path
from pipeline.config.setting import is_own_engine
from pipeline.detect.engine import COMPILED_SIZES
from pipeline.detect.gpus import gpu_names, take_gpu
from pipeline.detect.load_model import engine_of
from pipeline.detect.trial import Settings, trial
from pipeline.detect.versions import is_remote, resolve_versions
from pipeline.errors import DONE, FAILED, WRONG, CommandParser, InputError, ModelError, run_command
from pipeline.limits import available_cpus, machine, nvidia_gpus
from pipeline.listing.list_images import check_inputs, list_images
from pipeline.log_lines import console, plural
from pipeline.records import ImageRef
from pipeline.storage.files import file_to_write, write_file

_MOST_PHOTOS = 64
_MARK = "by detect-objects tune"  # in the file that it writes
_ROUNDS, _FINAL_ROUNDS = 3, 7
_STUDENTS_T = 2.447  # two-sided 95 %, for the six degrees of freedom of the final rounds
_GAIN = 1.02  # smaller gains are not worth a setting
_START_ANSWERS_S = 600.0  # a large model on a busy machine, or a server that wakes up
_ANSWERS_S, _TIMES_START = 60.0, 6.0  # a candidate answers within so many times what the start took to load, at least 60 s

Measure = Callable[..., "Result"]  # races settings against the start, for so many rounds


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    flags = make_parser().parse_args(argv)
    return run_command(lambda: _tune(flags), "the tuner failed", "stopped; nothing is written", failed_code=WRONG)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog="detect-objects tune",
        description="Finds the settings with which this machine detects fastest, and writes them as a config.",
        epilog="use the result with python -m pipeline.run --config tuned.yaml; nothing else should run while it is made. "
        "exit code: 0 done, also where nothing is faster; 1 the model cannot be used, or the disk is full; 2 wrong command",
    )
    add = parser.add_argument
    add("--input", required=True, nargs="+", metavar="PATTERN", help="images like those of the jobs; the first 64 are used")
    add("--model", metavar="PATH", help="a model or a folder of versions (default: the config's)")
    add("--config", action="append", default=[], metavar="FILE", help="a job's config, whose settings are the start")
    add("--output", default="tuned.yaml", metavar="FILE", help="config to write (default: %(default)s)")
    add("--budget-s", type=float, default=300.0, metavar="X", help="seconds after which no candidate begins (default: 300)")
    add("--min-agreement", type=float, default=0.9, metavar="X", help="least agreement with the start (default: %(default)s)")
    return parser


def _tune(flags: argparse.Namespace) -> int:
    output = file_to_write("--output", local_path(flags.output), mark=_MARK.encode())
    given = {"model.path": flags.model} if flags.model else {}
    config = load_config(flags.config, given)
    photos = _first_photos(flags.input)
    check_model_is_named(config.model, config.detect)
    _share_gpu(config.detect.device)
    ends, best = time.monotonic() + flags.budget_s, Result({})
    try:
        with race(flags.config, given, photos, flags.min_agreement) as measure:
            for stage in STAGES:
                base = best.settings
                for change in candidates(stage, load_config(flags.config, {**given, **base})):
                    settings = {**base, **change}
                    is_late = time.monotonic() > ends
                    result = Result(settings, refused="not tried: the time was over") if is_late else measure(settings)
                    console.info("%s", result.line())
                    best = better(best, result)
            won, verdict = decide(best, measure)
    except ModelError as err:
        console.error("%s", err)
        return FAILED
    console.info("%s", verdict)
    write_file(output, _config_text(won, verdict).encode())
    print(flags.output)
    return DONE


def _share_gpu(device: str) -> None:
    """Lets the start and its rivals see one GPU of several: each process would take another one."""
    if (gpus := nvidia_gpus()) > 1 and device in ("auto", "gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu_names(gpus)[take_gpu(gpus)]


STAGES = ("engine", "concurrent_batches", "intra_op_threads", "batch_sizes", "feeder_processes")  # what matters most comes first


def candidates(stage: str, config: Config) -> list[Settings]:
    """What to try of a setting beside the value that it has; nothing where the engine has no such setting.

    Args:
      stage: One of `STAGES`: a key of the config's `detect` section; with the engine goes the precision.
      config: The best so far.
    """
    detect, cpus, files = config.detect, available_cpus(), _files_of(config)
    engine, gpu = engine_of(files, detect), detect.device != "cpu" and nvidia_gpus() > 0
    kind, at_server = ENGINES.get(engine), files == SERVER
    if stage == "engine":
        names = [] if at_server else [name for name in engines_for(files, detect.device) if ENGINES[name].installed]
        other = {"detect.compiled": "auto" if detect.compiled == "no" else "no"}
        return [
            {"detect.engine": name, "detect.precision": precision, **more}
            for name in names
            for precision in ENGINES[name].precisions_on(gpu=gpu)
            for more in ({}, other)
            if (gpu and ENGINES[name].compiles if more else (name, precision) != (engine, detect.precision))
        ]
    one_image, largest = kind is not None and not kind.batches, (1, 8, 16, 64) if gpu else (1, 8, 16)
    sizes = [[2**power for power in range(each.bit_length())] for each in largest]
    if gpu and kind and (engine == "tensorrt" or (kind.compiles and detect.compiled != "no")):
        sizes = [list(COMPILED_SIZES[: number + 1]) for number in range(len(COMPILED_SIZES))]
    values: dict[str, list[Any]] = {
        "concurrent_batches": [1, 2, 4, 6] if gpu and kind and "gpu" in kind.precisions else sorted({1, cpus, 2 * cpus}),
        "intra_op_threads": [] if at_server else sorted({1, cpus}),
        "batch_sizes": [] if one_image else sizes,
        "feeder_processes": sorted({max(1, cpus // 2), 2 * cpus}),
    }
    used = getattr(detect, stage)
    return [{f"detect.{stage}": value} for value in values[stage] if value != (list(used) if stage == "batch_sizes" else used)]


def _files_of(config: Config) -> str:
    """The kind of the model; empty where an engine of the user's own opens it."""
    if is_own_engine(config.detect.engine):
        return ""
    if is_remote(config.model.path):
        return SERVER
    return resolve_versions(config.model.path, config.model.model_version)[0].kind


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


def better(best: Result, other: Result) -> Result:
    """The other one if it beat the best so far in each of its turns, and by enough to matter."""
    speed = best.speed or 1.0  # the start itself has no turns
    wins = not other.refused and min(other.ratios) > speed and other.speed >= _GAIN * speed
    return other if wins else best


def is_faster(ratios: Sequence[float]) -> bool:
    """Whether a final race was won: beyond doubt (a paired t-test of the logarithms, 95 %), and by enough to matter."""
    if len(ratios) < _FINAL_ROUNDS or statistics.median(ratios) < _GAIN:
        return False
    gains = [math.log(ratio) for ratio in ratios]
    return statistics.mean(gains) > _STUDENTS_T * statistics.stdev(gains) / math.sqrt(len(gains))


@contextlib.contextmanager
def race(
    configs: Sequence[str], given: Settings, photos: Sequence[str], min_agreement: float = 0.0, turn_s: float = 1.0
) -> Iterator[Measure]:
    """Runs a job's detector with the settings of the start; gives a function that measures others beside it.

    Args:
      configs: Config files of the job; their settings are the start.
      given: What every trial changes in them, such as the model, by dotted key.
      photos: Paths of images.
      min_agreement: Candidates are refused that agree less with the start on the objects of the photos.
      turn_s: Seconds of a turn.

    Raises:
      InputError: None of the photos shows an object.
      ModelError: The model cannot be used with the settings of the start.
    """
    began = time.monotonic()
    with trial(configs, given, photos, _START_ANSWERS_S) as start:
        expected = start()
        if not any(row["detections"] for row in expected):
            seen = f"{plural(len(expected), 'image')} that can be decoded, of {plural(len(photos), 'file')}"
            raise InputError(f"input: no object in {seen}, so nothing shows what a candidate finds; give others")
        answers_s = max(_ANSWERS_S, _TIMES_START * (time.monotonic() - began))

        def measure(settings: Settings, rounds: int = _ROUNDS) -> Result:
            with trial(configs, {**given, **settings}, photos, answers_s) as other:
                try:
                    agreement = compare(other(), expected, match="path")["agreement"]
                    if agreement < min_agreement:
                        raise ModelError(f"it finds other objects: agreement {agreement:.3f}, wanted {min_agreement}")
                    rates = [start(turn_s)]
                    for _ in range(rounds):
                        rates += [other(turn_s), start(turn_s)]
                except (ModelError, RowsError) as err:  # also of one that fails at every photo
                    return Result(settings, refused=str(err))
            beside = itertools.pairwise(rates[::2])  # the turns of the start before and after each
            ratios = [2 * rate / sum(two) for rate, two in zip(rates[1::2], beside, strict=True)]
            return Result(settings, rates[1::2], ratios)

        yield measure


def decide(best: Result, measure: Measure) -> tuple[Settings, str]:
    """Races the best against the start; returns the settings that won, none if it is not certain, and a verdict."""
    if not best.settings:
        return {}, "Nothing is faster than the settings of the start."
    final = measure(best.settings, _FINAL_ROUNDS)
    measured = final.refused
    if not measured:
        least, most = min(final.ratios), max(final.ratios)
        measured = f"{final.speed:.2f} times the start ({least:.2f} to {most:.2f} in {len(final.ratios)} rounds)"
    if is_faster(final.ratios):
        return final.settings, f"{final.name}: {measured}."
    return {}, f"Cannot tell whether {final.name} is faster: {measured}. The settings of the start stay."


def _first_photos(patterns: Sequence[str]) -> list[str]:
    check_inputs({pattern: (pattern,) for pattern in patterns})
    named = (ref.uri for ref in list_images(patterns) if isinstance(ref, ImageRef))
    photos = list(itertools.islice(named, _MOST_PHOTOS))
    if not photos:
        raise InputError(f"input {' '.join(patterns)}: names no image")
    return photos


def _config_text(settings: Settings, verdict: str) -> str:
    detect = {key.rpartition(".")[2]: value for key, value in settings.items()}
    tree = {"detect": detect} if detect else {}
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return f"# Written {_MARK}, {today}, on {machine()}. {verdict}\n{yaml.safe_dump(tree, sort_keys=False)}"
