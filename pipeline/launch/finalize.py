"""The end of a job, in every mode: reports, the one line for a failure, exit codes, signals."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline import errors
from pipeline.config import WriteConfig
from pipeline.errors import UserError
from pipeline.log_lines import say_at_once
from pipeline.records import DetectedImage
from pipeline.report.annotate import annotate, can_be_drawn
from pipeline.report.page import render_report
from pipeline.results import cancellation
from pipeline.results.layout import COCO_IMAGES, COCO_RESULTS, REPORT, RUNS, SUMMARY, sample_name
from pipeline.results.other_runs import remove_dead
from pipeline.results.reports import reports_in
from pipeline.results.run import Run
from pipeline.secrets import masked_text
from pipeline.stats.process import PROCESS
from pipeline.stats.samples import chosen
from pipeline.stats.summary import JobStats, RunFacts, left_out_line, summarise, to_json
from pipeline.storage.files import copy_file, delete_files, exists, write_file
from pipeline.write.formats import endings_of

DONE, FAILED = 0, 1


@dataclasses.dataclass(frozen=True)
class JobReport:
    """Makes the reports of a job and its exit code.

    Attributes:
      results: The results folder.
      write: How many samples go to files and to the report.
      max_dead_share: The job fails if a larger share of the images that it tried failed; a stream never fails for it.
      name: The name in the names of the job's files; empty: the run's own.
    """

    results: str
    write: WriteConfig
    max_dead_share: float = 1.0
    name: str = ""

    def finish(self, stats: JobStats, facts: RunFacts, run: str, notes: Sequence[str] = ()) -> int:
        """Writes summary, report and samples, prints the outcome in a few lines, and returns the exit code.

        A job that fails `max_dead_share` has committed nothing, so it writes none of them and replaces none.

        Args:
          stats: The job's statistics.
          facts: What the launcher knows.
          run: The run's name, for the summary.
          notes: Lines for the user.
        """
        summary = summarise(stats, facts)
        PROCESS.summary = {"run": run, **summary}
        committed = stats.dead_share <= self.max_dead_share
        if committed:
            self._write(summary, stats, run, facts.canary.pictures() if facts.canary else [])
        self._say(summary, [*notes, facts.canary.line()] if facts.canary else notes, committed)
        return self._judge(summary["images"], stats)

    def files(self, rows: bool = True) -> list[str]:
        """The names of the written files, for a person; `rows`: whether any image is read."""
        optional = {
            "detections/*.jsonl": rows,
            "dead_letters/*.jsonl": rows,
            **{f"detections/*.{ending}": rows for ending in endings_of(self.write)},
            "coco/": rows and self.write.coco,
            "samples/": rows and self.write.samples > 0,
        }
        return ["report.html", "summary.json", *(name for name, wanted in optional.items() if wanted)]

    def _write(
        self, summary: dict[str, Any], stats: JobStats, run: str, disagreements: Sequence[tuple[str, DetectedImage]]
    ) -> None:
        """Writes the reports to `runs/<run>/`, then their copies to the top."""
        wanted = max(self.write.samples, self.write.report_samples)
        samples = [(purpose, image) for purpose, image in chosen(stats.pictures, wanted) if can_be_drawn(image)]
        staging, name = Run(self.results, run).folder, self.name or run
        contents = {
            sample_name(number, image.ref.uri): annotate(image)
            for number, (_, image) in enumerate(samples[: self.write.samples], 1)
        }
        about = {"run": run, "name": name, "samples": list(contents)}
        examples = [row for rows in stats.dead_examples.values() for row in rows]
        shown = disagreements if self.write.report_samples else ()
        report = render_report(summary, samples[: self.write.report_samples], examples, shown)
        contents[REPORT] = report.encode("utf-8", "backslashreplace")
        contents[SUMMARY] = to_json({**summary, **about})
        own, coco = f"{self.results}/{RUNS}/{name}", (COCO_RESULTS, COCO_IMAGES)
        for folder in (own, self.results):
            stale = [each for each in reports_in(folder) if each not in contents and not (folder == own and each in coco)]
            delete_files(f"{folder}/{each}" for each in stale)
        for folder in (own, self.results):
            for each, content in contents.items():
                write_file(f"{folder}/{each}", content, staging)
        for each in filter(lambda each: exists(f"{own}/{each}"), coco):  # last: the summary says that these are no stranger's
            copy_file(f"{own}/{each}", f"{self.results}/{each}", staging)

    def _say(self, summary: dict[str, Any], notes: Sequence[str], committed: bool) -> None:
        images = summary["images"]
        before = f" ({summary['done_before']} of them done before)" if summary["done_before"] else ""
        submission = f" and {summary['submission_seconds']:.1f} s of submission" if "submission_seconds" in summary else ""
        print(
            f"{images['read']} images read: {images['detected']} detected, {images['dead']} dead, {images['skipped']} skipped"
            f"{before}; {summary['detections']} objects; {summary['images_per_second']:.1f} images/s in "
            f"{summary['wall_seconds']:.1f} s after {summary['startup_seconds']:.1f} s of start-up{submission}"
        )
        if summary["config"].get("only_new") and images["read"] == images["skipped"]:
            return
        for reason, count in summary["dead_by_reason"].items():
            print(f"  dead: {count} {reason}")
        if kinds := summary["skipped_by_kind"]:
            print(f"  skipped: {left_out_line(kinds)}")
        for warning in summary.get("warnings", ()):
            print(f"  warning: {warning}")
        if "mended" in summary:
            print(f"  mended: {summary['mended']} of {images['read'] - images['skipped']} that had failed")
        for note in notes:
            print(f"  {note}")
        if committed:
            files = ", ".join(self.files(rows=images["read"] > 0))
            print(f"results of model {_named(summary['model'])} in {self.results}: {files}")

    def _judge(self, images: dict[str, int], stats: JobStats) -> int:
        lost = images["read"] - images["detected"] - images["dead"] - images["skipped"]
        if lost:
            print(f"error: {lost} images have no result; this is a defect of the pipeline", file=sys.stderr)
            return FAILED
        if stats.dead_share > self.max_dead_share:
            print(
                f"error: {stats.failed} of {stats.detected + stats.failed} images failed, more than max_dead_share = "
                f"{self.max_dead_share:g}{_commonest(stats)}; nothing was committed",
                file=sys.stderr,
            )
            return FAILED
        return DONE


def _named(model: Mapping[str, Any]) -> str:
    """A run's model by name and versions; by its path if it has seen no image."""
    versions = ", ".join(model.get("images_by_version", [model["version"]]))
    return f"{model['name']} {versions}".strip() or str(model["path"])


