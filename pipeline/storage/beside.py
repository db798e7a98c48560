"""What a run leaves beside its rows: summary, report, samples, COCO files. Those of the latest run stand at the top.

A run that adds to a folder moves those of the one before it to `runs/<name>/`; one that takes another's place removes them, and
its rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from pipeline.errors import OutputError
from pipeline.storage.files import exists, generations_of, list_files, move_if_generation_match, open_part, read_file
from pipeline.storage.globs import escape_glob
from pipeline.storage.results import (
    COCO_IMAGES,
    COCO_RESULTS,
    MADE_BY,
    REPORT,
    RUNS,
    SAMPLES,
    SUMMARY,
    earlier_samples,
    list_rows,
    read_summary,
    run_of_rows,
)

_MARK_BYTES = 4096  # a page's or a picture's mark stands in its first bytes
_SUMMARY_BEGINS = b'{\n  "images": {'
_COCO = (COCO_RESULTS, COCO_IMAGES)


def check_beside(output: str, samples: int = 0, coco: bool = False, earlier: Iterable[Mapping[str, Any]] = ()) -> None:
    """Makes sure that what a run writes beside its rows replaces no file of somebody else.

    Args:
      output: The results folder.
      samples: How many samples the run writes.
      coco: Whether it writes COCO files.
      earlier: The settings of runs whose rows are there and whose summary is not.

    Raises:
      OutputError: It would.
    """
    made_coco = any(settings.get("write", {}).get("coco") for settings in earlier)
    names = [SUMMARY, REPORT, *(_COCO if coco and not made_coco else ()), *_numbered_samples(output, samples)]
    if name := next((name for name in names if exists(f"{output}/{name}") and not is_own(name, output)), ""):
        raise OutputError(
            f"output {output}: {name} there is not of this program and would be replaced; move it, or give another folder"
        )


def is_own(name: str, output: str) -> bool:
    """Whether this program wrote what stands beside rows under a name: by its content, or by the summary that lists it."""
    if name == SUMMARY:
        content = read_file(f"{output}/{SUMMARY}")
        return not content.strip(b"\0") or content.startswith(_SUMMARY_BEGINS) or _is_summary(content)
    summary = read_summary(output)
    if name in _COCO:
        return bool(summary.get("config", {}).get("write", {}).get("coco"))
    if summary and name in (REPORT, *summary.get("samples", ())):
        return True
    with open_part(f"{output}/{name}", 0, _MARK_BYTES) as file:
        beginning = file.read(_MARK_BYTES)
    return not beginning or MADE_BY in beginning


def _is_summary(content: bytes) -> bool:
    try:
        plain = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(plain, dict) and {"images", "config", "mode"} <= plain.keys()


def _numbered_samples(output: str, samples: int) -> Iterator[str]:
    """The pictures that have a number which a run gives to its own samples."""
    for path in list_files(f"{escape_glob(output)}/{SAMPLES}/*") if samples else ():
        name = path[len(output) + 1 :]
        numbered = re.match(rf"{SAMPLES}/(\d{{3,9}})-[\w.-]*\.jpg$", name)
        if numbered and int(numbered[1]) <= samples:
            yield name


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
        there = [name for name in names if f"{output}/{name}" in generations and is_own(name, output)]
        move_if_generation_match({f"{output}/{name}": f"{earlier}/{name}" for name in there}, generations)


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
    there = {path.removeprefix(f"{output}/"): generation for path, generation in generations.items()}
    return {name: there[name] for name in there if name in stale - {*_COCO} or is_own(name, output)}
