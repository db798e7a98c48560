"""The ledger: what is done is read from the rows, or from the indexes beside them, and both say the same."""

import json
import os

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pipeline.config import load_config
from pipeline.failures import FOR_GOOD, MAY_PASS, REASONS
from pipeline.records import DeadLetter, ImageRef, dead_letter_row, row_bytes
from pipeline.results import ledger
from pipeline.results.completion import UNKNOWN, CompletionRule, Entry, Provenance
from pipeline.results.layout import index_name
from pipeline.results.ledger import key_of, list_files_of_rows, read_entries, read_keys
from pipeline.storage.files import write_file
from tests.ledger_rows import ARCHIVED, DEAD, DETECTIONS, MAKER, dead, detected, write


def settings(**changes):
    """All settings of a job, as a summary has them."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return load_config([], {"input": ["photos/"], "output": "out", **changes}).as_dict()


def entries(output):
    return [entry for file in list_files_of_rows(str(output)) for entry in read_entries(file)]


def keys(output, done):
    return {(int(a), int(b)) for file in list_files_of_rows(str(output)) for part in read_keys(file, done) for a, b in part}


def test_an_empty_folder_has_no_entry(tmp_path):
    assert list_files_of_rows(f"{tmp_path}/absent") == []


def test_rows_of_batch_jobs_and_streams_are_found_and_what_others_put_there_is_not(tmp_path):
    for name in (DETECTIONS, DEAD, ARCHIVED, "detections/mine.jsonl", "detections/deep/detections-00000-of-00001.jsonl"):
        write_file(f"{tmp_path}/{name}", b"{}\n")
    found = list_files_of_rows(str(tmp_path))
    assert [(file.path, file.kind) for file in found] == [
        (f"{tmp_path}/{DETECTIONS}", "detections"),
        (f"{tmp_path}/{ARCHIVED}", "detections"),
        (f"{tmp_path}/{DEAD}", "dead_letters"),
    ]
    assert [(file.size_bytes, file.index_path) for file in found] == [(3, "")] * 3


@pytest.mark.parametrize("place", ["local", "gs"])
def test_entries_are_the_same_with_and_without_an_index_but_for_what_rows_do_not_say(place, tmp_path, request):
    output = tmp_path if place == "local" else f"gs://{request.getfixturevalue('gcs_bucket').name}/out[1]"
    write(output, DETECTIONS, [detected("a.jpg"), detected("\udc80.jpg", "2", "other", "4")])
    write(output, DEAD, [dead("b.jpg"), dead("c.jpg", "", "not_found", "read")])
    indexed = entries(output)
    assert indexed == [
        Entry("a.jpg", "1", "detections", "m", "3", "aaaaaaaa", ""),
        Entry("\udc80.jpg", "2", "detections", "other", "4", "aaaaaaaa", ""),
        Entry("b.jpg", "1", "dead_letters", "m", "3", "bbbbbbbb", "corrupt"),
        Entry("c.jpg", "", "dead_letters", "m", "3", "bbbbbbbb", "not_found"),
    ]
    parsed = [entry for file in list_files_of_rows(str(output)) for entry in read_entries(file._replace(index_path=""))]
    unknown = {"settings": ""}
    assert parsed == [
        *(entry._replace(**unknown) for entry in indexed[:2]),
        *(entry._replace(model="", version="", **unknown) for entry in indexed[2:]),
    ]
    assert keys(output, CompletionRule(MAKER)) == {key_of("a.jpg", "1"), key_of("b.jpg", "1")}


def test_what_another_version_failed_on_is_not_done_by_this_one(tmp_path):
    """A version came while the job worked: its dead letters name it, those that came to no model do not."""
    letter = DeadLetter(ImageRef("a.jpg", "1"), "detect", "model_failed", "no", model_name="m", model_version="4")
    write(tmp_path, DEAD, [row_bytes(dead_letter_row(letter)) + b"\n", dead("b.jpg")])
    assert [(entry.uri, entry.model, entry.version) for entry in entries(tmp_path)] == [("a.jpg", "m", "4"), ("b.jpg", "m", "3")]
    assert keys(tmp_path, CompletionRule(MAKER)) == {key_of("b.jpg", "1")}
    assert keys(tmp_path, CompletionRule(MAKER._replace(version="4"))) == {key_of("a.jpg", "1")}


@pytest.mark.parametrize(
    "harm",
    [
        lambda index: index.unlink(),
        lambda index: index.write_bytes(b""),
        lambda index: index.write_bytes(index.read_bytes()[:-9]),
        lambda index: index.write_bytes(b"PAR1" + bytes(100) + b"PAR1"),
    ],
    ids=["gone", "empty", "cut", "broken"],
)
def test_an_index_that_is_damaged_is_none(harm, tmp_path):
    write(tmp_path, DETECTIONS, [detected("a.jpg")])
    harm(tmp_path / index_name(DETECTIONS))
    assert [(entry.uri, entry.settings) for entry in entries(tmp_path)] == [("a.jpg", "")]
    assert keys(tmp_path, CompletionRule(MAKER)) == set()


def test_an_index_counts_only_for_the_rows_that_it_was_made_for(tmp_path):
    """Killed between rows and index, or changed by hand: what stands in the rows is what is done, and nothing else."""
    write(tmp_path, DETECTIONS, [detected("a.jpg"), detected("b.jpg")])
    write_file(f"{tmp_path}/{DETECTIONS}", detected("a.jpg"))
    assert [(entry.uri, entry.settings) for entry in entries(tmp_path)] == [("a.jpg", "")]
    assert keys(tmp_path, CompletionRule(MAKER)) == set()


def test_an_index_without_rows_is_nothing(tmp_path):
    write(tmp_path, DETECTIONS, [detected("a.jpg")])
    os.remove(tmp_path / DETECTIONS)
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"no json\n",
        b"[]\n",
        b'{"image": "a.jpg"}\n',
        b'{"image": {}}\n',
        b'{"image": {"uri": "a.jpg", "generation": "1"\n',
        b'{"image": {"uri": "a.jpg"}, "model": 3}\n',
        b"\xff\n",
    ],
)
def test_a_line_that_is_no_row_is_no_entry(line, tmp_path):
    for provenance in (MAKER, None):
        write(tmp_path, DETECTIONS, [detected("a.jpg"), line, detected("b.jpg")], provenance)
        assert [entry.uri for entry in entries(tmp_path)] == ["a.jpg", "b.jpg"]


def test_a_row_that_somebody_else_wrote_in_another_order_is_understood(tmp_path):
    row = {"model": {"version": "3", "name": "m"}, "detections": [], "image": {"generation": "1", "uri": "a.jpg"}}
    write(tmp_path, DETECTIONS, [json.dumps(row, indent=None, separators=(",", ":")).encode() + b"\n"])
    assert keys(tmp_path, CompletionRule(MAKER)) == {key_of("a.jpg", "1")}


names = st.text(st.characters(), min_size=1, max_size=8)


@pytest.mark.slow
@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(names, names, names, names), max_size=12), at_once=st.integers(1, 5))
def test_whatever_names_are_made_of_the_index_says_what_the_rows_say(rows, at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "_ROWS_AT_ONCE", at_once)
    write(tmp_path, DETECTIONS, [detected(*row) for row in rows])
    (file,) = list_files_of_rows(str(tmp_path))
    indexed, parsed = list(read_entries(file)), list(read_entries(file._replace(index_path="")))
    assert [entry[:3] for entry in indexed] == [entry[:3] for entry in parsed] == [(row[0], row[1], "detections") for row in rows]
    done = CompletionRule(MAKER._replace(model=rows[0][2], version=rows[0][3])) if rows else CompletionRule(MAKER)
    assert keys(tmp_path, done) == {key_of(entry.uri, entry.generation) for entry in indexed if done.is_complete(entry)}


class TestDone:
    @pytest.mark.parametrize(
        ("changes", "covered"),
        [
            ({}, True),
            ({"model": "other"}, False),
            ({"version": "4"}, False),
            ({"settings": "cccccccc"}, False),
            ({"settings": ""}, False),
            ({"kind": "dead_letters", "reason": "corrupt"}, False),
            ({"kind": "dead_letters", "reason": "corrupt", "settings": "bbbbbbbb"}, True),
            ({"kind": "dead_letters", "reason": "not_found", "settings": "bbbbbbbb"}, False),
        ],
        ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else "",
    )
    def test_a_row_covers_its_model_version_and_settings(self, changes, covered):
        entry = Entry("a.jpg", "1", "detections", "m", "3", "aaaaaaaa", "")._replace(**changes)
        assert CompletionRule(MAKER).is_complete(entry) is covered

    def test_what_is_not_known_is_never_done(self):
        assert not CompletionRule(UNKNOWN).is_complete(Entry("a.jpg", "1", "detections", "", "", "", ""))

    def test_each_reason_either_may_pass_or_is_for_good(self):
        every = {reason for reasons in REASONS.values() for reason in reasons}
        assert every == MAY_PASS | FOR_GOOD and not MAY_PASS & FOR_GOOD


class TestMaker:
    @pytest.mark.parametrize(
        ("changes", "detections", "dead_letters"),
        [
            ({"write__shards": 3, "input": ["other/"], "mode": "streaming", "stream__pull_images": 3}, True, True),
            ({"detect__precision": "bfloat16", "detect__concurrent_batches": 2, "detect__scaled_decode": False}, True, True),
            ({"model__path": "/models/yolov4", "model__name": "mine"}, True, True),
            ({"model__model_version": "7", "model__model_poll_s": 1.0}, True, True),
            ({"detect__max_megapixels": 50.0}, True, False),
            ({"read__max_file_mb": 1.0}, True, False),
            ({"detect__score_threshold": 0.5}, False, False),
            ({"detect__iou_threshold": 0.5}, False, False),
            ({"detect__classes": ["dog"]}, False, False),
            ({"detect__max_detections": 5}, False, False),
            ({"model__resize": "stretch"}, False, False),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_settings_count_as_far_as_they_change_rows(self, changes, detections, dead_letters):
        """Name and version of the model stand in the rows, and are compared there."""
        one, other = Provenance.of(settings()), Provenance.of(settings(**changes))
        assert (one.detections == other.detections, one.dead_letters == other.dead_letters) == (detections, dead_letters)

    def test_the_order_of_classes_changes_no_row(self):
        assert Provenance.of(settings(detect__classes=["a", "b"])) == Provenance.of(settings(detect__classes=["b", "a"]))

    def test_a_summary_that_was_read_again_says_the_same(self):
        assert Provenance.of(json.loads(row_bytes(settings(detect__classes=["a"])))) == Provenance.of(
            settings(detect__classes=["a"])
        )
