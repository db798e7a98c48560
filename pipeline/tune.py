"""`detect-objects tune`, `python -m pipeline.tune`: finds the settings with which this machine detects fastest.

    detect-objects tune --model models/yolov4 --input 'photos/*.jpg'
    detect-objects run --config tuned.yaml --model models/yolov4 --input 'photos/**/*.jpg' --output out/

The settings of the start are the defaults, or those of --config. Candidates change the engine, the precision, the batch sizes,
the batches in flight and the decoders, one after the other. Each runs in a process of its own, in turns with the best so far. At
the end the best races against the start. Only what wins each of seven rounds, by two percent, is written.

Exit code 0: done, also where nothing is faster; 1: the model cannot be used; 2: a wrong command or place; 130: stopped.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import itertools
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence

import yaml

from models.evaluate.detection_rows import RowsError
from pipeline.config import Config, load_config
from pipeline.detect.openvino_int8 import INT8
from pipeline.detect.server_protocols import PROTOCOLS
from pipeline.detect.versions import locate
from pipeline.errors import InputError, ModelError, OutputError, UserError
from pipeline.limits import available_cpus, machine
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
    photos = _photos(flags.input)
    search = Search(flags.config, given, photos, min_agreement=flags.min_agreement, seconds=flags.budget_s)
    results = []
    for result in search.results(candidates(config)):
        results.append(result)
        print(_line(result), file=sys.stderr, flush=True)
    best = search.best
    ratios = search.final(best.settings) if best.settings else []
    won = is_faster(ratios)
    verdict = _verdict(best, ratios, won)
    print(verdict, file=sys.stderr)
    text = _config_text(best.settings if won else {}, verdict)
    facts = [("Machine", machine()), ("Model", config.model.path), ("Images", str(len(photos)))]
    write_files({flags.output: text.encode(), page: render_tuning(results, verdict, facts, text).encode()})
    print(f"{flags.output}, {page}")


def candidates(config: Config) -> Iterator[list[Settings]]:
    """The stages of the search: what each candidate changes, by dotted key."""
    cpus = available_cpus()
    start = {"detect.engine": config.detect.engine, "detect.precision": config.detect.precision}
    yield [change for change in _engines(config) if change != start]
    yield [{"detect.concurrent_batches": number} for number in sorted({1, 2, cpus, cpus + 1, 2 * cpus})]
    yield [{"detect.intra_op_threads": number} for number in sorted({1, cpus})]
    yield [{"detect.decode_threads": number} for number in sorted({max(1, cpus // 2), cpus, 2 * cpus})]
    yield [{"detect.batch_sizes": _ladder(most)} for most in (1, 4, 8, 16, 32)]  # OpenVINO ignores them


def _engines(config: Config) -> Iterator[Settings]:
    if config.detect.engine in PROTOCOLS:  # the server has the model
        return
    with_openvino = config.detect.device in ("auto", "cpu") and importlib.util.find_spec("openvino")
    for engine in ("tensorflow", "openvino") if with_openvino else ("tensorflow",):
        has_int8 = engine == "openvino" and os.path.exists(
            os.path.join(locate(config.model.path, config.model.model_version)[0], INT8)
        )
        for precision in ("float32", "bfloat16", *(("int8",) if has_int8 else ())):
            yield {"detect.engine": engine, "detect.precision": precision}


def _ladder(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


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


def _photos(patterns: Sequence[str]) -> list[str]:
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
        return f"{result.name}: not possible: {result.refused}"
    latency = f", p99 {result.alone_ms:.0f} ms alone, {result.half_load_ms:.0f} ms at half load" if result.alone_ms else ""
    speed = f"{result.rate:.1f} images/s, {result.speed:.2f} of the start"
    return f"{result.name}: {speed}{latency}, {result.memory_mb:.0f} MB"


def _verdict(best: Result, ratios: Sequence[float], won: bool) -> str:
    if not best.settings:
        return "Nothing is faster than the settings of the start."
    measured = f"{statistics.median(ratios):.2f} times the start ({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds)"
    if won:
        return f"{best.name}: {measured}."
    return f"Cannot tell whether {best.name} is faster: {measured}. The settings of the start stay."


def _config_text(settings: Settings, verdict: str) -> str:
    detect = {key.rpartition(".")[2]: value for key, value in settings.items()}
    tree = {"detect": {**detect, "tuned_on": machine()}} if detect else {}
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return f"# Written {_MARK}, {today}. {verdict}\n{yaml.safe_dump(tree, sort_keys=False)}"


if __name__ == "__main__":
    sys.exit(main())
