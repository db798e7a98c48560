"""Launches a batch job: checks input and output, loads the model, runs the graph, then writes the reports."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems

from pipeline import graph
from pipeline.config import Config
from pipeline.errors import BusyError, ConfigError, InputError
from pipeline.failures import FOR_GOOD
from pipeline.launch.dry_run import first_images, input_lines, model_lines, say, to_try, tried
from pipeline.launch.finalize import DONE, FAILED, JobReport, clean_up, failed, stopped_by_signals
from pipeline.launch.loading import detector_loading, detector_used, load_detector, model_known
from pipeline.launch.options import Job, checked_job
from pipeline.log_lines import of_run
from pipeline.monitoring.monitor import monitored
from pipeline.read.allowed import refusal
from pipeline.read.containers import is_container
from pipeline.read.list_images import NOT_ALLOWED, folders_in_manifests, folders_of, list_images, resolved
from pipeline.read.manifests import is_manifest
from pipeline.read.only_new import CompletedKeys, done_since, has_any
from pipeline.read.source import Source
from pipeline.records import ImageRef
from pipeline.results.cancellation import begin_commit, stop_from_thread
from pipeline.results.claims import EVERYTHING
from pipeline.results.completion import CompletionRule, Provenance
from pipeline.results.layout import check_output, is_of_stream
from pipeline.results.lease import leased
from pipeline.results.ledger import list_files_of_rows
from pipeline.results.other_runs import take_over_killed
from pipeline.results.resume_points import resume_points_of
from pipeline.results.run import Run, fence
from pipeline.results.write_policy import run_name, same_work
from pipeline.stats import progress
from pipeline.stats.summary import JobStats, RunFacts, merge_stats
from pipeline.stats.worker_reports import WorkerReports
from pipeline.storage.spill_files import SpillFile
from pipeline.write.sink import Sink
from pipeline.write.spill_rows import RowsResumePoint, Shard
from pipeline.write.write_files import read_written


def prepare(config: Config, beam_flags: Sequence[str], command: str, started_at: float) -> Job:
    """Checks flags and input before anything takes time.

    Raises:
      UserError: A flag or an input is wrong.
    """
    config = dataclasses.replace(config, output=config.output.rstrip("/") or "/")
    if config.retry_dead:
        config = dataclasses.replace(_allowing_inputs(config), only_new=True, allow_empty=True, input=(), dates="")
    if config.only_new and config.write.replace:
        raise ConfigError("only_new and replace: expected one of them, since the one adds to what the other removes")
    job = checked_job(config, beam_flags, command, started_at)
    FileSystems.set_options(job.options)
    graph.source_of(config).check()
    return dataclasses.replace(job, resolved_input=tuple(resolved(config.patterns())))


def _allowing_inputs(config: Config) -> Config:
    """The job, with permission for all that its dead letters may name: the folders of its inputs, and its output."""
    patterns = [pattern for patterns in config.patterns().values() for pattern in patterns]
    folders = (*config.stream.allow_uri_prefix, *folders_of(patterns), *folders_in_manifests(patterns), config.output)
    return dataclasses.replace(config, stream=dataclasses.replace(config.stream, allow_uri_prefix=folders))


def show_plan(job: Job) -> int:
    """Dry run: prints what a run would do, what it detects in a few images, and what is wrong; writes nothing."""
    config = job.config
    for sink in graph.sinks(config, Run.new(config.output), settings=job.settings):
        sink.check(write=False)
    detector = load_detector(config)
    patterns = [pattern for patterns in config.patterns().values() for pattern in patterns]
    left_out: Counter[str] = Counter()
    allowed = (*config.stream.allow_uri_prefix, *folders_of(patterns))
    found = list_images(patterns, config.output, lambda kind: left_out.update([kind]), allowed)
    refs = {ref.uri: ref for ref in found}
    if config.retry_dead:
        refs = {ref.uri: ref for ref in graph.dead_letter_replay(config).refs_in_results(config.output)}
    if not (refs or config.allow_empty):
        raise _nothing(config)
    done = _done(config, (detector.model.metadata.name, detector.model.version))
    known: Container[ImageRef] = CompletedKeys.of(config.output, done) if done else ()
    new = sorted((ref for ref in refs.values() if ref not in known), key=lambda ref: ref.uri)
    say(input_lines(new, len(refs) - len(new), left_out))
    say(f"         from {pattern}" for pattern in patterns if is_container(pattern) or is_manifest(pattern))
    say([f"         of {config.dates}, {config.time_zone}"] if config.dates else [])
    say(model_lines(detector, config))
    say([f"runner   {config.runner}", f"output   {config.output} ({', '.join(_ending(config).files())})"])
    refused = [ref.uri for ref in new if ref.size_bytes == NOT_ALLOWED]
    say(f"wrong?   {refusal(uri, allowed)}" for uri in refused[:1])
    succeeded = tried(detector, first_images(to_try(ref.location for ref in new if ref.uri not in refused), config))
    say(["dry run: nothing was written"])
    if not succeeded:
        print("error: none of the images that were tried can be detected in; see their dead letters above", file=sys.stderr)
    return DONE if succeeded else FAILED


def run(job: Job) -> int:
    """Runs the job; returns the exit code."""
    config, this_run = job.config, Run.new(job.config.output)
    of_run(this_run.name)
    with stopped_by_signals():
        try:
            model = model_known(job)
            if job.template:
                steps = _steps(job, this_run, model, job.started_at)
                steps.check()
                job.write_template(steps.build)
                return DONE
            check_output(config.output)
            with _lease(job, this_run):
                # the start is taken after the lease, so two runs of one command never have the same
                return _run_to_end(job, this_run, model, time.time())
        except BusyError as busy:
            if config.when_busy != "skip":
                raise
            say([f"skipped: {busy}; nothing was done"])
            return DONE
        except Exception as err:  # noqa: BLE001  the user gets one line for any error
            return failed(err)


class _Steps(NamedTuple):
    """The ends of a job's graph.

    Attributes:
      config: The job's settings, as its steps have them.
      source: The source of images.
      sinks: The destinations of results.
      name: The name in the names of files.
    """

    config: Config
    source: Source
    sinks: Sequence[Sink]
    name: str

    def check(self) -> None:
        for sink in self.sinks:
            sink.check()

    def build(self, pipeline: beam.Pipeline) -> None:
        graph.build(pipeline, self.config, self.sinks, self.source)


def _steps(
    job: Job, run: Run, model: tuple[str, str], began_at: float, resumed: Sequence[RowsResumePoint] | None = None
) -> _Steps:
    """The steps of a job; `resumed`: resume points of killed runs of the same command, None if the job makes none."""
    config, name, launched = job.config, run_name(job.settings, began_at), not job.template
    at = None if job.in_process else graph.worker_context(config, run, time.time() if launched else 0.0)
    sinks = graph.sinks(
        config, run, name, launched=launched, model=model, resumed=resumed, at=at, began_at=began_at, settings=job.settings
    )
    return _Steps(_settled(config, model), graph.source_of(config, _done(config, model), resumed, at), sinks, name)


def _settled(config: Config, model: tuple[str, str]) -> Config:
    """The job's settings; one that leaves out what a version has done works with that very version to its end."""
    if not (config.only_new and model[1]):
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, model_version=model[1]))


