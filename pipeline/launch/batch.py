"""Launches a batch job: checks input and output, takes the lock of its command, and runs the graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
from apache_beam.io.filesystems import FileSystems

from pipeline import graph
from pipeline.config import Config
from pipeline.errors import DEAD, DONE, BusyError
from pipeline.launch.dry_run import Planned, first_images, model_lines, tried
from pipeline.launch.execute import execute, place_of
from pipeline.launch.loading import detector_loading, model_known, tried_here
from pipeline.launch.options import Job, checked_job
from pipeline.launch.other_version import tell_of_other_version
from pipeline.launch.signals import stopped_by_signals
from pipeline.listing.done_rows import NEW, DoneRows
from pipeline.listing.list_images import check_inputs, folders_in_manifests, folders_of, list_images
from pipeline.listing.manifests import is_manifest
from pipeline.listing.names import is_container
from pipeline.log_lines import bind_run_id, console, say
from pipeline.outcome.conclude import Conclusion, names_no_image, names_of_files
from pipeline.records import DeadLetter, ImageRef, row_bytes
from pipeline.results.completion import RowVersion
from pipeline.results.layout import check_output, check_reports, check_results
from pipeline.results.lock import locked, since
from pipeline.results.reader import ResultsFolder, undisturbed
from pipeline.results.run_folder import Run
from pipeline.results.wanted import Wanted
from pipeline.storage.listing import MAX_PARALLEL, location_of
from pipeline.storage.stores import LISTED

_AT_ONCE = 10_000  # images of a listing
_BUSY_SECONDS = 3600.0  # longest wait for another run of this command
_STALLED_SECONDS = 6 * 3600.0  # a run that works writes rows more often, unless all of a listing of this length is done


def prepare(config: Config, beam_flags: Sequence[str], command: str, started_at: float, *, wait: bool = True) -> Job:
    """Checks flags and input before anything takes time.

    Raises:
      UserError: A flag or an input is wrong.
    """
    config = dataclasses.replace(config, output=config.output.rstrip("/") or "/")
    if config.retry_dead:
        config = dataclasses.replace(_allowing_inputs(config), allow_empty=True, input=(), dates="")
    job = checked_job(config, beam_flags, command, started_at, wait=wait)
    FileSystems.set_options(job.options)
    if config.retry_dead:
        check_results(config.replayed)
    else:
        check_inputs(config.patterns(), config.allow_empty)
    return dataclasses.replace(job, resolved_input=tuple(location_of(pattern).pattern for pattern in config.patterns()))


def _allowing_inputs(config: Config) -> Config:
    """The job, with permission for all that its dead letters may name: the folders of its inputs, and its output."""
    patterns = config.all_patterns()
    folders = (*config.stream.allow_uri_prefix, *folders_of(patterns), *folders_in_manifests(patterns), config.output)
    return dataclasses.replace(config, stream=dataclasses.replace(config.stream, allow_uri_prefix=folders))


def show_plan(job: Job) -> int:
    """Dry run: prints what a run would do, what it detects in a few images, and what is wrong; writes nothing."""
    config = job.config
    check_output(config.output, write=False)
    check_reports(config.output)
    detector, tried_as = tried_here(job)
    patterns = config.all_patterns()
    left_out: Counter[str] = Counter()
    found: Iterable[ImageRef | DeadLetter] = list_images(
        patterns, config.output, lambda kind: left_out.update([kind]), config.stream.allow_uri_prefix
    )
    if config.retry_dead:
        found = graph.dead_letter_replay(config).refs_in_results()
    planned = _planned(found, _done(config, RowVersion.of(config.as_dict(), model_known(job))))
    if planned.is_empty and not config.allow_empty:
        raise names_no_image(config.input)
    say(planned.lines(left_out))
    say(f"         from {pattern}" for pattern in patterns if is_container(pattern) or is_manifest(pattern))
    say([f"         of {config.dates}"] if config.dates else [])
    say(model_lines(detector, tried_as))
    say(f"warning  {doubt}" for doubt in job.runner.doubts(job.options))
    say([f"runner   {config.runner}", f"output   {config.output} ({', '.join(names_of_files(config.write))})"])
    succeeded = detector is None or tried(
        detector, first_images((ref.location for ref in (*planned.first, *planned.containers)), config)
    )
    say(["dry run: nothing was written"])
    if not succeeded:
        console.error("none of the images that were tried can be detected in; see their dead letters above")
    return DONE if succeeded else DEAD


def _planned(found: Iterable[ImageRef | DeadLetter], done: DoneRows | None) -> Planned:
    """What a listing names, a part of it at a time: it may have a hundred million images."""
    planned, listed = Planned(), iter(found)
    with ThreadPoolExecutor(MAX_PARALLEL, "ask-generation") as pool:
        while some := list(islice(listed, _AT_ONCE)):
            refs = [each if isinstance(each, ImageRef) else each.ref for each in some]
            planned.add(some, done.among(refs, pool) != NEW if done else np.zeros(len(some), bool))
    return planned


def run(job: Job) -> int:
    """Runs the job, and waits for its end if it is to; returns the exit code."""
    config, this_run = job.config, Run.new(job.config.output)
    bind_run_id(this_run.name)
    with stopped_by_signals(config.output):
        model = model_known(job)
        check_output(config.output)
        wait_s = _BUSY_SECONDS if config.when_busy == "wait" else 0.0
        try:
            with locked(config.output, _lock_of(job, model), wait_s=wait_s, what=f"run {this_run.name}"):
                return _run_to_end(job, this_run, model)
        except BusyError as busy:
            if config.when_busy != "skip":
                raise BusyError(f"{busy}{'' if config.when_busy == 'wait' else '; --when-busy wait waits for it'}") from busy
            if _is_stalled(config.output, busy.holder):
                hours = f"{_STALLED_SECONDS / 3600:g} hours"
                raise BusyError(f"{busy}; it has written no row for {hours}: end it if it is stuck, and run this again") from busy
            say([f"skipped: {busy}; nothing was done"])
            return DONE


def _is_stalled(output: str, holder: str) -> bool:
    """Whether the holder of a lock has held it, and written no row, for hours: each night would skip its work for it."""
    wanted, began = Wanted(run=holder.partition(",")[0].removeprefix("run ")), min(since(holder), time.time())

    def newest() -> float:
        tables = ResultsFolder(output, may_hold=wanted.may_be_in).tables([*wanted.columns, "made_at"])
        times = (rows["made_at"].cast("int64").to_numpy()[wanted.among(rows, shard.kind)] for shard, rows in tables)
        return max([began, *(float(made_at.max(initial=0)) / 1e6 for made_at in times)])

    return undisturbed(newest) < time.time() - _STALLED_SECONDS


def _done(config: Config, version: RowVersion, run: str = "") -> DoneRows | None:
    """The rows that count as done for a job; None where it detects all images again."""
    if config.again:
        return None
    patterns = config.all_patterns()
    named = any(map(is_manifest, patterns)) or config.replayed  # these may name anybody's images
    folders = (location_of(pattern).folder for pattern in patterns)
    # what the images' URIs begin with; empty where that is not known, as of addresses and of links on a disk
    prefixes = (folder if folder.startswith(LISTED) else "" for folder in (*config.stream.allow_uri_prefix, *folders))
    return DoneRows(config.output, version, ("",) if named else tuple(prefixes), run)


def _lock_of(job: Job, model: tuple[str, str]) -> str:
    """The name of the lock of a command: equal for two jobs that would do the same work."""
    work = [
        job.settings.get("resolved_input", []),
        job.config.dates,
        RowVersion.of(job.settings, model),
        job.config.replayed,
        job.config.read.fps,
    ]
    return hashlib.blake2b(row_bytes(work), digest_size=8).hexdigest()


def _run_to_end(job: Job, run: Run, model: tuple[str, str]) -> int:
    config, version, place = job.config, RowVersion.of(job.config.as_dict(), model), place_of(job, run)
    done = _done(config, version, run.name)
    source, sink = graph.source_of(config, done, place.context), graph.sink_of(config, run, version, place.context)
    check_output(config.output)  # again: the lock may have taken an hour
    check_reports(config.output)
    if done and version.model and not config.retry_dead:
        tell_of_other_version(config, done)
    # Where rows count as done, perhaps no image is new, and so the first new one loads the model.
    lazily = done is not None and (not job.in_process or done.total > 0)
    end = Conclusion(run, place.facts, model)
    loading = functools.partial(detector_loading, config) if job.in_process and not lazily else contextlib.nullcontext
    return execute(place, end, lambda empty: graph.build(empty, config, source, sink, end, lazily=lazily), loading=loading)
