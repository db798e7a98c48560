"""What a run leaves beside its rows: summary, report, samples, COCO files. Those of the latest run stand at the top.

A run that adds to a folder moves those of the one before it to `runs/<name>/`; one that takes another's place removes them, and
its rows.
"""

from __future__ import annotations

from collections.abc import Collection

from pipeline.storage.files import generations_of, move_as_they_were
from pipeline.storage.results import (
    COCO_IMAGES,
    COCO_RESULTS,
    REPORT,
    RUNS,
    SUMMARY,
    earlier_samples,
    list_rows,
    read_summary,
    run_of_rows,
)


def make_way(output: str, run: str) -> None:
    """Keeps what the run before left beside its rows; does nothing where a run's own summary is there already.

    May be called again, also after a kill in the middle: the earlier run's summary, which tells what is its, goes last. So while
    that stands there all else is the earlier run's; what came later than that is left alone.

    Args:
      output: The results folder.
      run: The run that it makes way for.
    """
    summary = read_summary(output)
    if not summary or summary.get("run") == run:
        return
    earlier = f"{output}/{RUNS}/{summary.get('name') or summary.get('run') or 'earlier'}"
    beside = [COCO_RESULTS, COCO_IMAGES, REPORT, *earlier_samples(output, run)]
    generations = generations_of(f"{output}/{name}" for name in [*beside, SUMMARY])
    if read_summary(output) != summary:
        return
    for names in (beside, [SUMMARY]):
        there = [name for name in names if f"{output}/{name}" in generations]
        move_as_they_were({f"{output}/{name}": f"{earlier}/{name}" for name in there}, generations)


def in_the_way(output: str, run: str, new: Collection[str], replace: bool) -> dict[str, str]:
    """The files of the runs whose place a run takes: what this program wrote, and never a new one.

    Args:
      output: The results folder.
      run: The run.
      new: The names of its files of rows.
      replace: Whether all runs before make way, or just those of the same command.

    Returns:
      Their names, with their generations.
    """
    stale = set(list_rows(output).of_batch) - {*new}
    if not replace:
        stale = {name for name in stale if run_of_rows(name) in {"", *map(run_of_rows, new)}}
    has_summary = read_summary(output).get("run") == run
    names = [*sorted(stale), *([] if has_summary else [REPORT, *earlier_samples(output, run), SUMMARY])]
    generations = generations_of(f"{output}/{name}" for name in names)
    return {path.removeprefix(f"{output}/"): generation for path, generation in generations.items()}
