"""The report of a results folder: figures of its current rows, pictures of a few of its images, and the last run.

The figures take one pass over the current rows, column by column. The images of the samples are read again, a few at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from models.evaluate.detection_rows import from_json
from pipeline.config import Config, DetectConfig
from pipeline.failures import Failure
from pipeline.feed.decode import decode_image
from pipeline.feed.read_again import Read, reads
from pipeline.feed.thumbnails import make_thumbnail, thumbnail_wh
from pipeline.records import DeadLetter, DetectedImage, Detections, ImageRef
from pipeline.report.page import Folder, render_report
from pipeline.results.current import current_batches
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, REPORT, RUNS
from pipeline.results.reader import KINDS, undisturbed
from pipeline.results.rows import exact_uris, json_rows
from pipeline.results.wanted import ALL, Wanted
from pipeline.stats.job_stats import EXAMPLES, JobStats, confidence_bins
from pipeline.stats.samples import REPORT_SAMPLES, Ranked, chosen, keep, ranks_of
from pipeline.stats.summary import RunFacts, summarise

_SAMPLED = 200_000  # rows among which samples are chosen; each takes microseconds
_THREADS = 4
_MAX_PIXELS = DetectConfig().max_megapixels * 1e6 / _THREADS  # decoded at once, of a JPEG at reduced scale


def page_of_folder(output: str, summary: Mapping[str, Any], wanted: Wanted = ALL) -> bytes:
    """The page of the current rows of a results folder, with pictures of a few images as far as these can be read.

    Args:
      output: The folder.
      summary: Of its last run, as `summary.json` has it; empty where none has ended.
      wanted: Which rows; of these the current ones.

    Raises:
      UnreadableError: Rows cannot be read now, or some are damaged.
    """
    found = undisturbed(partial(_figures, output, wanted))
    run = summary.get("run", "")
    page = f"{RUNS}/{run}/{REPORT}" if run else ""
    folder = found._replace(samples=list(_with_pictures(found.samples)), page_of_run=page, has_run=bool(summary))
    of_none = summarise(JobStats(), RunFacts(0.0, 0.0, 0.0, "", Config().as_dict()))
    return render_report(summary or of_none, [], {}, folder=folder).encode("utf-8", "backslashreplace")


def _figures(output: str, wanted: Wanted) -> Folder:
    pa.default_memory_pool().release_unused()  # what writing rows has freed
    stats, models, looked, kept = JobStats(), Counter[tuple[str, str]](), 0, dict[str, list[tuple[int, pa.RecordBatch]]]()
    for kind, batch in current_batches(output, wanted, KINDS):
        stats.read += len(batch)
        if kind == DEAD_LETTERS:
            _add_dead(stats, batch)
            continue
        models.update(_counted(batch["model"], batch["version"]))
        _add_objects(stats, batch)
        if looked < _SAMPLED:
            looked += len(batch)
            _keep_samples(kept, batch)
    stats.pictures = {
        purpose: [(rank, _image_of(next(json_rows(row, DETECTIONS)))) for rank, row in ranked] for purpose, ranked in kept.items()
    }
    return Folder(output, stats, models, chosen(stats.pictures, REPORT_SAMPLES))


def _add_objects(stats: JobStats, batch: pa.RecordBatch) -> None:
    """Counts objects by class and confidence, and images by their number of objects."""
    objects = pc.list_flatten(batch["detections"])
    names, confidences = (pc.struct_field(objects, name) for name in ("class_name", "confidence"))
    stats.confidences.update(_counted(names, pa.array(confidence_bins(confidences.to_numpy(zero_copy_only=False)))))
    stats.objects.update(_counted(pc.list_value_length(batch["detections"])))


def _counted(*columns: pa.Array) -> dict[Any, int]:
    """How often each value occurs in a column, or each tuple of values in several."""
    names = [str(number) for number, _ in enumerate(columns)]
    groups = pa.table(dict(zip(names, columns, strict=True))).group_by(names).aggregate([([], "count_all")])
    values = [groups[name].to_pylist() for name in names]
    return dict(zip(values[0] if len(columns) == 1 else zip(*values, strict=True), groups["count_all"].to_pylist(), strict=True))


def _keep_samples(kept: Ranked[pa.RecordBatch], batch: pa.RecordBatch) -> None:
    """Keeps the rows that are to be shown, of all so far."""
    named = zip(exact_uris(batch), batch["generation"].to_pylist(), strict=True)
    for place, ((uri, generation), objects) in enumerate(
        zip(named, pc.list_value_length(batch["detections"]).to_pylist(), strict=True)
    ):
        keep(kept, ranks_of(f"{uri}#{generation}", objects), batch.slice(place, 1), REPORT_SAMPLES)


def _add_dead(stats: JobStats, batch: pa.RecordBatch) -> None:
    """Counts dead letters by stage and reason; only the first of each become objects."""
    for (stage, reason), count in _counted(batch["stage"], batch["reason"]).items():
        of_reason = batch.filter(pc.and_(pc.equal(batch["stage"], stage), pc.equal(batch["reason"], reason)))
        for row in json_rows(of_reason.slice(0, EXAMPLES), DEAD_LETTERS):
            ref = ImageRef(row["image"].get("uri", ""), row["image"].get("generation", ""))
            stats.add_dead(DeadLetter(ref, stage, reason, row["message"]))
        stats.dead[stage, reason] += max(0, count - EXAMPLES)


def _image_of(row: dict[str, object]) -> DetectedImage:
    found = from_json(row, "a row")
    scores = found.scores.astype(np.float32)
    detections = Detections(
        found.boxes_xyxy.astype(np.float32).reshape(-1, 4), np.array(found.class_ids, np.int32), scores, found.class_names
    )
    return DetectedImage(ImageRef(found.uri), found.width, found.height, "", "", detections)


def _with_pictures(samples: Sequence[tuple[str, DetectedImage]]) -> Iterator[tuple[str, DetectedImage]]:
    """Those samples whose images can be read again, with a thumbnail."""
    rows = {image.ref.uri: (purpose, image) for purpose, image in samples}
    wanted = [from_json(_row_of(image), "a row") for _, image in samples]
    pictures: dict[str, bytes] = {}
    with ThreadPoolExecutor(_THREADS, "samples") as pool:
        for uri, thumbnail in pool.map(lambda read: (read[0].uri, _thumbnail(read[1])), list(reads(wanted, ""))):
            pictures[uri] = thumbnail
    for uri, (purpose, image) in rows.items():
        if pictures.get(uri):
            yield purpose, replace(image, thumbnail=pictures[uri])


def _row_of(image: DetectedImage) -> dict[str, object]:
    return {"image": {"uri": image.ref.uri, "width": image.width, "height": image.height}, "detections": []}


def _thumbnail(read: Read) -> bytes:
    """A small picture; empty where the image cannot be read or decoded any more."""
    try:
        content = read()
    except OSError:
        return b""
    decoded = content if isinstance(content, Failure) else decode_image(content, _MAX_PIXELS, thumbnail_wh)
    return b"" if isinstance(decoded, Failure) else make_thumbnail(decoded)
