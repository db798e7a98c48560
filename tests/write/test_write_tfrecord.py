"""TFRecord files hold the rows of the JSON contract under the keys of the TF Object Detection API."""

import numpy as np
import pytest

from pipeline.read.tfrecords import images_of_file
from pipeline.records import ImageRef
from pipeline.write.write_tfrecord import write_tfrecord
from tests.shard_rows import json_row

FOUND = ([1.0, -5.0, 5.0, 30.0], 1, "kätzchen", 0.5)
OTHER = ([0.0, 0.0, 2.5, 20.0], 0, "dog", 0.25)


def row(uri, *found):
    return json_row(uri, *found, wh=(10, 20))


def written(path, rows):
    """The records that TensorFlow's reader finds in the file that is made of these rows."""
    import tensorflow as tf

    with open(path, "wb") as file:
        write_tfrecord(rows, file)
    return [record.numpy() for record in tf.data.TFRecordDataset([str(path)])]


def test_each_row_is_a_record_that_tensorflow_parses(tmp_path):
    import tensorflow as tf

    path = tmp_path / "rows.tfrecord"
    examples = written(path, [row("ä.jpg", FOUND, OTHER), row("none.jpg")])
    features = [tf.train.Example.FromString(each).features.feature for each in examples]
    both, none = (
        {name: list(getattr(of[name], of[name].WhichOneof("kind") or "int64_list").value) for name in of} for of in features
    )
    corners = {"xmin": [np.float32(0.1), 0.0], "ymin": [0.0, 0.0], "xmax": [0.5, 0.25], "ymax": [1.0, 1.0]}  # cut at the edges
    of_image = {"image/source_id": ["ä.jpg".encode()], "image/filename": ["ä.jpg".encode()], "image/width": [10]}
    of_objects = {
        **{f"image/{kind}/bbox/{side}": shares for kind in ("object", "detection") for side, shares in corners.items()},
        "image/object/class/text": ["kätzchen".encode(), b"dog"],
        "image/object/class/label": [2, 1],
        "image/detection/label": [2, 1],
        "image/detection/score": [0.5, 0.25],
    }
    assert both == {**of_image, "image/height": [20], **of_objects}
    assert not any(none[name] for name in of_objects)


@pytest.mark.parametrize(
    "uri", ["gs://bucket/ä b.jpg", "\udcff\udc80.jpg", pytest.param("\ud800.jpg", id="no file's name")], ids=ascii
)
def test_an_image_keeps_its_name_for_our_own_reader(tmp_path, uri):
    """The pixels are not in it, and the reader says so under the image's name."""
    written(tmp_path / "rows.tfrecord", [row(uri, FOUND)])
    (letter,) = images_of_file(ImageRef(f"{tmp_path}/rows.tfrecord"), 1 << 20)
    name = uri if uri != "\ud800.jpg" else "\\ud800.jpg"
    assert (letter.ref.uri, letter.reason) == (name, "no_image")