def _done(config: Config, model: tuple[str, str]) -> CompletionRule | None:
    """What counts as done for a job; None where it does all."""
    if not config.only_new:
        return None
    return CompletionRule(Provenance.of(config.as_dict(), model), frozenset() if config.retry_dead else FOR_GOOD)


def _lease(job: Job, run: Run) -> AbstractContextManager[None]:
    """The lease of the images that are worked at; of all, where that cannot be reports, or earlier results shall go."""
    config = job.config
    patterns = [pattern for patterns in config.patterns().values() for pattern in patterns]
    wait_s = config.busy_wait_s if config.when_busy == "wait" else 0.0
    names_any = config.retry_dead or any(map(is_manifest, patterns))  # dead letters and manifests may name anybody's images
    claimed = [EVERYTHING] if config.write.replace or names_any else patterns
    return leased(run.folder, claimed, wait_s=wait_s, lost=stop_from_thread, fence=fence, works_here=job.in_process)


def _run_to_end(job: Job, run: Run, model: tuple[str, str], began_at: float) -> int:
    config, same = job.config, same_work(job.settings, model)
    steps = _steps(job, run, model, began_at)
    steps.check()
    about = {"settings": job.settings, "command": job.command, "started_at": began_at, "same": same}
    with _said_what_is_kept(run), run.held(about):
        resumed: Sequence[RowsResumePoint] = ()
        if job.in_process:
            take_over_killed(run, same)
            resumed = _resumed(config, run, model)
            steps = _steps(job, run, model, began_at, resumed)
        facts = _run_graph(job, steps, run)
        stats, notes = read_written(run)
        facts = facts if job.in_process else facts.elsewhere(stats.began)
        if rows := sum(spill.lines for resume_point in resumed for _, spill in resume_point.spills):
            notes = (*notes, f"{rows} of them were done by a run of this command that was cut short")
        if not (stats.named or config.allow_empty):
            raise _nothing(config)
        code = _ending(config, steps.name).finish(stats, facts, run.name, notes)
        clean_up(run)
        return code


