"""Records in a runner's state: a release reads what an earlier one wrote, and nothing that is read there can run."""

import pickle
import subprocess
import sys
from pathlib import Path

import apache_beam as beam
import msgspec
import numpy as np
import pytest
from apache_beam.coders import TupleCoder, registry
from apache_beam.typehints import Union

from pipeline.codec import RecordCoder, pack
from pipeline.records import DeadLetter, DetectedImage, Detections, EncodedImage, ImageRef, Timing
from pipeline.stream import deduplicate
from tests.fixtures import REPO

GOLDEN = Path(__file__).parent / "golden" / "records"
REF = ImageRef("gs://bucket/\udc80 ä.jpg", "17", 3, 1795226400.5, "request", "message", '{"camera": 7}')
FOUND = Detections(
    np.array([[0.5, 1, 20, 30], [-4, 0, 8, 9]], np.float32),
    np.array([2, 0], np.int32),
    np.array([0.75, 0.5], np.float32),
    ("ä", "b"),
)
RECORDS = {
    "image_ref": REF,
    "encoded_image": EncodedImage(REF, bytes(range(256)), 0.25, 1795226401.0),
    "detected_image": DetectedImage(REF, 640, 480, "m", "7", FOUND, Timing(0.1, 0.2, 0.3, 0.4, 1.0, 2.0, 16, 0.5), b"\xff\xd8"),
    "dead_letter": DeadLetter(REF, "read", "not_found", "it is gone", b"\x00payload", "m", "7"),
}


def plain(record):
    """A record in a form that `==` compares."""
    return msgspec.to_builtins(record, enc_hook=np.ndarray.tolist)


@pytest.mark.parametrize("name", RECORDS)
def test_bytes_of_this_release_and_of_the_first_one_with_this_format_are_read(name):
    """The files are never written anew: a runner's state has such bytes when a job is updated."""
    for content in ((GOLDEN / f"{name}.bin").read_bytes(), RecordCoder().encode(RECORDS[name])):
        record = RecordCoder().decode(content)
        assert type(record) is type(RECORDS[name])
        assert plain(record) == plain(RECORDS[name])


def test_an_earlier_and_a_later_release_read_each_others_records():
    """A field that the reader does not know is ignored, one that the writer did not know has its default."""
    fields = {"ref": {"uri": "a.jpg"}, "content": b"\xff", "depth": 3}
    assert RecordCoder().decode(b"EncodedImage:" + pack(fields)) == EncodedImage(ImageRef("a.jpg"), b"\xff")


FIRST_READ_BY_MANY = """
import dataclasses, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pipeline.codec import pack, unpack
sys.setswitchinterval(1e-6)
together = threading.Barrier(8)
def read(kind):
    together.wait()
    return unpack(kind, pack({}))
with ThreadPoolExecutor(8) as pool:
    for number in range(200):
        inner = dataclasses.make_dataclass("Inner", [(f"f{n}", int, n) for n in range(20)])
        kind = dataclasses.make_dataclass("Kind", [(f"f{n}", inner, dataclasses.field(default_factory=inner)) for n in range(9)])
        assert [*pool.map(read, [kind] * 8)] == [kind()] * 8
"""


@pytest.mark.slow
def test_threads_that_meet_a_type_for_the_first_time_read_it():
    """Workers' threads do, and those of whoever reads their reports; msgspec's own `decode` crashes the process here."""
    subprocess.run([sys.executable, "-c", FIRST_READ_BY_MANY], cwd=REPO, check=True)


OBJECT = {"boxes_xyxy": ["float32", [1, 4], bytes(16)], "class_ids": ["int32", [1], bytes(4)], "class_names": ["a"]}


def of_confidences(array):
    """The bytes of a record with these confidences of one object."""
    image = {"ref": {"uri": "a"}, "width": 1, "height": 1, "model_name": "", "model_version": ""}
    return b"DetectedImage:" + pack(image | {"detections": OBJECT | {"confidences": array}})


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(pickle.dumps(REF), id="a pickle"),
        pytest.param(b"ImageRef:" + pickle.dumps(REF), id="a pickle with a name"),
        pytest.param(RecordCoder().encode(REF)[:-9], id="cut off"),
        pytest.param(of_confidences(["float32", [2], bytes(4)]), id="bytes that are not there"),
        pytest.param(of_confidences(["float32", [2], bytes(8)]), id="arrays of two lengths"),
        pytest.param(of_confidences(["object", [1], bytes(8)]), id="an array of objects"),
        pytest.param(b"Popen:" + pack({}), id="of no record"),
        pytest.param(b"ImageRef:\x02" + b"\x91" * 65535, id="deep"),
        pytest.param(b"ImageRef:\x03" + pack({"uri": "\u20ac"})[1:], id="no escaped text"),
    ],
)
def test_what_is_no_record_is_refused(content):
    assert len(RecordCoder().decode(of_confidences(["float32", [1], bytes(4)])).detections) == 1
    with pytest.raises(ValueError, match="expected a"):
        RecordCoder().decode(content)


def test_steps_that_say_that_they_give_records_have_this_coder():
    assert deduplicate  # importing any module of a stream registers it
    assert registry.get_coder(ImageRef) == RecordCoder()
    assert registry.get_coder(Union[ImageRef, EncodedImage]) == RecordCoder()
    coder = registry.get_coder(beam.typehints.Tuple[bytes, Union[ImageRef, EncodedImage]])
    assert isinstance(coder, TupleCoder) and coder.coders()[1] == RecordCoder()
    assert not isinstance(registry.get_coder(Union[str, ImageRef]), RecordCoder)
