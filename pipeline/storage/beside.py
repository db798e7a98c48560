"""What a run leaves beside its rows: summary, report, samples, COCO files. Those of the latest run stand at the top.

A run that adds to a folder moves those of the one before it to `runs/<name>/`; one that takes another's place removes them.
"""

from __future__ import annotations

from pipeline.storage.files import exists, move_files
from pipeline.storage.results import COCO_IMAGES, COCO_RESULTS, REPORT, RUNS, SUMMARY, earlier_samples, read_summary


def make_way(output: str, run: str) -> None:
    """Keeps what the run before left beside its rows; does nothing where a run's own summary is there already.

    May be called again, also after a kill in the middle: the earlier run's summary, which tells what is its, goes last.

    Args:
      output: The results folder.
      run: The run that it makes way for.
    """
    summary = read_summary(output)
    if not summary or summary.get("run") == run:
        return
    earlier = f"{output}/{RUNS}/{summary.get('name') or summary.get('run') or 'earlier'}"
    for names in ([COCO_RESULTS, COCO_IMAGES, REPORT, *earlier_samples(output, run)], [SUMMARY]):
        move_files({f"{output}/{name}": f"{earlier}/{name}" for name in names if exists(f"{output}/{name}")})


def in_the_way(output: str, run: str) -> list[str]:
    """The names of what the run before left beside its rows, where a run takes its place; none where that has its own summary."""
    summary = read_summary(output)
    return [] if summary.get("run") == run else [REPORT, *earlier_samples(output, run), SUMMARY]
