"""The tuner's choice and each cell of a grid over its settings, beside the default, in turns in one run.

    detect-objects tune --model M --input 'photos/*' --output .bench/tuned.yaml
    python -m tests.benchmarks.tuning_grid --model M --input 'photos/*' --tuned .bench/tuned.yaml

The grid has engine and precision, batches in flight and threads; batch sizes and decoders stay at their defaults. The cells and
the choice are processes of the tuner (`pipeline/tuning/trial.py`), and each of their turns lies between two turns of the default.
Then the best cells and the choice race for seven rounds. Prints tables for BENCHMARKS.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import yaml

from pipeline.config import load_config
from pipeline.limits import available_cpus, machine
from pipeline.tune import engines, first_photos
from pipeline.tuning.search import AT_ONCE, FINAL_ROUNDS, Result, Search, Settings, Trial, take_turns

_ROUNDS = 2  # of each cell
_FINALISTS = 3  # cells: the best of a noisy measurement is not always the best


def main() -> None:
    """Measures the grid and prints the tables."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", required=True)
    flags.add_argument("--input", required=True, nargs="+", metavar="PATTERN")
    flags.add_argument("--tuned", type=Path, required=True, help="what detect-objects tune wrote on this machine")
    flags.add_argument("--min-agreement", type=float, default=0.9, help="cells below are left out, as the tuner does")
    flags.add_argument("--rounds", type=int, default=_ROUNDS)
    flags.add_argument("--final-rounds", type=int, default=FINAL_ROUNDS)
    flags.add_argument("--turn-s", type=float, default=1.0)
    args = flags.parse_args()
    given = {"model.path": args.model}
    search = Search([], given, first_photos(args.input), min_agreement=args.min_agreement, turn_s=args.turn_s)
    choice = {f"detect.{key}": value for key, value in (yaml.safe_load(args.tuned.read_text()) or {}).get("detect", {}).items()}
    choice.pop("detect.tuned_on", None)
    with search.start() as start:
        cells: list[Result] = []
        for heat in _heats(_grid(given), AT_ONCE):
            cells += _measured(search, start, heat, args.rounds)
        best = sorted((cell for cell in cells if cell.ratios), key=lambda cell: cell.speed, reverse=True)[:_FINALISTS]
        final = _measured(search, start, [choice, *(cell.settings for cell in best)], args.final_rounds)
    print(f"{args.model}, {machine()}\n\n{_grid_table(cells)}\n\n{_final_table(final)}")


def _grid(given: Settings) -> list[Settings]:
    """Each combination; the default is measured beside all of them."""
    cpus = available_cpus()
    config = load_config([], given)
    own = {"detect.engine": config.detect.engine, "detect.precision": config.detect.precision}
    return [
        {**engine, "detect.concurrent_batches": batches, "detect.intra_op_threads": threads}
        for engine, batches, threads in itertools.product([own, *engines(config)], sorted({1, cpus, 2 * cpus}), sorted({1, cpus}))
    ]


def _heats(cells: Sequence[Settings], size: int) -> list[Sequence[Settings]]:
    return [cells[first : first + size] for first in range(0, len(cells), size)]


def _measured(search: Search, start: Trial, settings: Sequence[Settings], rounds: int) -> list[Result]:
    """Each of them after so many rounds; one that is refused says why."""
    with contextlib.ExitStack() as at_work:
        field = [(at_work.enter_context(search.trial(each)), Result(each)) for each in settings]
        for trial, result in field:
            search.check(trial, result)
        for _ in range(rounds):
            take_turns(start, field)
    return [result for _, result in field]


def _grid_table(cells: Sequence[Result]) -> str:
    """Markdown: a line for each engine and precision, a column for batches in flight and threads."""
    columns = list(dict.fromkeys(_column(cell) for cell in cells))
    lines = [f"| times the default | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for engine, row in itertools.groupby(cells, lambda cell: (cell.settings["detect.engine"], cell.settings["detect.precision"])):
        speeds = {_column(cell): f"{cell.speed:.2f}" if cell.ratios and not cell.refused else "refused" for cell in row}
        lines.append(f"| {' '.join(engine)} | {' | '.join(speeds.get(column, '') for column in columns)} |")
    return "\n".join([*lines, *(f"\nrefused: {cell.name}: {cell.refused}" for cell in cells if cell.refused)])


def _column(cell: Result) -> str:
    return f"{cell.settings['detect.concurrent_batches']} in flight, {cell.settings['detect.intra_op_threads']} threads"


def _final_table(final: Sequence[Result]) -> str:
    """Markdown: the choice and the best cells, against the default and against the best of these cells, round by round."""
    best = max((cell for cell in final if not cell.refused), key=lambda result: result.speed * (result is not final[0]))
    lines = ["| final race | times the default | least | most | times the best cell |", "|---|---|---|---|---|"]
    for number, result in enumerate(final):
        if result.refused:
            lines.append(f"| {result.name} | refused: {result.refused} | | | |")
            continue
        beside = statistics.median(its / other for its, other in zip(result.ratios, best.ratios, strict=True))
        name = f"**the tuner's choice**: {result.name}" if number == 0 else result.name
        lines.append(f"| {name} | {result.speed:.2f} | {min(result.ratios):.2f} | {max(result.ratios):.2f} | {beside:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