@contextlib.contextmanager
def _said_what_is_kept(run: Run) -> Iterator[None]:
    """If the run fails, prints how many rows its command resumes from."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # the first error counts
            if rows := run.rows_kept():
                print(f"{rows} images are done; the same command goes on from there", file=sys.stderr)
        raise


def _resumed(config: Config, run: Run, model: tuple[str, str]) -> Sequence[RowsResumePoint]:
    """The resume points of killed runs of this command, as one; empty if there are none.

    A resume point with an image that another job has done since does not count, since its statistics cannot be divided.
    Images that a stream has done since do no harm: streams and jobs may repeat each other.
    """
    spills = [spill for resume_point in resume_points_of(run.folder, RowsResumePoint) for _, spill in resume_point.spills]
    complete = {spill.path for spill in spills}  # a thread of a stopped run may be writing one more
    done, doubled = _done(config, model), set[tuple[int, int]]()
    if spills and done:
        of_jobs = [file for file in list_files_of_rows(config.output) if not is_of_stream(file.path)]
        doubled = done_since(spills, of_jobs, done)
    keyed, stats = list[tuple[Shard, SpillFile]](), JobStats()
    for resume_point in resume_points_of(run.folder, RowsResumePoint):  # one at a time: each may have images as samples
        own = [spill for _, spill in resume_point.spills]
        if complete.issuperset(spill.path for spill in own) and not has_any(own, doubled):
            keyed += resume_point.spills
            stats.merge(resume_point.counted, graph.samples_kept(config))
    return [RowsResumePoint(keyed, stats.as_resumed())] if keyed else []


def _run_graph(job: Job, steps: _Steps, run: Run) -> RunFacts:
    """Runs the graph to its end, when the results are committed."""
    launched_at = time.time()
    with (
        _displayed(job, run) as reports,  # first, since loading a model discards standard error
        detector_loading(steps.config) if job.in_process and not job.config.only_new else contextlib.nullcontext() as loading,
        job.runner.served(job.options),
    ):
        pipeline = job.pipeline()
        steps.build(pipeline)
        _wait(job, pipeline.run())
        begin_commit()  # only now, if other processes have committed
        detector = loading.result() if loading else detector_used(steps.config)
    return job.done(detector.ready_at, detector) if detector else job.done(launched_at, reports)


@contextlib.contextmanager
def _displayed(job: Job, run: Run) -> Iterator[WorkerReports]:
    """While this lasts, displays the progress of this process, or of the workers, whose reports it yields."""
    reports = WorkerReports(run)
    if job.in_process:
        with monitored(job.config):
            yield reports
        return

    def stats() -> JobStats:
        workers = reports.now()
        progress.note(f"{len(workers)} workers are loading the model" if workers else "waiting for workers")
        return merge_stats(workers, samples=0)

    try:
        with monitored(job.config, stats):
            yield reports
    finally:
        progress.note("")


def _wait(job: Job, running: Any) -> None:
    """Waits for the job's end; if the launcher is stopped, cancels a job that runs elsewhere."""
    try:
        job.runner.wait(running)
    except KeyboardInterrupt:
        if not job.runner.in_process:
            running.cancel()
        raise


def _nothing(config: Config) -> InputError:
    return InputError(f"input {', '.join(config.input)}: names no image")


def _ending(config: Config, name: str = "") -> JobReport:
    return JobReport(config.output, config.write, config.max_dead_share, name)
