"""What a run leaves beside its rows: summary, report, samples, COCO files. Those of the latest run stand at the top.

A run that adds to a folder moves those of the one before it to `runs/<name>/`; one that takes another's place removes them.
"""

from __future__ import annotations

from pipeline.storage.files import delete_files, exists, move_files
from pipeline.storage.results import COCO_IMAGES, COCO_RESULTS, REPORT, RUNS, SUMMARY, earlier_samples, read_summary


def make_way(output: str, run: str, *, adds: bool) -> None:
    """Makes way for what a run leaves beside its rows; does nothing where its own summary is there already.

    May be called again, also after a kill in the middle: the earlier run's summary, which tells what is its, goes last.

    Args:
      output: The results folder.
      run: The run that makes it.
      adds: Whether the earlier run's files are to be kept.
    """
    summary = read_summary(output)
    if summary.get("run") == run or (adds and not summary):
        return
    beside = [REPORT, *earlier_samples(output, run)]
    if not adds:
        delete_files(f"{output}/{name}" for name in [*beside, SUMMARY])
        return
    earlier = f"{output}/{RUNS}/{summary.get('name') or summary.get('run') or 'earlier'}"
    for names in ([COCO_RESULTS, COCO_IMAGES, *beside], [SUMMARY]):
        move_files({f"{output}/{name}": f"{earlier}/{name}" for name in names if exists(f"{output}/{name}")})
