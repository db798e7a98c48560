"""The last step of a job: summary, report, samples, exports and outcome.

A batch job's graph ends with `conclude`, which gets the statistics of all rows. A runner may repeat that step, so it does nothing
where the run has an outcome, and writes the same files where it has none yet. In a stream each process that writes windows of
rows renews summary and report after one, at most once a minute; a worker elsewhere also does when its process ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from pipeline.config import WriteConfig
from pipeline.detect.load_detector import DetectorSpec, detector_in_use
from pipeline.errors import DEAD, DONE, FAILED, InputError, UserError
from pipeline.exports.exports import export
from pipeline.failures import one_line
from pipeline.log_lines import console, plural
from pipeline.outcome.folder_report import page_of_folder
from pipeline.outcome.outcome import Outcome, outcome_of
from pipeline.process import PROCESS
from pipeline.records import row_bytes
from pipeline.report.annotate import picture
from pipeline.report.page import render_report
from pipeline.results.completion import RowVersion
from pipeline.results.layout import EXPORTS, REPORT, SUMMARY, is_sample_name, read_summary, sample_name
from pipeline.results.run_folder import Run, remove_abandoned
from pipeline.results.wanted import Wanted
from pipeline.stats.job_stats import JobStats
from pipeline.stats.samples import REPORT_SAMPLES, chosen
from pipeline.stats.summary import RunFacts, left_out_line, summarise
from pipeline.stats.worker_reports import WorkerReports, at_end
from pipeline.storage.files import delete_files, write_file
from pipeline.storage.store import retried
from pipeline.storage.stores import store_of

_FRESH_SECONDS = 5.0
CANARY_SECONDS = 5.0  # a job's end waits this long for the canary's images in flight
_RENEW_SECONDS = 60.0
_log = logging.getLogger(__name__)
_renewed: dict[str, float] = {}  # when this process has last renewed the reports of a run, in monotonic seconds
_renewed_at_end: set[str] = set()  # runs whose reports this process renews when it ends


@dataclasses.dataclass(frozen=True)
class Conclusion:
    """What the end of a run takes, wherever it comes.

    Attributes:
      run: The run.
      facts: What its launcher knew.
      model: Name and version of a batch job's model, as its rows have them.
    """

    run: Run
    facts: RunFacts
    model: tuple[str, str] = ("", "")

    @property
    def write(self) -> WriteConfig:
        """Which files the job writes."""
        of_job = self.facts.config["write"]
        return WriteConfig(export=tuple(of_job["export"]), samples=of_job["samples"])

    def of_rows(self, stats: JobStats) -> Outcome:
        """Ends a batch job, given the statistics of its rows.

        Raises:
          InputError: Its input names no image, or an export cannot hold its rows.
          OutputError: A file cannot be written.
        """
        config = self.facts.config
        if not (stats.named or config["allow_empty"]):
            raise names_no_image(config["input"])
        ended = self.reported(stats)
        return msgspec.structs.replace(ended, lines=(*ended.lines, *self._exported(stats)))

    def of_reports(self) -> Outcome:
        """Ends a stream that ran elsewhere, given what its workers have reported."""
        stats = self._reports().last()
        if stats == JobStats():
            return Outcome(DONE, lines=("no worker has reported its figures; the runner has them, as Beam metrics",))
        return self.reported(stats)

    def renew(self, stats: Callable[[], JobStats] | None = None) -> None:
        """Writes the reports of a stream that goes on, at most once a minute in each process.

        Args:
          stats: Gives what has been counted; default: what workers elsewhere have reported.
        """
        if time.monotonic() - _renewed.get(self.run.name, float("-inf")) >= _RENEW_SECONDS:
            self.renew_now(stats)

    def renew_at_end(self) -> None:
        """Renews the reports once more when this process ends."""
        if self.run.name not in _renewed_at_end:
            _renewed_at_end.add(self.run.name)
            at_end.append(self.renew_now)

    def renew_now(self, stats: Callable[[], JobStats] | None = None) -> None:
        """Writes the reports of a stream that goes on, or whose worker ends; `stats` as `renew` has it."""
        _renewed[self.run.name] = time.monotonic()
        try:
            if self.run.is_open():
                counted = (stats or self._reports().now)()
                self._write_own(self._contents(self._summary(counted), counted))
        except Exception as err:  # noqa: BLE001  the next window renews them
            _log.warning("summary and report are not renewed (%s)", one_line(err))

    def reported(self, stats: JobStats) -> Outcome:
        """Writes summary, report and samples; returns the outcome in a few lines."""
        summary = self._summary(stats)
        self._write(summary, stats)
        lines = (*self._lines(summary, stats.canary.line() if stats.canary else ""),)
        return Outcome(*self._judged(summary["images"], stats, is_replay="recovered" in summary), lines)

    def _reports(self) -> WorkerReports:
        return WorkerReports(self.run, self._samples, streaming=True)

    @property
    def _samples(self) -> int:
        return max(self.write.samples, REPORT_SAMPLES)

    def _summary(self, stats: JobStats) -> dict[str, Any]:
        return summarise(stats, self.facts.ended(stats.began, time.time()))

    def _write(self, summary: dict[str, Any], stats: JobStats) -> None:
        """Writes the reports to `runs/<run>/`, then their copies to the top if the run has tried any image; the summary last."""
        contents, output = self._contents(summary, stats), self.run.output
        earlier = read_summary(output)
        stale = [each for each in earlier.get("samples", ()) if each not in contents and is_sample_name(each)]
        has_tried = summary["images"]["read"] > summary["images"]["skipped"] or not earlier
        is_newest = has_tried and not _is_fresh(f"{output}/{SUMMARY}")
        self._write_own(contents)
        if is_newest:
            contents[REPORT] = self._page_of_folder(summary) or contents[REPORT]
            for each, content in contents.items():
                write_file(f"{output}/{each}", content, self.run.folder)
        delete_files(f"{output}/{each}" for each in stale if is_newest)

    def _write_own(self, contents: Mapping[str, bytes]) -> None:
        for each, content in contents.items():
            write_file(f"{self.run.reports}/{each}", content, self.run.folder)

    def _contents(self, summary: dict[str, Any], stats: JobStats) -> dict[str, bytes]:
        """The files of the run's reports by name, the summary last."""
        drawn = [(sample, jpeg) for sample in chosen(stats.pictures, self._samples) if (jpeg := picture(sample[1]))]
        contents = {
            sample_name(number, image.ref.uri): jpeg for number, ((_, image), jpeg) in enumerate(drawn[: self.write.samples], 1)
        }
        samples = list(contents)
        disagreements = stats.canary.pictures() if stats.canary else []
        report = render_report(summary, [sample for sample, _ in drawn[:REPORT_SAMPLES]], stats.dead_examples, disagreements)
        contents[REPORT] = report.encode("utf-8", "backslashreplace")
        contents[SUMMARY] = row_bytes({**summary, "run": self.run.name, "samples": samples}, indent=2) + b"\n"
        return contents

    def _page_of_folder(self, summary: dict[str, Any]) -> bytes:
        """The page of all current rows; empty where these cannot be read now, which makes no job fail whose rows are there."""
        try:
            return page_of_folder(self.run.output, {**summary, "run": self.run.name})
        except (UserError, ValueError, OSError) as err:  # a row of another form, or storage
            console.warning("report.html is of this run alone: %s; detect-objects report makes that of the folder", err)
            return b""

    def _lines(self, summary: dict[str, Any], canary: str) -> Iterator[str]:
        images, output = summary["images"], self.run.output
        before = f" ({summary['done_before']} of them done before)" if summary["done_before"] else ""
        submission = f" and {summary['submission_seconds']:.1f} s of submission" if "submission_seconds" in summary else ""
        yield (
            f"{plural(images['read'], 'image')} read: {images['detected']} detected, {images['dead']} dead, "
            f"{images['skipped']} skipped{before}; {plural(summary['detections'], 'object')}; "
            f"{summary['images_per_second']:.1f} images/s in {summary['wall_seconds']:.1f} s "
            f"after {summary['startup_seconds']:.1f} s of start-up{submission}"
        )
        if summary["done_before"] and images["read"] == images["skipped"]:
            yield f"nothing is new: each image has a row or a permanent dead letter of this model and these settings in {output}"
            return
        for reason, count in summary["dead_by_reason"].items():
            yield f"  dead: {count} {reason}"
        if kinds := summary["skipped_by_kind"]:
            yield f"  skipped: {left_out_line(kinds)}"
        for warning in summary.get("warnings", ()):
            yield f"  warning: {warning}"
        if "recovered" in summary:
            yield f"  recovered {summary['recovered']} of {plural(images['read'] - images['skipped'], 'failed image')}"
            if "not_allowed" in summary["dead_by_reason"]:
                yield "  not allowed are images outside of the folders that --input and --allow-uri-prefix name"
        if canary:
            yield f"  {canary}"
        files = ", ".join(names_of_files(self.write, images["detected"] > 0, images["dead"] > 0))
        yield f"results{_named(summary['model'])} in {output}: {files}"

    def _exported(self, stats: JobStats) -> Iterator[str]:
        """Exports what counts as done for this job, whichever run has made it."""
        if not self.write.export:
            return
        name, version = self.model
        version = version if {*stats.versions} <= {version} else ""  # of a job that changed its version
        wanted = Wanted(model=name, version=version, settings=RowVersion.of(self.facts.config).settings)
        done = export(self.run.output, self.write.export, wanted)
        yield from (f"  {note}" for note in done.notes)
        yield f"exported {plural(done.rows, 'row')}: {', '.join(done.files)}"

    def _judged(self, images: dict[str, int], stats: JobStats, *, is_replay: bool) -> tuple[int, str]:
        """The exit code, and an error where it is not 0."""
        lost = images["read"] - images["detected"] - images["dead"] - images["skipped"]
        if lost:
            return FAILED, f"{lost} images have no result; this is a defect of the pipeline"
        most = 1.0 if self.facts.streams else self.facts.config["max_dead_share"]
        for failed, of_images in stats.dead_shares[: 1 if is_replay else 2]:  # a replay reads nothing but what has failed
            if failed > most * of_images:
                before = f" ({failed - stats.failed} of them before)" if failed > stats.failed else ""
                of = f"{failed} of {plural(of_images, 'image')} failed{before}, more than max_dead_share = {most:g}"
                return DEAD, f"{of}{_commonest(stats)}; see {self.run.output}/dead_letters"
        return DONE, ""


