"""How a job ends, in every mode: summary, report and samples; one line for a failure; exit codes; what signals do."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline import errors
from pipeline.config import WriteConfig
from pipeline.config.secrets import masked_text
from pipeline.errors import UserError
from pipeline.report.annotate import annotate, can_be_drawn
from pipeline.report.page import render_report
from pipeline.stats.summary import JobStats, RunFacts, left_out_line, summarise, to_json
from pipeline.storage import cancellation
from pipeline.storage.beside import make_way
from pipeline.storage.files import delete_files, write_file
from pipeline.storage.other_runs import remove_dead
from pipeline.storage.results import earlier_samples, sample_name
from pipeline.storage.staging import output_of, remove, staging_of

DONE, FAILED = 0, 1


@dataclasses.dataclass(frozen=True)
class JobReport:
    """What to make of a job's figures.

    Attributes:
      results: Folder of its files.
      write: How many samples go to files and to the report.
      max_dead_share: The job failed when more of its images than this share did; a stream's never count as its own failure.
      name: The name that the files of its rows carry; empty: the run's own.
      adds: Whether it adds to what others have left there, so that this is kept.
    """

    results: str
    write: WriteConfig
    max_dead_share: float = 1.0
    name: str = ""
    adds: bool = True

    def finish(self, stats: JobStats, facts: RunFacts, run: str, notes: Sequence[str] = ()) -> int:
        """Writes summary, report and samples, says in a few lines how it went, and returns the exit code.

        Args:
          stats: What was counted.
          facts: What the launcher knows.
          run: Name of the run; the summary carries it.
          notes: Lines for the user.
        """
        summary = summarise(stats, facts)
        self._write(summary, stats, run)
        self._say(summary, [*notes, facts.canary.line()] if facts.canary else notes)
        return self._judge(summary["images"], stats)

    def files(self, rows: bool = True) -> list[str]:
        """What is written, for a person; `rows`: whether an image was read, or is expected to be."""
        optional = {
            "detections/*.jsonl": rows,
            "dead_letters/*.jsonl": rows,
            "detections/*.parquet": rows and self.write.parquet,
            "detections/*.tfrecord": rows and self.write.tfrecord,
            "coco/": rows and self.write.coco,
            "samples/": rows and self.write.samples > 0,
        }
        return ["report.html", "summary.json", *(name for name, wanted in optional.items() if wanted)]

    def _write(self, summary: dict[str, Any], stats: JobStats, run: str) -> None:
        samples = [image for _, image in stats.samples if can_be_drawn(image)]
        staging = staging_of(self.results, run)
        named = {sample_name(number, image.ref.uri): image for number, image in enumerate(samples[: self.write.samples], 1)}
        if self.adds:
            make_way(self.results, run)
        else:
            delete_files(f"{self.results}/{name}" for name in earlier_samples(self.results, run) if name not in named)
        for name, image in named.items():
            write_file(f"{self.results}/{name}", annotate(image), staging)
        examples = [row for rows in stats.dead_examples.values() for row in rows]
        report = render_report(summary, samples[: self.write.report_samples], examples)
        write_file(f"{self.results}/report.html", report.encode("utf-8", "backslashreplace"), staging)
        told = {"run": run, "name": self.name or run, "samples": list(named)}
        write_file(f"{self.results}/summary.json", to_json({**summary, **told}), staging)

    def _say(self, summary: dict[str, Any], notes: Sequence[str]) -> None:
        images = summary["images"]
        before = f" ({summary['done_before']} of them done before)" if summary["done_before"] else ""
        submission = f" and {summary['submission_seconds']:.1f} s of submission" if "submission_seconds" in summary else ""
        print(
            f"{images['read']} images read: {images['detected']} detected, {images['dead']} dead, {images['skipped']} skipped"
            f"{before}; {summary['detections']} objects; {summary['images_per_second']:.1f} images/s in "
            f"{summary['wall_seconds']:.1f} s after {summary['startup_seconds']:.1f} s of start-up{submission}"
        )
        for reason, count in summary["dead_by_reason"].items():
            print(f"  dead: {count} {reason}")
        if kinds := summary["skipped_by_kind"]:
            print(f"  skipped: {left_out_line(kinds)}")
        if "mended" in summary:
            print(f"  mended: {summary['mended']} of {images['read'] - images['skipped']} that had failed")
        for note in notes:
            print(f"  {note}")
        files = ", ".join(self.files(rows=images["read"] > 0))
        print(f"results of model {_named(summary['model'])} in {self.results}: {files}")

    def _judge(self, images: dict[str, int], stats: JobStats) -> int:
        lost = images["read"] - images["detected"] - images["dead"] - images["skipped"]
        if lost:
            print(f"error: {lost} images have no result; this is a defect of the pipeline", file=sys.stderr)
            return FAILED
        if images["dead"] > self.max_dead_share * max(images["read"], 1):
            print(
                f"error: {images['dead']} of {images['read']} images failed, more than max_dead_share = "
                f"{self.max_dead_share:g}{_commonest(stats)}; see {self.results}/dead_letters",
                file=sys.stderr,
            )
            return FAILED
        return DONE


def _named(model: Mapping[str, Any]) -> str:
    """A run's model by its name and versions; by its path where no image has met it."""
    versions = ", ".join(model.get("images_by_version", [model["version"]]))
    return f"{model['name']} {versions}".strip() or str(model["path"])


