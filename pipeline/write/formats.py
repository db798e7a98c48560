"""The formats of exports: a table of their files and writers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from pipeline.write.write_csv import write_csv
from pipeline.write.write_cvat import write_cvat
from pipeline.write.write_label_studio import write_label_studio
from pipeline.write.write_labels import write_voc, write_yolo
from pipeline.write.write_tfrecord import write_tfrecord


class Format(NamedTuple):
    """A format with one file: its name, and its writer from JSON rows to a file at a path."""

    file: str
    write: Callable[[Iterable[dict[str, Any]], str], None]


COCO = "coco"  # has two files, and the ids of a ground truth; see `write_coco`
FORMATS: Mapping[str, Format] = {
    "csv": Format("detections.csv", write_csv),
    "yolo": Format("yolo.zip", write_yolo),
    "voc": Format("voc.zip", write_voc),
    "cvat": Format("cvat.xml", write_cvat),
    "label-studio": Format("label-studio.json", write_label_studio),
    "tfrecord": Format("detections.tfrecord", write_tfrecord),
}