def _commonest(stats: JobStats) -> str:
    """The most common reason of failed images, with an example: if storage is gone, this is all there is to know."""
    ((_, reason), count) = stats.dead.most_common(1)[0]
    example = next((row["message"] for row in stats.dead_examples.get(reason, ())), reason)
    return f"; {count} of them {reason}, such as: {' '.join(example.split())[:300]}"


def clean_up(run: Run) -> None:
    """Removes the unfinished files of this run, which is done, and of killed runs; an error here does not fail the job."""
    try:
        remove_dead(run.output, but=run)
        run.remove()
    except Exception as err:  # noqa: BLE001  any error of storage
        print(f"unfinished files are left in {run.output}: {last_line(err)}", file=sys.stderr)


def failed(err: Exception) -> int:
    """Prints in one line why a job failed; returns the exit code.

    Raises:
      UserError: The job failed for the user's input.
      KeyboardInterrupt: The job was stopped.
    """
    if isinstance(err, UserError):
        raise err
    _raise_as_it_was(err)
    logging.getLogger(__name__).info("the job failed", exc_info=err)
    print(f"error: the job failed: {masked_text(last_line(err))}", file=sys.stderr)
    return FAILED


def _raise_as_it_was(err: Exception) -> None:
    """Raises our exceptions and Ctrl-C's again as themselves; Beam's runners return exceptions as text."""
    if last_line(err).startswith("KeyboardInterrupt"):
        raise KeyboardInterrupt from err
    found = re.findall(r"^pipeline\.errors\.(\w+): (.*?)(?: \[while running .*)?$", str(err), re.MULTILINE)
    for name, message in found[-1:]:
        raise getattr(errors, name, UserError)(message) from err


def last_line(err: Exception) -> str:
    """The line of a runner's error that has the cause."""
    lines = [line.strip() for line in str(err).splitlines() if re.search(r"\w", line)]
    return (lines[-1] if lines else type(err).__name__)[:500]


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """While this lasts, SIGTERM and SIGINT stop the job by a KeyboardInterrupt; once it commits, they only print a line."""

    def stop() -> None:
        if not cancellation.stop():
            say_at_once(_COMMITTING)
        elif not cancellation.is_delayed():
            raise KeyboardInterrupt

    with cancellation.one_run(), _signals_call(stop):
        yield


@contextlib.contextmanager
def finished_by_signals(end: Callable[[], None]) -> Iterator[None]:
    """While this lasts, the first SIGTERM or SIGINT calls `end`, and the job finishes what it has; the next ends the process."""

    def stop() -> None:
        end()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        say_at_once("stopping: finishing what is in hand")

    with _signals_call(stop):
        yield


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_COMMITTING = "stopping: the results get their names, then the job ends"


@contextlib.contextmanager
def _signals_call(act: Callable[[], None]) -> Iterator[None]:
    before = {number: signal.signal(number, lambda _number, _frame: act()) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former or signal.SIG_DFL)  # None: set by another language than Python
