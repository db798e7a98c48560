"""Listing and ledger side by side: each image that is listed has one status."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import reconcile as reconciled
from pipeline.reconcile import Found, reconcile
from pipeline.results.completion import RowVersion
from pipeline.results.layout import DETECTIONS
from tests.shard_rows import VERSION, detected, failed, write_rows

OTHER = RowVersion("yolo", "8", "ab12cd34", "cd34ab12")
SECOND = 1_700_000_000


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(name, version=1):
    """Makes a file; its generation, which says the version."""
    os.makedirs(os.path.dirname(name), exist_ok=True)
    with open(name, "wb") as file:
        file.write(b"\xff\xd8\xff" + b"x" * version)  # what begins like an image is one whatever its name
    os.utime(name, (SECOND, SECOND))
    return f"{version + 3}-{SECOND}000000000"


def put_rows(images, letters=(), *, version=VERSION, output="out"):
    """Writes rows of images, each a name with its generation."""
    write_rows(
        output,
        [detected(absolute(uri), *more, version=version) for uri, *more in images],
        [failed(absolute(uri), *more) for uri, *more in letters],
        version=version,
    )


def statuses(*patterns, model=None, output="out"):
    """Each image's status, and the outcome."""
    told: list[Found] = []
    outcome = reconcile(patterns or ("in/**",), output, model, told.append)
    assert len(told) == len(set(told))
    return {(found.status, found.uri.removeprefix(f"{os.getcwd()}/")) for found in told}, outcome


def absolute(uri):
    """The URI of an image, which lies in the current folder if it is named `in/…`."""
    return f"{os.getcwd()}/{uri}" if uri.startswith("in/") else uri


def test_rows_of_other_images_count_only_where_the_pattern_names_them(folder):
    now = put("in/a")
    put_rows([("in/gone\udc80", now), ("in/gone\udc80", "0-1"), ("elsewhere/a", "1"), ("inline:a", "1")])
    assert statuses()[0] == {("missing", "in/a"), ("orphaned", "in/gone\udc80")}


def test_only_rows_of_a_named_model_count(folder):
    now = put("in/a")
    put_rows([("in/a", now)])
    assert statuses(model=("yolo", "7"))[0] == {("done", "in/a")}
    assert statuses(model=("yolo", "8"))[0] == {("missing", "in/a")}
    put_rows([("in/a", now)], version=OTHER)
    assert statuses()[0] == {("done", "in/a")}


def test_a_manifest_names_images_of_any_generation_and_no_orphans(folder):
    put("in/a")
    (folder / "list.txt").write_text("in/a\nin/b\ngs://b/c\n")
    put_rows([("in/a", "0-1"), ("in/other", "1")], [("gs://b/c", "7")])
    assert statuses("list.txt")[0] == {("done", "in/a"), ("missing", "in/b"), ("dead", "gs://b/c")}


def test_an_image_that_several_inputs_name_counts_once_however_few_are_compared_at_once(folder, monkeypatch):
    monkeypatch.setattr(reconciled, "_AT_ONCE", 2)
    for number in range(9):
        put(f"in/{number}")
    assert statuses("in/**", "in/[0-4]", "in/3")[1].listed == 9


def test_what_is_complete(folder):
    now = put("in/a")
    put_rows([], [("in/a", now)])
    assert statuses()[1].is_complete, "permanently dead is done"
    put("in/b")
    assert not statuses()[1].is_complete
    write_rows(
        "other", letters=[failed(f"{folder}/in/a", stage="read", reason="storage_unavailable"), failed(f"{folder}/in/b", "")]
    )
    outcome = statuses("in/b", output="other")[1]
    assert (outcome.transient, outcome.is_complete) == (0, True)
    write_rows("other", letters=[failed(f"{folder}/in/b", "", stage="read", reason="storage_unavailable")], made_at=2e9)
    outcome = statuses("in/b", output="other")[1]
    assert (outcome.transient, outcome.is_complete) == (1, False)


def test_tfrecord_files_and_results_are_no_images(folder):
    put("in/a.tfrecord")
    put_rows([("x", "1")], output="in")
    outcome = reconcile(["in/**"], "in")
    assert (outcome.listed, outcome.counts) == (0, {"left out": 1})


def test_a_shard_that_a_compaction_takes_away_meanwhile_is_an_error_and_no_missing_image(folder):
    """The command then compares again."""
    for name in ("in/a", "in/b"):
        put_rows([(name, "1")])
    rows = reconciled._rows("out", DETECTIONS, None)
    next(rows)
    for shard in (folder / "out" / "detections").glob("*.parquet"):
        shard.unlink()
    with pytest.raises(FileNotFoundError):
        list(rows)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_all_that_is_listed_has_one_status_however_few_are_compared_at_once(tmp_path_factory, data):
    names = [f"{n:02d}" for n in range(12)]
    there = data.draw(st.sets(st.sampled_from(names)))
    old, now, twice, *letters = (data.draw(st.sets(st.sampled_from(names))) for _ in range(6))
    of_any, of_this, of_older = letters
    root = tmp_path_factory.mktemp("reconcile")
    generations = {name: put(f"{root}/in/{name}") for name in there}
    put_rows([(f"{root}/in/{name}", "0-1") for name in old], output=f"{root}/out")
    for some in (now, twice):
        put_rows([(f"{root}/in/{name}", generations.get(name, "9-9")) for name in some], output=f"{root}/out")
    put_rows([], [(f"{root}/in/{name}", "") for name in of_any], output=f"{root}/out")
    put_rows([], [(f"{root}/in/{name}", generations.get(name, "9-9")) for name in of_this], output=f"{root}/out")
    put_rows([], [(f"{root}/in/{name}", "0-1") for name in of_older], output=f"{root}/out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconciled, "_AT_ONCE", data.draw(st.integers(1, 5)))
        told, outcome = statuses(f"{root}/in/**", output=f"{root}/out")
    done = there & (now | twice)
    dead_ones = (there & (of_any | of_this)) - done
    stale = (there & old) - done - dead_ones
    expected = {"done": done, "dead": dead_ones, "stale": stale, "missing": there - done - dead_ones - stale}
    expected |= {"orphaned": (old | now | twice) - there}
    assert told == {(status, f"{root}/in/{name}") for status, some in expected.items() for name in some}
    assert outcome.listed == len(there)
