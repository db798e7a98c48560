"""`WriteFiles`: rows become sorted JSON Lines files, and files made from these; the run commits all of them at the end.

Bundles write sorted spill files to the run's folder, so memory stays flat. A merge makes shards there, and the run commits
when all shards are complete. A killed run leaves files only in its own folder, which no reader lists. The same input gives the
same files: a row's place depends on the rows alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import posixpath
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.pvalue import AsIter, AsSingleton

from pipeline.config import WriteConfig
from pipeline.data_format import pack, unpack
from pipeline.errors import OutputError
from pipeline.records import dead_letter_row, detection_row
from pipeline.results.cancellation import until_cancelled
from pipeline.results.completion import Provenance
from pipeline.results.layout import (
    COCO_IMAGES,
    COCO_RESULTS,
    DEAD_LETTERS,
    DETECTIONS,
    RUNS,
    StagedFile,
    check_output,
    index_name,
    kind_of_rows,
    shard_name,
)
from pipeline.results.ledger import writing_index
from pipeline.results.other_runs import finish_dead
from pipeline.results.reports import check_reports
from pipeline.results.run import Run
from pipeline.results.write_policy import check_write_policy
from pipeline.stats.summary import JobStats, merge_stats
from pipeline.stats.worker_context import WorkerContext
from pipeline.storage.files import begin_sync, create, read_lines, write_file
from pipeline.storage.spill_files import SpillFile, merge_lines, merge_spills
from pipeline.storage.state import read_checked
from pipeline.write.formats import WRITERS, endings_of
from pipeline.write.sink import Results, Sink
from pipeline.write.spill_rows import BY_ROWS, RowsResumePoint, Shard, Spilled, SpillRows
from pipeline.write.spread_spills import ROWS_AT_ONCE, SpreadSpills, count_lines
from pipeline.write.write_coco import GroundTruth, read_ground_truth, write_coco

ROWS_PER_SHARD = 100_000  # without a number of shards in the config: files of 20 to 100 MB
_WRITTEN = "written"


class Sizes(NamedTuple):
    """Bounds of files.

    Attributes:
      rows_per_file: Rows of a file, without a number of shards in the config.
      rows_per_range: The least number of rows that a worker merges, if several do.
      spill_bytes: Bytes of rows that a bundle holds in memory; 0: the default of `SpillWriter`.
      coco_images: Most images of a COCO file: one worker writes it in a quarter of an hour, and readers load it whole.
    """

    rows_per_file: int = ROWS_PER_SHARD
    rows_per_range: int = ROWS_AT_ONCE
    spill_bytes: int = 0
    coco_images: int = 10_000_000


class Written(NamedTuple):
    """A finished job's statistics, for its summary.

    Attributes:
      stats: The whole job's.
      notes: Lines for the user.
    """

    stats: JobStats
    notes: tuple[str, ...] = ()


SIZES = Sizes()


@dataclasses.dataclass
class WriteFiles(Sink):
    """Writes rows, and on request Parquet and COCO files, to a results folder.

    Bounded. Commits when all files are complete; commits nothing if nothing was read, or if more than `max_dead_share` of the
    images failed. Leaves the statistics in the run's folder, for `read_written`.

    Args:
      run: The run, whose folder of unfinished files the launcher holds.
      settings: All settings of the job, nested; they are compared with those of earlier runs.
      write: Which files, and how many.
      samples: How many samples the job wants.
      launched: Whether the job has a launcher, which holds the run's folder; jobs of a template have none.
      model: Name and version of the model, if known; not all dead letters have them.
      name: The name in the names of files; empty: none in those of rows, the run's in those of reports.
      resumed: Resume points that the run has taken over; None: the run makes no resume points.
      worker_context: What workers elsewhere must reach before they begin; None: the launcher's process does all work.
      began_at: Start of the job, seconds since the epoch: the age of its rows; jobs of a template take the time of writing.
      sizes: Bounds of its files.
    """

    run: Run
    settings: Mapping[str, Any]
    write: WriteConfig
    samples: int = 0
    launched: bool = True
    model: tuple[str, str] = ("", "")
    name: str = ""
    resumed: Sequence[RowsResumePoint] | None = None
    worker_context: WorkerContext | None = None
    began_at: float = 0.0
    sizes: Sizes = SIZES

    def __post_init__(self) -> None:
        super().__init__()

    def check(self, *, write: bool = True) -> None:
        """Makes sure that the folder can be written and has no results of another kind, and that the ground truth is valid."""
        output = self.run.output
        check_output(output, write)
        self._ground_truth()
        if write:
            finish_dead(output)
        check_write_policy(output, self.settings, replace=self.write.replace)
        check_reports(output, self.write.samples, self.write.coco, self.name)

    def expand(self, results: Results) -> beam.PCollection[None]:
        """Wires a shuffle of the names of spill files, the merge, and the commit."""
        resume_point_s = self.write.resume_point_s if self.resumed is not None else None
        to_rows = functools.partial(
            SpillRows,
            self.run.folder,
            resume_point_s=resume_point_s,
            worker_context=self.worker_context,
            spill_bytes=self.sizes.spill_bytes,
        )
        to_detections = to_rows(DETECTIONS, detection_row, self.write.shards or BY_ROWS, self.samples)
        to_dead_letters = to_rows(DEAD_LETTERS, dead_letter_row)

        spilled = [results.detected | "SpillDetections" >> to_detections]
        spilled += [dead | f"SpillDeadLetters{n}" >> to_dead_letters for n, dead in enumerate(results.dead)]
        if self.resumed:
            spilled.append(self._resumed(results.counted.pipeline, self.resumed))
        spills = [each.spills for each in spilled] | "AllSpills" >> beam.Flatten()
        if self.worker_context:  # a single process would merge the ranges one by one
            spills = spills | "SpreadSpills" >> SpreadSpills(self.run.folder, self.sizes.rows_per_range)
        lines = count_lines(spills)
        job_stats = [results.counted, *(each.job_stats for each in spilled)] | "AllStats" >> beam.Flatten()
        merge = functools.partial(
            merge_stats, samples=self.samples
        )  # job_stats have images, and all slots get the inputs of `Commit`
        stats = AsSingleton(job_stats | "MergeStats" >> beam.CombineGlobally(merge).without_defaults(), JobStats())
        finished = spills | "GatherShards" >> beam.GroupByKey() | "FinishShards" >> beam.FlatMap(self._finish, lines)

        end = results.counted.pipeline | "End" >> beam.Impulse()
        # a step of its own: a retried commit must not read files that have moved
        coco = [AsIter(end | "WriteCoco" >> beam.FlatMap(self._write_coco, AsIter(finished), lines))] if self.write.coco else []
        return end | "Commit" >> beam.Map(self._commit, AsIter(finished), stats, *coco)

    def _resumed(self, pipeline: beam.Pipeline, checkpoints: Sequence[RowsResumePoint]) -> Spilled:
        """The resume points' content, as if this run had spilled it."""
        spills = [spill for resume_point in checkpoints for spill in resume_point.spills]
        return Spilled(
            pipeline | "ResumedSpills" >> beam.Create(spills, reshuffle=False),
            pipeline | "ResumedStats" >> beam.Create([resume_point.counted for resume_point in checkpoints], reshuffle=False),
        )

    def _finish(self, shard_and_spills: tuple[Shard, Iterable[SpillFile]], rows: Mapping[Shard, int]) -> Iterator[StagedFile]:
        """Merges the spill files of one shard, or of one range of a kind's rows, into files.

        Args:
          shard_and_spills: The shard and its spill files.
          rows: The number of rows of each shard.
        """
        (kind, number, shards), spills = Shard(*shard_and_spills[0]), list(shard_and_spills[1])
        lines = merge_spills(spills, f"{self.run.folder}/merge")
        if shards != BY_ROWS:
            yield from self._write_shard(shard_name(kind, number, shards, self.name), lines)
            return
        files = {each.number: -(-lines // self.sizes.rows_per_file) for each, lines in _shards(rows) if each.kind == kind}
        before, shards = sum(files[each] for each in files if each < number), sum(files.values())
        for file in range(before, before + files[number]):
            yield from self._write_shard(
                shard_name(kind, file, shards, self.name), itertools.islice(lines, self.sizes.rows_per_file)
            )

    def _write_shard(self, name: str, lines: Iterable[bytes]) -> Iterator[StagedFile]:
        attempt = f"{self.run.folder}/{uuid.uuid4().hex}"  # two workers that write the same shard do not disturb each other
        index, kind = index_name(name), posixpath.dirname(name)
        made_at = self.began_at if self.launched else time.time()
        indexing = writing_index(f"{attempt}/{index}", kind, Provenance.of(self.settings, self.model), made_at)
        with create(f"{attempt}/{name}.jsonl") as file, indexing as note:
            file.writelines(map(note, until_cancelled(lines)))
        begin_sync(f"{attempt}/{name}.jsonl")
        yield StagedFile(f"{attempt}/{name}.jsonl", f"{name}.jsonl")
        yield StagedFile(f"{attempt}/{index}", index)
        for ending in endings_of(self.write) if kind == DETECTIONS else ():
            WRITERS[ending](read_lines(f"{attempt}/{name}.jsonl"), f"{attempt}/{name}.{ending}")
            yield StagedFile(f"{attempt}/{name}.{ending}", f"{name}.{ending}")

    def _commit(
        self,
        _end: bytes,
        finished: Iterable[StagedFile],
        stats: JobStats,
        coco: Iterable[StagedFile | str] = (),
    ) -> None:
        if self.launched and self.run.finish():
            return  # an earlier attempt has committed: its files and statistics are the run's
        notes = [note for note in coco if isinstance(note, str)]
        files: list[StagedFile] = []
        too_many_dead = stats.dead_share > self.settings.get("max_dead_share", 1.0)
        if too_many_dead and not self.launched:  # nobody reads the statistics
            raise OutputError(f"output {self.run.output}: {stats.dead_share:.0%} of the images failed, so nothing is committed")
        if stats.named and not too_many_dead:  # a run without input replaces nothing
            files = list(finished)
            if not self.settings.get("only_new"):  # a run that adds writes no empty files
                files += self._empty_shards({file.final for file in files})
            files += [file for file in coco if isinstance(file, StagedFile)]
        write_file(f"{self.run.folder}/{_WRITTEN}", pack(Written(stats, tuple(notes))))
        if files:
            self.run.commit(files, unlaunched=None if self.launched else {"settings": self.settings})

    def _empty_shards(self, written: set[str]) -> Iterator[StagedFile]:
        """Writes empty files for shards without rows."""
        for kind, shards in ((DETECTIONS, self.write.shards or BY_ROWS), (DEAD_LETTERS, BY_ROWS)):
            if shards == BY_ROWS and any(final.startswith(f"{kind}/") for final in written):
                continue
            for number in range(shards or 1):
                name = shard_name(kind, number, shards or 1, self.name)
                if f"{name}.jsonl" not in written:
                    yield from self._write_shard(name, ())

    def _write_coco(self, _end: bytes, finished: Iterable[StagedFile], rows: Mapping[Shard, int]) -> Iterator[StagedFile | str]:
        """Makes the two COCO files of all rows; yields them, and notes for the user."""
        images = sum(lines for shard, lines in _shards(rows) if shard.kind == DETECTIONS)
        if images > self.sizes.coco_images:
            yield (
                f"coco/ is not written: it would be one file of {images:,} images, and {self.sizes.coco_images:,} are the most; "
                "detections/ has all rows; give parts of the input an output of their own"
            )
            return
        attempt = f"{self.run.folder}/{uuid.uuid4().hex}"
        shards = (file.staged for file in finished if kind_of_rows(file.final) == DETECTIONS and file.final.endswith(".jsonl"))
        left_out = write_coco(merge_lines(shards, f"{attempt}/merge"), attempt, self._ground_truth())
        yield from (
            StagedFile(f"{attempt}/{name}", f"{RUNS}/{self.name or self.run.name}/{name}") for name in (COCO_RESULTS, COCO_IMAGES)
        )
        yield from left_out.notes(str(self.write.coco_ground_truth))

    def _ground_truth(self) -> GroundTruth | None:
        return read_ground_truth(self.write.coco_ground_truth) if self.write.coco and self.write.coco_ground_truth else None


def read_written(run: Run) -> Written:
    """The statistics that a finished job left for its summary.

    Raises:
      OutputError: They are missing, or were overwritten.
    """
    written: Written | None = read_checked(f"{run.folder}/{_WRITTEN}", functools.partial(unpack, Written))
    if written is None:
        raise OutputError(f"output {run.output}: expected {_WRITTEN} in {run.folder}, which has the job's statistics")
    return written


def _shards(rows: Mapping[Shard, int]) -> Iterator[tuple[Shard, int]]:
    return ((Shard(*shard), lines) for shard, lines in rows.items())
