"""`detect-objects tune`, `python -m pipeline.tune`: finds the settings with which this machine detects fastest.

    detect-objects tune --model models/yolov4 --input 'photos/*.jpg'
    detect-objects run --config tuned.yaml --model models/yolov4 --input 'photos/**/*.jpg' --output out/

The settings of the start are the defaults, or those of --config. Candidates change engine and precision, then the batches in
flight, the threads, the batch sizes, the decoders and the cores. Each runs in a process of its own, in turns with the start. At
the end the best races against the start. Only what is faster beyond doubt (a paired t-test
of seven rounds, 95 %), and by two percent, is written.

Exit code 0: done, also where nothing is faster; 1: the model cannot be used; 2: a wrong command or place; 130: stopped.
"""

from __future__ import annotations

import argparse
import datetime
import glob
import importlib.util
import itertools
import os
import signal
import sys
from collections.abc import Iterable, Sequence

import yaml

from models.evaluate.detection_rows import RowsError
from pipeline.config import Config, check_model_is_named, load_config
from pipeline.detect.openvino_int8 import INT8
from pipeline.detect.server_protocols import PROTOCOLS
from pipeline.detect.versions import locate
from pipeline.errors import InputError, ModelError, OutputError, UserError
from pipeline.limits import NVIDIA_DEVICES, available_cpus, first_threads, machine
from pipeline.read.list_images import check_inputs, list_images
from pipeline.storage.files import write_files
from pipeline.tuning.page import render_tuning
from pipeline.tuning.search import Result, Search, Settings, is_faster

DONE, UNUSABLE, WRONG = 0, 1, 2
_MOST_PHOTOS, _MOST_BYTES = 64, 256_000_000  # in the memory of each process
_MARK = "by detect-objects tune"  # in all that it writes


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
    add("--output", default="tuned.yaml", metavar="FILE", help="config to write, with a page beside it (default: %(default)s)")
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
    page = _check_output(flags.output)
    given = {"model.path": flags.model} if flags.model else {}
    config = load_config(flags.config, given)
    photos = first_photos(flags.input)
    check_model_is_named(config)
    search = Search(flags.config, given, photos, min_agreement=flags.min_agreement, seconds=flags.budget_s)
    stages = (
        stage(load_config(flags.config, {**given, **search.best.settings})) for stage in STAGES
    )  # on top of the best by then
    results = {}
    for result in search.results(stages):
        results[result.name] = result
        print(_line(result), file=sys.stderr, flush=True)
    best = search.best.settings
    final = search.final(best) if best else Result({})
    won = is_faster(final.ratios)
    verdict = _verdict(final, won)
    print(verdict, file=sys.stderr)
    text = _config_text(best if won else {}, verdict)
    facts = [("Machine", machine()), ("Model", config.model.path), ("Images", str(len(photos)))]
    write_files({flags.output: text.encode(), page: render_tuning([*results.values()], verdict, facts, text).encode()})
    print(f"{flags.output}, {page}")


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
    start = (detect.engine, detect.precision)
    return [
        {"detect.engine": engine, "detect.precision": precision} for engine, precision in pairs if (engine, precision) != start
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
    if config.detect.engine == "openvino":
        return []
    most = (1, 8, 16, 64) if glob.glob(NVIDIA_DEVICES) else (1, 8, 16)
    ladders = [[2**power for power in range(each.bit_length())] for each in most]
    return [{"detect.batch_sizes": sizes} for sizes in ladders if sizes != list(config.detect.batch_sizes)]


def decoders(config: Config) -> list[Settings]:
    """Images decoded in parallel: half as many as CPUs, and twice as many."""
    cpus = available_cpus()
    return _each("decode_threads", {max(1, cpus // 2), 2 * cpus} - {config.detect.decode_threads or cpus})


def cores(config: Config) -> list[Settings]:
    """One hardware thread of each core, where cores have several; other subsets would crowd what runs beside the job."""
    firsts = first_threads()
    return [{"detect.cpu_affinity": firsts}] if firsts and not config.detect.cpu_affinity else []


STAGES = (engines, concurrent_batches, threads, batch_sizes, decoders, cores)  # what matters most comes first


def _each(key: str, values: Iterable[int | None]) -> list[Settings]:
    return [{f"detect.{key}": value} for value in sorted(each for each in values if each)]


def _check_output(path: str) -> str:
    """The page beside the config; refuses what this command did not write."""
    page = f"{os.path.splitext(path)[0]}.html"
    for each in (path, page):
        try:
            with open(each, encoding="utf-8", errors="replace") as file:
                if _MARK not in file.read(4096):
                    raise OutputError(f"output {each}: is a file that this command did not write; give another --output")
        except FileNotFoundError:
            continue
    return page


def first_photos(patterns: Sequence[str]) -> list[str]:
    """The first images that fit into memory."""
    check_inputs({pattern: (pattern,) for pattern in patterns})
    photos: list[str] = []
    room = _MOST_BYTES
    for ref in itertools.islice(list_images(patterns), _MOST_PHOTOS):
        room -= ref.size_bytes
        if photos and room < 0:
            break
        photos.append(ref.uri)
    if not photos:
        raise InputError(f"input {' '.join(patterns)}: names no image")
    return photos


def _line(result: Result) -> str:
    if result.refused:
        return f"{result.name}: {result.refused}"
    latency = f", p99 {result.alone_ms:.0f} ms alone, {result.half_load_ms:.0f} ms at half load" if result.alone_ms else ""
    speed = f"{result.rate:.1f} images/s, {result.speed:.2f} of the start"
    return f"{result.name}: {speed}{latency}, {result.memory_mb:.0f} MB"


def _verdict(final: Result, won: bool) -> str:
    if not final.settings:
        return "Nothing is faster than the settings of the start."
    ratios = final.ratios
    measured = (
        f"{final.speed:.2f} times the start ({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds)" if ratios else ""
    )
    if won:
        return f"{final.name}: {measured}."
    return f"Cannot tell whether {final.name} is faster: {final.refused or measured}. The settings of the start stay."


def _config_text(settings: Settings, verdict: str) -> str:
    detect = {key.rpartition(".")[2]: value for key, value in settings.items()}
    tree = {"detect": {**detect, "tuned_on": machine()}} if detect else {}
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return f"# Written {_MARK}, {today}. {verdict}\n{yaml.safe_dump(tree, sort_keys=False)}"


if __name__ == "__main__":
    sys.exit(main())
