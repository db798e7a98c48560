"""Dead letters in shards: which images they ask for, what of them travels, and what a stranger's letter cannot do."""

import json
import os

import pyarrow as pa
import pytest

from pipeline.listing.dead_letter_replay import DeadLetterReplay, are_letters
from pipeline.log_lines import log_lines
from pipeline.records import DeadLetter, EncodedImage, ImageRef
from pipeline.results.compact import compact
from pipeline.results.layout import DEAD_LETTERS
from pipeline.results.rows import dead_letters_table
from pipeline.results.shards import write_shard
from pipeline.stream.messages import Message, parse_message, replay_message
from tests.shard_rows import VERSION, write_rows

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 40
PICTURE = DeadLetter(ImageRef("inline:cam.png", "ab12", extra='{"camera": 7}'), "detect", "model_failed", "no", PNG)


def replay_of(output, *folders, again=False):
    return DeadLetterReplay(f"{output}", folders, replay_message, again)


def letter(uri="", stage="read", reason="not_found", payload=b"", **more):
    return DeadLetter(ImageRef(uri, **more), stage, reason, "no", payload)


def message(value):
    return letter(stage="message", reason="not_allowed", payload=json.dumps(value).encode())


def outcomes(replay):
    """The names that are read again, and what the dead letters with contents become."""
    refs = list(replay.refs_in_results())
    opened = [each for ref in refs if are_letters(ref.uri) for each in replay.open()]
    return [ref.uri for ref in refs if not are_letters(ref.uri)], opened


def test_named_images_are_read_by_name_and_carried_ones_from_their_row(tmp_path):
    letters = [
        letter("in/a.png"),
        letter("in/b.png", record="in/x.tfrecord@0-10"),
        PICTURE,
        message({"uri": "in/c.png"}),
        message({"uri": "gs://other/d.png"}),
        letter(stage="message", reason="bad_json", payload=b"{"),
        letter("elsewhere/e.png"),
    ]
    write_rows(f"{tmp_path}", letters=letters)
    write_rows(f"{tmp_path}", letters=[PICTURE], run="0a1c")  # tried once
    named, opened = outcomes(replay_of(tmp_path, "in"))
    assert named == ["in/a.png", "in/x.tfrecord@0-10", os.path.abspath("in/c.png")]
    images = [each for each in opened if isinstance(each, EncodedImage)]
    assert [(image.ref.uri, image.ref.extra, image.content) for image in images] == [("inline:cam.png", '{"camera": 7}', PNG)]
    dead = [(each.ref.uri, each.reason) for each in opened if isinstance(each, DeadLetter)]
    assert dead == [("gs://other/d.png", "not_allowed"), ("elsewhere/e.png", "not_allowed")]
    _, opened = outcomes(replay_of(tmp_path, "in", again=True))
    assert [each.reason for each in opened if isinstance(each, DeadLetter)] == ["not_allowed", "bad_json", "not_allowed"]


@pytest.mark.parametrize("data", ["{", "hello", '{"images":[]}', '{"uri":5}', "[1, 2]", '{"bytes":"!!!"}'])
def test_a_message_that_is_refused_for_good_is_left_out(tmp_path, data):
    """A nightly replay would else fail for ever after one malformed message, and add its dead letters anew."""
    letters = parse_message(Message(data.encode()), ("in",)).dead_letters
    write_rows(f"{tmp_path}", letters=letters)
    assert outcomes(replay_of(tmp_path, "in")) == ([], [])
    _, opened = outcomes(replay_of(tmp_path, "in", again=True))
    assert [each.stage for each in opened] == ["message"] * len(letters)


def test_a_compaction_that_takes_a_shard_away_loses_no_letter(tmp_path):
    for uri in ("in/a.png", "in/b.png"):
        write_rows(f"{tmp_path}", letters=[letter(uri), PICTURE])
    replay = replay_of(tmp_path, "in")
    refs = replay.refs_in_results()
    first = next(refs)
    compact(f"{tmp_path}")
    *named, _ = [first, *refs]
    assert {ref.uri for ref in named} == {"in/a.png", "in/b.png"}
    write_rows(f"{tmp_path}", letters=[DeadLetter(ImageRef("inline:b.png", "cd34"), "detect", "model_failed", "no", PNG[:-1])])
    images = replay.open()
    first = next(images)
    compact(f"{tmp_path}")
    assert sorted(image.ref.uri for image in (first, *images)) == ["inline:b.png", "inline:cam.png"]


def test_a_letter_of_a_stranger_opens_no_file_of_his_choice(tmp_path):
    forged = "/etc/dead_letters/"
    planted = [letter(forged), message({"uri": forged, "/etc/x": 1, "a": 2, "b": 3}), letter("in/../shadow")]
    planted += [letter("/shadow"), letter("x", record="/shadow"), letter("x", record="/shadow@0-25")]  # the first two are one
    write_rows(f"{tmp_path}", letters=planted)
    named, opened = outcomes(replay_of(tmp_path, "in"))
    assert named == [] and [each.reason for each in opened] == ["not_allowed"] * 5


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(pa.table({"key": pa.array([1], pa.uint64()), "stage": ["read"]}), id="other columns"),
        pytest.param(dead_letters_table([letter("a.png", reason="made_up")], VERSION, "r", 1.0), id="unknown reason"),
    ],
)
@log_lines()
def test_what_is_no_dead_letter_ends_its_shard_with_one_line(tmp_path, table, capsys):
    write_shard(f"{tmp_path}", DEAD_LETTERS, table, "0a1b")
    write_rows(f"{tmp_path}", letters=[letter("in/a.png")], run="0a1c")
    assert [ref.uri for ref in replay_of(tmp_path, "in").refs_in_results()] == ["in/a.png"]
    assert capsys.readouterr().err.count("\n") == 1


def test_an_extra_that_nests_too_deep_is_left_out_of_its_letter(tmp_path):
    write_rows(f"{tmp_path}", letters=[letter("in/a.png", extra="[" * 100_000)])
    assert [(ref.uri, ref.extra) for ref in replay_of(tmp_path, "in").refs_in_results()] == [("in/a.png", "")]
