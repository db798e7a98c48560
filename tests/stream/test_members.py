"""Containers that messages name."""

import io
import json
import tarfile

import apache_beam as beam

from pipeline.stream.messages import Message
from pipeline.stream.shared import RunSettings
from pipeline.stream.shared import opened as stream_opened
from pipeline.stream.steps import ParseMessages
from tests.listing.running import run
from tests.listing.test_read_images import opened  # noqa: F401  a fixture


def test_members_that_a_message_names_are_read_in_one_pass_of_their_archive(tmp_path, opened):  # noqa: F811
    path = f"{tmp_path}/a.tar"
    with tarfile.open(path, "w") as archive:
        for number in range(200):
            member = tarfile.TarInfo(f"{number}.jpg")
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))
    entries = [{"uri": f"{path}#{name}.jpg", "camera": name} for name in ("7", "3", "150", "gone")]
    message = Message(json.dumps({"images": entries}).encode(), message_id="m")
    with stream_opened(RunSettings("members")) as stream:
        parsing = beam.ParDo(ParseMessages((f"{tmp_path}/",), stream.settings)).with_outputs("dead", main="images")
        opened.clear()
        found = run(lambda pipeline: dict(zip(("images", "dead"), pipeline | beam.Create([message]) | parsing, strict=False)))
    images = sorted(found["images"], key=lambda image: int(image.ref.uri.rpartition("#")[2][:-4]))
    assert [image.ref.uri for image in images] == [f"{path}#{number}.jpg" for number in (3, 7, 150)]
    assert [json.loads(image.ref.extra) for image in images] == [{"camera": name} for name in ("3", "7", "150")]
    (letter,) = found["dead"]
    assert (letter.ref.uri, letter.reason, letter.ref.message_id) == (f"{path}#gone.jpg", "not_found", "m")
    assert opened.count(path) == 2, "Python's open with an opener is two events"
