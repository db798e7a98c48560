"""The end of a job, in every mode: reports, the one line for a failure, exit codes, signals."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from pipeline import errors
from pipeline.config import WriteConfig
from pipeline.errors import DEAD, DONE, FAILED, SIGNALS, RunnerError, UserError, signals_call
from pipeline.launch.folder_report import page_of_folder
from pipeline.log_lines import console, plural, say, write_unlocked
from pipeline.records import row_bytes
from pipeline.report.annotate import annotate
from pipeline.report.page import render_report
from pipeline.results.layout import EXPORTS, REPORT, SUMMARY, is_sample_name, read_summary, sample_name
from pipeline.results.run import Run, remove_abandoned
from pipeline.stats.job_stats import JobStats
from pipeline.stats.process import PROCESS
from pipeline.stats.samples import REPORT_SAMPLES, chosen
from pipeline.stats.summary import RunFacts, left_out_line, summarise
from pipeline.storage.cloud import google_error
from pipeline.storage.files import delete_files, write_file
from pipeline.storage.store import is_transient_error, retried
from pipeline.storage.stores import store_of

_FRESH_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class JobReport:
    """Makes the reports of a job and its exit code.

    Attributes:
      run: The run.
      write: How many samples go to files and to the report.
      max_dead_share: The exit code is `DEAD` if a larger share of the images that were tried, or of all images of the input, has
        only a dead letter; a stream never ends with it.
    """

    run: Run
    write: WriteConfig
    max_dead_share: float = 1.0

    def finish(self, stats: JobStats, facts: RunFacts) -> int:
        """Writes summary, report and samples, prints the outcome in a few lines, and returns the exit code."""
        summary = summarise(stats, facts)
        PROCESS.summary = {"run": self.run.name, **summary}
        self._write(summary, stats)
        say(self._outcome(summary, stats.canary.line() if stats.canary else ""))
        return self._judge(summary["images"], stats, is_replay="recovered" in summary)

    def _write(self, summary: dict[str, Any], stats: JobStats) -> None:
        """Writes the reports to `runs/<run>/`, then their copies to the top if the run has tried any image; the summary last."""
        wanted = max(self.write.samples, REPORT_SAMPLES)
        drawn = [(sample, jpeg) for sample in chosen(stats.pictures, wanted) if (jpeg := annotate(sample[1]))]
        contents = {
            sample_name(number, image.ref.uri): jpeg for number, ((_, image), jpeg) in enumerate(drawn[: self.write.samples], 1)
        }
        samples = list(contents)
        disagreements = stats.canary.pictures() if stats.canary else []
        report = render_report(summary, [sample for sample, _ in drawn[:REPORT_SAMPLES]], stats.dead_examples, disagreements)
        contents[REPORT] = report.encode("utf-8", "backslashreplace")
        contents[SUMMARY] = row_bytes({**summary, "run": self.run.name, "samples": samples}, indent=2) + b"\n"
        earlier = read_summary(self.run.output)
        stale = [each for each in earlier.get("samples", ()) if each not in contents and is_sample_name(each)]
        has_tried = summary["images"]["read"] > summary["images"]["skipped"] or not earlier
        is_newest = has_tried and not _is_fresh(f"{self.run.output}/{SUMMARY}")
        for each, content in contents.items():
            write_file(f"{self.run.reports}/{each}", content, self.run.folder)
        if is_newest:
            contents[REPORT] = self._page_of_folder(summary) or contents[REPORT]
            for each, content in contents.items():
                write_file(f"{self.run.output}/{each}", content, self.run.folder)
        delete_files(f"{self.run.output}/{each}" for each in stale if is_newest)

    def _page_of_folder(self, summary: dict[str, Any]) -> bytes:
        """The page of all current rows; empty where these cannot be read now, which makes no job fail whose rows are there."""
        try:
            return page_of_folder(self.run.output, {**summary, "run": self.run.name})
        except (UserError, ValueError, OSError) as err:  # a row of another form, or storage
            console.warning("report.html is of this run alone: %s; detect-objects report makes that of the folder", err)
            return b""

    def _outcome(self, summary: dict[str, Any], canary: str) -> Iterator[str]:
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

    def _judge(self, images: dict[str, int], stats: JobStats, *, is_replay: bool) -> int:
        lost = images["read"] - images["detected"] - images["dead"] - images["skipped"]
        if lost:
            console.error("%s images have no result; this is a defect of the pipeline", lost)
            return FAILED
        for failed, of_images in stats.dead_shares[: 1 if is_replay else 2]:  # a replay reads nothing but what has failed
            if failed > self.max_dead_share * of_images:
                before = f" ({failed - stats.failed} of them before)" if failed > stats.failed else ""
                console.error(
                    "%s of %s failed%s, more than max_dead_share = %g%s; see %s/dead_letters",
                    *(failed, plural(of_images, "image"), before, self.max_dead_share, _commonest(stats), self.run.output),
                )
                return DEAD
        return DONE


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
    ((_, reason), count) = stats.dead.most_common(1)[0]
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
        console.info("unfinished files are left in %s: %s", output, last_line(err))


def failed(err: Exception, output: str = "") -> NoReturn:
    """Raises what made a job fail; Beam's runners return exceptions of its steps as text.

    Args:
      err: What a runner raised.
      output: Where the job writes, for the line about a full disk.

    Raises:
      UserError: The job failed for the user's input.
      KeyboardInterrupt: The job was stopped.
      RuntimeError: It failed for another reason, which the message has in one line.
    """
    if PROCESS.stopped or last_line(err).startswith("KeyboardInterrupt"):
        raise KeyboardInterrupt from err
    if isinstance(err, UserError):
        raise err
    found = re.findall(r"^pipeline\.errors\.(\w+): (.*?)(?: \[while running .*)?$", str(err), re.MULTILINE)
    for name, message in found[-1:]:
        raise getattr(errors, name, UserError)(message) from err
    if errors.is_full(err):
        raise errors.FullError.of(err, f"output {output}" if output else "") from err
    raise RuntimeError(last_line(err)) from err


def last_line(err: Exception) -> str:
    """The line of a runner's error that has the cause."""
    lines = [line.strip() for line in str(err).splitlines() if re.search(r"\w", line)]
    return (lines[-1] if lines else type(err).__name__)[:500]


