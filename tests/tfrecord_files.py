"""TFRecord files, written by TensorFlow."""

import struct

import google_crc32c

from tests.without_keras import tf


def feature(*values):
    if values and isinstance(values[0], int):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    if values and isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def example(**features):
    """A serialized example; `image_encoded` is the key `image/encoded`."""
    named = {
        name.replace("_", "/", 1): feature(*value) if isinstance(value, tuple) else feature(value)
        for name, value in features.items()
    }
    return tf.train.Example(features=tf.train.Features(feature=named)).SerializeToString()


def write(path, *records, options=None):
    """By TensorFlow itself, so that the framing is what others write."""
    with tf.io.TFRecordWriter(str(path), options=options) as writer:
        for record in records:
            writer.write(record)
    return path


def masked(content):
    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(content, length=None):
    """A record; its length may be a lie that its checksum confirms."""
    head = struct.pack("<Q", len(content) if length is None else length)
    return head + masked(head) + content + masked(content)
