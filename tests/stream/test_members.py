"""Containers that messages name."""

import io
import json
import tarfile

import apache_beam as beam

from pipeline.listing.list_images import list_images
from pipeline.stream.messages import Message
from pipeline.stream.shared import RunSettings
from pipeline.stream.shared import opened as stream_opened
from pipeline.stream.steps import ParseMessages
from tests.listing.running import run
from tests.listing.test_read_images import opened  # noqa: F401  a fixture


def test_objects_whose_names_have_control_characters_are_dead_letters_or_skipped_as_in_batch(gcs_bucket):
    """Notifications need not tell the size of their object."""
    for name, content in {
        "\x1b[31m.jpg": b"x",
        "a\tb": b"\xff\xd8\xff\xe0",
        "c\td.txt": b"x",
        "\x7f.tar": b"x",
        "empty": b"",
    }.items():
        gcs_bucket.blob(f"in/{name}").upload_from_string(content)
    of_object = {"eventType": "OBJECT_FINALIZE", "bucketId": gcs_bucket.name}
    messages = [
        Message(b"{}", {**of_object, "objectId": blob.name, "objectGeneration": str(blob.generation)})
        for blob in gcs_bucket.list_blobs(prefix="in/")
    ]
    skipped = []
    of_batch = list(list_images([f"gs://{gcs_bucket.name}/in/"], leave_out=skipped.append))
    with stream_opened(RunSettings("names")) as stream:
        parsing = beam.ParDo(ParseMessages((f"gs://{gcs_bucket.name}/",), stream.settings)).with_outputs("dead", main="images")
        found = run(lambda pipeline: dict(zip(("images", "dead"), pipeline | beam.Create(messages) | parsing, strict=False)))

    def known(letters):
        return {(each.ref.uri, each.ref.generation, each.stage, each.reason, each.message, each.payload) for each in letters}

    assert (found["images"], known(found["dead"]), skipped) == ([], known(of_batch), [".txt", "no ending"])
    assert len(of_batch) == 3


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
