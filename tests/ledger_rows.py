"""Rows of one image each, and files of them as jobs and streams name them."""

import numpy as np
from pipeline.results.ledger import write_index

from pipeline.records import DeadLetter, DetectedImage, Detections, ImageRef, dead_letter_row, detection_row, row_bytes
from pipeline.results.completion import Provenance
from pipeline.results.layout import archive_name, shard_name
from pipeline.storage.files import write_file

DETECTIONS = f"{shard_name('detections', 0, 1)}.jsonl"
DEAD = f"{shard_name('dead_letters', 0, 1)}.jsonl"
ARCHIVED = archive_name("detections", "20261121T020000Z", "0a1b2c3d", 0, 1)
MAKER = Provenance("aaaaaaaa", "bbbbbbbb", "m", "3")
NONE = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.int32), np.zeros(0, np.float32), ())


def detected(uri, generation="1", model="m", version="3"):
    return row_bytes(detection_row(DetectedImage(ImageRef(uri, generation), 10, 20, model, version, NONE))) + b"\n"


def dead(uri, generation="1", reason="corrupt", stage="decode"):
    return row_bytes(dead_letter_row(DeadLetter(ImageRef(uri, generation), stage, reason, "said"))) + b"\n"


def write(output, name, lines, provenance=MAKER):
    """Writes a file of rows, and its index where its provenance is known."""
    write_file(f"{output}/{name}", b"".join(lines))
    if provenance:
        write_index(name, str(output), provenance, f"{output}/.staging-x")
