"""Reports of runs: summary, report, samples, COCO files. Which of them are this program's, and which ones a run replaces."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Collection, Iterator

from pipeline.errors import OutputError
from pipeline.results.layout import (
    COCO_IMAGES,
    COCO_RESULTS,
    MADE_BY,
    REPORT,
    RUNS,
    SAMPLES,
    SUMMARY,
    Settings,
    is_replaceable,
    list_rows,
    read_summary,
    run_of_rows,
)
from pipeline.storage.files import exists, generations_of, list_files, open_part, read_file
from pipeline.storage.globs import escape_glob

_MARK_BYTES = 4096  # the mark is in the first bytes of a page or picture
_SUMMARY_BEGINS = b'{\n  "images": {'
_COCO = (COCO_RESULTS, COCO_IMAGES)


def check_reports(output: str, samples: int = 0, coco: bool = False, name: str = "") -> None:
    """Makes sure that the reports of a run replace no file that is not this program's, neither at the top nor in `runs/`.

    Args:
      output: The results folder.
      samples: How many samples the run writes.
      coco: Whether it writes COCO files.
      name: The name of the run in `runs/`; empty: one that no run has had.

    Raises:
      OutputError: It would.
    """
    for folder in (output, f"{output}/{RUNS}/{name}") if name else (output,):
        names = [SUMMARY, REPORT, *(_COCO if coco else ()), *_numbered_samples(folder, samples)]
        if other := next((each for each in names if exists(f"{folder}/{each}") and not is_own_report(each, folder)), ""):
            raise OutputError(
                f"output {output}: {f'{folder}/{other}'[len(output) + 1 :]} there is not of this program and would be replaced; "
                "move it, or give another folder"
            )


def is_own_report(name: str, output: str) -> bool:
    """Whether this program wrote a report: by its content, or by the summary that lists it."""
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
    """The pictures in `samples/` with a number that a run gives to its own."""
    for path in list_files(f"{escape_glob(output)}/{SAMPLES}/*") if samples else ():
        name = path[len(output) + 1 :]
        numbered = re.match(rf"{SAMPLES}/(\d{{3,9}})-[\w.-]*\.jpg$", name)
        if numbered and int(numbered[1]) <= samples:
            yield name


def reports_in(folder: str) -> list[str]:
    """The names of this program's reports in a folder, the summary last: at the top of the results, or of one run in `runs/`."""
    samples = (name for name in read_summary(folder).get("samples", ()) if is_replaceable(name, folder))
    names = [*_COCO, REPORT, *samples, SUMMARY]
    there = generations_of(f"{folder}/{name}" for name in names)
    return [name for name in names if f"{folder}/{name}" in there and is_own_report(name, folder)]


def replaced_files(output: str, run: str, new: Collection[str], settings: Settings) -> dict[str, str]:
    """The files that a run deletes when it commits, by the rule in `layout`: their names, with their generations.

    Args:
      output: The results folder.
      run: The run.
      new: The names of the files that the run commits.
      settings: The run's settings: with `write.replace` it replaces all batch runs, with `only_new` not even its own command's.
    """
    replace = bool(settings.get("write", {}).get("replace"))
    gone = reports_in(output) if read_summary(output).get("run") != run else []
    if not settings.get("only_new"):
        names = {"", *map(run_of_rows, new)}
        gone += [name for name in list_rows(output).of_batch if name not in _COCO and (replace or run_of_rows(name) in names)]
        paths = list_files(f"{escape_glob(output)}/{RUNS}/*/{SUMMARY}")
        folders = [posixpath.dirname(path) for path in paths if replace or path.split("/")[-2] in names]
        gone += [f"{folder[len(output) + 1 :]}/{name}" for folder in folders for name in reports_in(folder)]
    generations = generations_of(f"{output}/{name}" for name in gone if name not in new and is_replaceable(name, output))
    return {path.removeprefix(f"{output}/"): generation for path, generation in generations.items()}
