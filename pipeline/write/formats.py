"""The formats that files of rows are also written in: a table of their endings and writers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pipeline.write.write_csv import write_csv
from pipeline.write.write_cvat import write_cvat
from pipeline.write.write_label_studio import write_label_studio
from pipeline.write.write_labels import write_voc, write_yolo
from pipeline.write.write_parquet import write_parquet
from pipeline.write.write_tfrecord import write_tfrecord

WRITERS: Mapping[str, Callable[[Iterable[bytes], str], None]] = {  # by ending; from JSON rows to a file at a path
    "parquet": write_parquet,
    "tfrecord": write_tfrecord,
    "csv": write_csv,
    "yolo.zip": write_yolo,
    "voc.zip": write_voc,
    "cvat.xml": write_cvat,
    "label-studio.json": write_label_studio,
}
