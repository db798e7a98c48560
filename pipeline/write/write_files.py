"""`WriteFiles`: rows become sorted JSON Lines files, and what is made of these, that get their names all at once, at the end.

Bundles write sorted spills to a hidden staging folder while they run, so memory stays flat. These are merged into shards there,
and only when all shards are complete do they get their names. Whatever a killed run leaves lies in staging, where no reader
looks. The same input gives the same files: a row's place depends on the rows alone, not on who wrote it when.
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
from pipeline.stats.summary import JobStats, merge_stats
from pipeline.stats.worker_context import WorkerContext
from pipeline.storage.beside import check_beside
from pipeline.storage.completion import Provenance
from pipeline.storage.files import begin_sync, create, read_lines, write_file
from pipeline.storage.ledger import writing_index
from pipeline.storage.other_runs import finish_dead, settings_published
from pipeline.storage.results import (
    COCO_IMAGES,
    COCO_RESULTS,
    DEAD_LETTERS,
    DETECTIONS,
    StagedFile,
    check_output,
    index_name,
    shard_name,
)
from pipeline.storage.spill_files import SpillFile, merge_lines, merge_spills
from pipeline.storage.staging import finish_publishing, introduce, output_of, publish
from pipeline.storage.state import read_checked
from pipeline.storage.write_policy import check_write_policy
from pipeline.write.sink import Results, Sink
from pipeline.write.spill_rows import BY_ROWS, RowsResumePoint, Shard, Spilled, SpillRows
from pipeline.write.spread_spills import SpreadSpills, count_lines
from pipeline.write.write_coco import GroundTruth, read_ground_truth, write_coco
from pipeline.write.write_parquet import write_parquet
from pipeline.write.write_tfrecord import write_tfrecord

ROWS_PER_SHARD = 100_000  # where the config names no number of shards: files of 20 to 100 MB
COCO_IMAGES_AT_MOST = 10_000_000  # one worker writes them in a quarter of an hour, and a reader takes them whole
_WRITTEN = "written"


class Written(NamedTuple):
    """What a finished job leaves for its summary.

    Attributes:
      stats: The whole job's.
      notes: Lines for the user.
    """

    stats: JobStats
    notes: tuple[str, ...] = ()


@dataclasses.dataclass
class WriteFiles(Sink):
    """Writes rows, and on request Parquet and COCO files, to a results folder.

    Bounded. The files get their names when all are complete; where nothing was read, none do. What the summary needs stays in
    staging, for `read_written`.

    Args:
      staging: Folder for this run's unfinished files, which it holds (see `storage.staging`); it lies in the results folder.
      settings: All settings of the job, nested: what an earlier run's are compared with.
      write: Which files, and how many.
      samples: How many images with a thumbnail the statistics keep.
      launched: Whether a launcher of this job holds the staging folder; a template's jobs have none.
      model: Name and version of the model, where they are known; not all dead letters say them.
      name: What the files of rows carry in their names.
      begun: What killed runs of the same command had done, whose spills lie in staging; None: this run makes no resume points.
      worker_context: What workers elsewhere must reach before they begin; None: the launcher's process does all.
      began_at: When the job began, seconds since the epoch: how new its rows are; a template's jobs find that out as they run.
    """

    staging: str
    settings: Mapping[str, Any]
    write: WriteConfig
    samples: int = 0
    launched: bool = True
    model: tuple[str, str] = ("", "")
    name: str = ""
    begun: Sequence[RowsResumePoint] | None = None
    worker_context: WorkerContext | None = None
    began_at: float = 0.0

    def __post_init__(self) -> None:
        super().__init__()

    def check(self, *, write: bool = True) -> None:
        """Makes sure that the folder can be written, holds no results of another kind, and that the ground truth is one."""
        output = output_of(self.staging)
        check_output(output, write)
        self._ground_truth()
        if write:
            finish_dead(output)
        check_write_policy(output, self.settings, replace=self.write.replace)
        earlier = [about["settings"] for about in settings_published(output) if "settings" in about]
        check_beside(output, self.write.samples, self.write.coco, earlier)

    def expand(self, results: Results) -> beam.PCollection[None]:
        """Wires a shuffle of the names of spills, and then a look at all that is ready."""
        resume_point_s = self.write.resume_point_s if self.begun is not None else None
        to_rows = functools.partial(SpillRows, self.staging, resume_point_s=resume_point_s, worker_context=self.worker_context)
        to_detections = to_rows(DETECTIONS, detection_row, self.write.shards or BY_ROWS, self.samples, expected=results.expected)
        to_dead_letters = to_rows(DEAD_LETTERS, dead_letter_row)

        spilled = [results.detected | "SpillDetections" >> to_detections]
        spilled += [dead | f"SpillDeadLetters{n}" >> to_dead_letters for n, dead in enumerate(results.dead)]
        if self.begun:
            spilled.append(self._begun(results.counted.pipeline, self.begun))
        spills = [each.spills for each in spilled] | "AllSpills" >> beam.Flatten()
        if self.worker_context:  # one process would merge one range after the other
            spills = spills | "SpreadSpills" >> SpreadSpills(self.staging)
        lines = count_lines(spills)
        job_stats = [results.counted, *(each.job_stats for each in spilled)] | "AllTallies" >> beam.Flatten()
        merge = functools.partial(merge_stats, samples=self.samples)  # they hold images, and all slots get what `Publish` takes
        stats = AsSingleton(job_stats | "MergeTallies" >> beam.CombineGlobally(merge).without_defaults(), JobStats())
        finished = spills | "GatherShards" >> beam.GroupByKey() | "FinishShards" >> beam.FlatMap(self._finish, lines)

        end = results.counted.pipeline | "End" >> beam.Impulse()
        # apart, so that nothing that is done again once files have their names reads them where they were
        coco = [AsIter(end | "WriteCoco" >> beam.FlatMap(self._write_coco, AsIter(finished), lines))] if self.write.coco else []
        return end | "Publish" >> beam.Map(self._publish, AsIter(finished), stats, *coco)

    def _begun(self, pipeline: beam.Pipeline, checkpoints: Sequence[RowsResumePoint]) -> Spilled:
        """What is spilled already, as if it were now."""
        spills = [spill for resume_point in checkpoints for spill in resume_point.spills]
        return Spilled(
            pipeline | "SpillsBegun" >> beam.Create(spills, reshuffle=False),
            pipeline | "TalliesBegun" >> beam.Create([resume_point.counted for resume_point in checkpoints], reshuffle=False),
        )

    def _finish(self, shard_and_spills: tuple[Shard, Iterable[SpillFile]], rows: Mapping[Shard, int]) -> Iterator[StagedFile]:
        """Merges the spills of one shard, or of one range of a kind's rows, into files.

        Args:
          shard_and_spills: The shard, and what is to be merged.
          rows: Of all shards, how many.
        """
        (kind, number, shards), spills = Shard(*shard_and_spills[0]), list(shard_and_spills[1])
        lines = merge_spills(spills, f"{self.staging}/merge")
        if shards != BY_ROWS:
            yield from self._write_shard(shard_name(kind, number, shards, self.name), lines)
            return
        files = {each.number: -(-lines // ROWS_PER_SHARD) for each, lines in _shards(rows) if each.kind == kind}
        before, shards = sum(files[each] for each in files if each < number), sum(files.values())
        for file in range(before, before + files[number]):
            yield from self._write_shard(shard_name(kind, file, shards, self.name), itertools.islice(lines, ROWS_PER_SHARD))

    def _write_shard(self, name: str, lines: Iterable[bytes]) -> Iterator[StagedFile]:
        attempt = f"{self.staging}/{uuid.uuid4().hex}"  # of two workers that write the same shard, none disturbs the other
        index, kind = index_name(name), posixpath.dirname(name)
        made_at = self.began_at if self.launched else time.time()
        indexing = writing_index(f"{attempt}/{index}", kind, Provenance.of(self.settings, self.model), made_at)
        with create(f"{attempt}/{name}.jsonl") as file, indexing as note:
            file.writelines(map(note, lines))
        begin_sync(f"{attempt}/{name}.jsonl")
        yield StagedFile(f"{attempt}/{name}.jsonl", f"{name}.jsonl")
        yield StagedFile(f"{attempt}/{index}", index)
        for ending, wanted, write in (
            ("parquet", self.write.parquet, write_parquet),
            ("tfrecord", self.write.tfrecord, write_tfrecord),
        ):
            if wanted and name.startswith(DETECTIONS):
                write(read_lines(f"{attempt}/{name}.jsonl"), f"{attempt}/{name}.{ending}")
                yield StagedFile(f"{attempt}/{name}.{ending}", f"{name}.{ending}")

    def _publish(
        self,
        _end: bytes,
        finished: Iterable[StagedFile],
        stats: JobStats,
        coco: Iterable[StagedFile | str] = (),
    ) -> None:
        if self.launched and finish_publishing(self.staging):
            return  # an attempt before this one came so far: its files are the run's, and what it counted
        notes = [note for note in coco if isinstance(note, str)]
        files: list[StagedFile] = []
        if stats.named:  # the results of an earlier run outlive one that found no input
            files = list(finished)
            if not self.settings.get("only_new"):  # which adds no files that say nothing
                files += self._empty_shards({file.final for file in files})
            files += [file for file in coco if isinstance(file, StagedFile)]
        write_file(f"{self.staging}/{_WRITTEN}", pack(Written(stats, tuple(notes))))
        if not self.launched:
            introduce(self.staging, {"settings": self.settings})
        if files:
            publish(self.staging, files, again=not self.launched)

    def _empty_shards(self, written: set[str]) -> Iterator[StagedFile]:
        """Files for shards that got no row."""
        for kind, shards in ((DETECTIONS, self.write.shards or BY_ROWS), (DEAD_LETTERS, BY_ROWS)):
            if shards == BY_ROWS and any(final.startswith(f"{kind}/") for final in written):
                continue
            for number in range(shards or 1):
                name = shard_name(kind, number, shards or 1, self.name)
                if f"{name}.jsonl" not in written:
                    yield from self._write_shard(name, ())

    def _write_coco(self, _end: bytes, finished: Iterable[StagedFile], rows: Mapping[Shard, int]) -> Iterator[StagedFile | str]:
        """Makes the COCO files of all rows, which are one file each; gives them, and what is to be said of them."""
        images = sum(lines for shard, lines in _shards(rows) if shard.kind == DETECTIONS)
        if images > COCO_IMAGES_AT_MOST:
            yield (
                f"coco/ is not written: it would be one file of {images:,} images, and {COCO_IMAGES_AT_MOST:,} are the most; "
                "detections/ has all rows; give parts of the input an output of their own"
            )
            return
        attempt = f"{self.staging}/{uuid.uuid4().hex}"
        shards = (file.staged for file in finished if _is_rows(file))
        left_out = write_coco(merge_lines(shards, f"{attempt}/merge"), attempt, self._ground_truth())
        yield from (StagedFile(f"{attempt}/{name}", name) for name in (COCO_RESULTS, COCO_IMAGES))
        yield from left_out.notes(str(self.write.coco_ground_truth))

    def _ground_truth(self) -> GroundTruth | None:
        return read_ground_truth(self.write.coco_ground_truth) if self.write.coco and self.write.coco_ground_truth else None


def read_written(staging: str) -> Written:
    """What a finished job left for its summary.

    Raises:
      OutputError: It is not there, or somebody else has overwritten it.
    """
    written: Written | None = read_checked(f"{staging}/{_WRITTEN}", functools.partial(unpack, Written))
    if written is None:
        raise OutputError(f"output {output_of(staging)}: expected {_WRITTEN} in {staging}, which says what the job has counted")
    return written


def _shards(rows: Mapping[Shard, int]) -> Iterator[tuple[Shard, int]]:
    return ((Shard(*shard), lines) for shard, lines in rows.items())


def _is_rows(file: StagedFile) -> bool:
    return file.final.startswith(f"{DETECTIONS}/") and file.final.endswith(".jsonl")