def _commonest(stats: JobStats) -> str:
    """What most of the dead images died of, with an example: where storage is gone, that is all there is to know."""
    ((_, reason), count) = stats.dead.most_common(1)[0]
    example = next((row["message"] for row in stats.dead_examples.get(reason, ())), reason)
    return f"; {count} of them {reason}, such as: {' '.join(example.split())[:300]}"


def clean_up(staging: str) -> None:
    """Removes the unfinished files of a run that is done, and of killed ones; it has not failed because some are left."""
    try:
        remove_dead(output_of(staging), but=staging)
        remove(staging)
    except Exception as err:  # noqa: BLE001  whatever storage says
        print(f"unfinished files are left in {output_of(staging)}: {last_line(err)}", file=sys.stderr)


def failed(err: Exception) -> int:
    """Says in one line why a job failed; returns the exit code.

    Raises:
      UserError: It failed for what the user gave it.
      KeyboardInterrupt: It was stopped.
    """
    if isinstance(err, UserError):
        raise err
    _raise_as_it_was(err)
    logging.getLogger(__name__).info("the job failed", exc_info=err)
    print(f"error: the job failed: {masked_text(last_line(err))}", file=sys.stderr)
    return FAILED


def _raise_as_it_was(err: Exception) -> None:
    """Beam's runners hand an exception back as text; one of ours, and the one of Ctrl-C, is raised again as itself."""
    if last_line(err).startswith("KeyboardInterrupt"):
        raise KeyboardInterrupt from err
    found = re.findall(r"^pipeline\.errors\.(\w+): (.*?)(?: \[while running .*)?$", str(err), re.MULTILINE)
    for name, message in found[-1:]:
        raise getattr(errors, name, UserError)(message) from err


def last_line(err: Exception) -> str:
    """The line of a runner's error that says what happened."""
    lines = [line.strip() for line in str(err).splitlines() if re.search(r"\w", line)]
    return (lines[-1] if lines else type(err).__name__)[:500]


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """While this lasts, SIGTERM and SIGINT stop the job by a KeyboardInterrupt; once it publishes, they only say that it ends."""

    def stop() -> None:
        if cancellation.stop():
            raise KeyboardInterrupt
        _say_at_once(_PUBLISHING)

    with cancellation.one_run(), _signals_call(stop):
        yield


@contextlib.contextmanager
def finished_by_signals(end: Callable[[], None]) -> Iterator[None]:
    """While this lasts, the first SIGTERM or SIGINT calls `end`, and the job finishes what it has; the next ends the process."""

    def stop() -> None:
        _say_at_once("stopping: finishing what is in hand")
        end()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    with _signals_call(stop):
        yield


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PUBLISHING = "stopping: the results get their names, then the job ends"


@contextlib.contextmanager
def _signals_call(act: Callable[[], None]) -> Iterator[None]:
    before = {number: signal.signal(number, lambda _number, _frame: act()) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former or signal.SIG_DFL)  # None: set by other than Python


def _say_at_once(text: str) -> None:
    os.write(2, f"{text}\n".encode())  # a handler may interrupt a `print`, and another one within would raise RuntimeError