def conclude(stats: JobStats, conclusion: Conclusion, spec: DetectorSpec) -> None:
    """Ends a batch job, given the statistics of its rows; does nothing if the run has an outcome.

    Args:
      stats: The statistics.
      conclusion: What the end takes.
      spec: What detects, in this process if the job ran here.

    Raises:
      KeyboardInterrupt: The job was stopped.
    """
    PROCESS.check_stopped()
    run = conclusion.run
    if not outcome_of(run):
        detector = None if conclusion.facts.is_elsewhere else detector_in_use(spec)
        if detector:
            conclusion = dataclasses.replace(conclusion, facts=conclusion.facts.ready(detector.ready_at))
        stats.take_model(detector.model_stats(CANARY_SECONDS) if detector else _model_of_workers(run))
        try:
            outcome = conclusion.of_rows(stats)
        except UserError as err:  # no repeat of this step changes it
            outcome = Outcome.of(err)
        outcome.keep(run)
    if conclusion.facts.is_elsewhere:
        run.remove_if_possible()
    clean_up(run.output)


def _model_of_workers(run: Run) -> JobStats:
    """Facts of the model in use, as workers have reported them; with the last figures of a canary."""
    reports = WorkerReports(run)
    found = reports.now()
    return reports.last() if found.canary else found