@contextlib.contextmanager
def stopped_by_signals(output: str = "") -> Iterator[None]:
    """While this lasts, the first SIGTERM or SIGINT stops the job by a KeyboardInterrupt; the next ends the process.

    For what else it raises, see `failed`.
    """

    def stop() -> None:
        PROCESS.stopped = True
        _next_signal_ends_the_process()  # a store that is away may keep the job for minutes
        raise KeyboardInterrupt

    with signals_call(stop):
        try:
            yield
        except Exception as err:  # noqa: BLE001  the user gets one line for any error
            failed(err, output)
        finally:
            PROCESS.stopped = False


@contextlib.contextmanager
def finished_by_signals(end: Callable[[], None]) -> Iterator[None]:
    """While this lasts, the first SIGTERM or SIGINT calls `end`, and the job finishes what it has; the next ends the process."""

    def stop() -> None:
        end()
        _next_signal_ends_the_process()
        write_unlocked("stopping: finishing in-flight images")

    with signals_call(stop):
        yield


@contextlib.contextmanager
def submitting(runner: str) -> Iterator[None]:
    """While a job is handed to a service, a signal is noted, and what the service refuses is a wrong command.

    Raises:
      RunnerError: The service refuses the job.
    """
    from google.api_core.exceptions import ClientError

    with signals_noted("the job is being submitted, and is ended once its id is there"):
        try:
            yield
        except ClientError as err:
            if is_transient_error(google_error(err)):
                raise
            said = re.sub(r"^[A-Z]+ http\S+: ", "", str(err.message))
            raise RunnerError(f"{runner} refuses the job: {' '.join(said.split())[:500]}") from err


@contextlib.contextmanager
def signals_noted(what: str) -> Iterator[None]:
    """While this lasts, the first SIGTERM or SIGINT is only noted, and comes again at its end; the next ends the process.

    Args:
      what: What cannot be left halfway, for the person who waits for it.
    """
    noted: list[int] = []

    def note(number: int, _frame: object) -> None:
        noted.append(number)
        _next_signal_ends_the_process()
        write_unlocked(f"stopping: {what}")

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if noted:
            os.kill(os.getpid(), noted[0])


def _next_signal_ends_the_process() -> None:
    """The kernel ends it, except the first process of a container, to which it gives no signal that has no handler."""
    for number in SIGNALS:
        signal.signal(number, _end_process if os.getpid() == 1 else signal.SIG_DFL)


def _end_process(number: int, _frame: object) -> None:
    os._exit(128 + number)
