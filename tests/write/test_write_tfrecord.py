"""TFRecord files hold the rows of the JSON contract under the keys of the TF Object Detection API."""

import io

import numpy as np
import pytest

from pipeline.read.tfrecords import images_of_file, read_records
from pipeline.records import ImageRef
from pipeline.write.write_tfrecord import write_tfrecord

FOUND = {"box_xyxy": [1.0, -5.0, 5.0, 30.0], "class_id": 1, "class_name": "kätzchen", "confidence": 0.5}
OTHER = {"box_xyxy": [0.0, 0.0, 2.5, 20.0], "class_id": 0, "class_name": "dog", "confidence": 0.25}
BOXES = ("ymin", "xmin", "ymax", "xmax")


def row(uri, detections):
    image = {"uri": uri, "generation": "1", "width": 10, "height": 20}
    return {"image": image, "model": {"name": "m", "version": ""}, "detections": detections}


def written(path, rows):
    """What the pipeline's own reader finds in the file that is made of these rows."""
    with open(path, "wb") as file:
        write_tfrecord(rows, file)
    return [record.content for record in read_records(io.BytesIO(path.read_bytes()), str(path), 1 << 20)]


@pytest.mark.parametrize("rows", [0, 1, 2000, 4001])
def test_each_row_is_a_record_that_tensorflow_parses(tmp_path, rows):
    import tensorflow as tf

    detections = [[], [FOUND], [FOUND, OTHER]]
    uris = [f"ä{number}.jpg" for number in range(rows)]
    examples = written(tmp_path / "rows.tfrecord", [row(uri, detections[n % 3]) for n, uri in enumerate(uris)])
    assert len(examples) == rows
    assert [record.numpy() for record in tf.data.TFRecordDataset([str(tmp_path / "rows.tfrecord")])] == examples
    if not rows:
        return
    one = {name: tf.io.FixedLenFeature([], tf.int64) for name in ("image/width", "image/height")}
    names = {name: tf.io.FixedLenFeature([], tf.string) for name in ("image/source_id", "image/filename")}
    numbers = {f"image/{kind}/bbox/{side}": tf.float32 for kind in ("object", "detection") for side in BOXES}
    numbers |= {"image/object/class/text": tf.string, "image/object/class/label": tf.int64}
    numbers |= {"image/detection/label": tf.int64, "image/detection/score": tf.float32}
    parsed = tf.io.parse_example(examples, {**one, **names, **{name: tf.io.RaggedFeature(of) for name, of in numbers.items()}})
    for name in names:
        assert parsed.pop(name).numpy().tolist() == [uri.encode() for uri in uris]
    assert (set(parsed.pop("image/width").numpy()), set(parsed.pop("image/height").numpy())) == ({10}, {20})
    expected = [(np.float32(0.1), 0.0), (0.0, 0.0), (0.5, 0.25), (1.0, 1.0)]  # xmin, ymin, xmax, ymax, cut at the edges
    for kind in ("object", "detection"):
        for side, both in zip(("xmin", "ymin", "xmax", "ymax"), expected, strict=True):
            assert parsed.pop(f"image/{kind}/bbox/{side}").to_list() == [list(both[: n % 3]) for n in range(rows)], side
    for name, both in {
        "image/object/class/text": ("kätzchen".encode(), b"dog"),
        "image/object/class/label": (2, 1),
        "image/detection/label": (2, 1),
        "image/detection/score": (0.5, 0.25),
    }.items():
        assert parsed.pop(name).to_list() == [list(both[: n % 3]) for n in range(rows)], name
    assert parsed == {}


@pytest.mark.parametrize(
    "uri", ["gs://bucket/ä b.jpg", "\udcff\udc80.jpg", pytest.param("\ud800.jpg", id="no file's name")], ids=ascii
)
def test_an_image_keeps_its_name_for_our_own_reader(tmp_path, uri):
    """The pixels are not in it, and the reader says so under the image's name."""
    written(tmp_path / "rows.tfrecord", [row(uri, [FOUND])])
    (letter,) = images_of_file(ImageRef(f"{tmp_path}/rows.tfrecord"), 1 << 20)
    name = uri if uri != "\ud800.jpg" else "\\ud800.jpg"
    assert (letter.ref.uri, letter.reason) == (name, "no_image")