def names_no_image(patterns: Sequence[str]) -> InputError:
    """The error of a job whose input names nothing."""
    return InputError(f"input {', '.join(patterns)}: names no image")


def names_of_files(write: WriteConfig, detected: bool = True, dead: bool = True) -> list[str]:
    """The names of the files that a job writes, for a person, if any image is `detected`, or `dead`."""
    optional = {
        "detections/": detected,
        "dead_letters/": dead,
        f"{EXPORTS}/": detected and bool(write.export),
        "samples/": detected and write.samples > 0,
    }
    return [REPORT, SUMMARY, *(name for name, wanted in optional.items() if wanted)]


def _named(model: Mapping[str, Any]) -> str:
    """A run's model by name and versions; empty if the run has detected in no image."""
    versions = ", ".join(model.get("images_by_version", [model["version"]]))
    return f" of model {model['name']} {versions}" if model["name"] else ""


def _commonest(stats: JobStats) -> str:
    """The most common reason of failed images, with an example: if storage is gone, this is all there is to know."""
    if not stats.dead:
        return ""
    reason, count = stats.dead_by_reason.most_common(1)[0]
    example = next((letter.message for letter in stats.dead_examples.get(reason, ())), reason)
    return f"; {count} of them {reason}, such as: {' '.join(example.split())[:300]}"


def _is_fresh(path: str) -> bool:
    """Whether an object was written in the last seconds: it takes one write a second, and many jobs may end at once."""
    if "://" not in path:
        return False
    with contextlib.suppress(FileNotFoundError):
        return retried(store_of(path).age)(path)[0] < _FRESH_SECONDS
    return False


def clean_up(output: str) -> None:
    """Removes what killed runs have left unfinished; an error here does not fail the job."""
    try:
        remove_abandoned(output)
    except Exception as err:  # noqa: BLE001  any error of storage
        console.info("unfinished files are left in %s: %s", output, one_line(err))
