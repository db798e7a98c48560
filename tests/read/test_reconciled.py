"""Listing and ledger side by side: each image that is listed has one status."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.read.reconciled import Found, reconcile
from tests.rows_of_files import dead, found, write_rows

NAME = "20261120T{number:02d}0000Z-0a1b-00000-of-00001"
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


def statuses(*patterns, rows=(), model=None, output="out", spill_bytes=0):
    """Each image's status, and the outcome."""
    for number, some in enumerate(rows):
        write_rows(output, NAME.format(number=number), map(absolute, some))
    told: list[Found] = []
    outcome = reconcile(patterns or ("in/**",), output, model, told.append, spill_bytes)
    assert [found.uri for found in told] == sorted(found.uri for found in told)
    return {(found.status, found.uri.removeprefix(f"{os.getcwd()}/")) for found in told}, outcome


def absolute(row):
    """The row, of an image in the current folder if it names one of the folder `in`."""
    image = row.row["image"]
    uri = f"{os.getcwd()}/{image['uri']}" if image["uri"].startswith("in/") else image["uri"]
    return row._replace(row={**row.row, "image": {**image, "uri": uri}})


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([], {"missing"}, id="nothing"),
        pytest.param([[found("in/a", "NOW")]], {"done"}, id="a row"),
        pytest.param([[found("in/a", "0-1")]], {"stale"}, id="of an older version"),
        pytest.param([[found("in/a", "0-1")], [found("in/a", "NOW")]], {"done"}, id="and one of this"),
        pytest.param([[dead("in/a", "NOW", reason="unreadable")]], {"dead"}, id="a dead letter"),
        pytest.param([[dead("in/a")]], {"dead"}, id="a dead letter that knows no version"),
        pytest.param([[dead("in/a", "0-1")]], {"missing"}, id="a dead letter of an older version"),
        pytest.param([[dead("in/a")], [found("in/a", "NOW")]], {"done"}, id="one that was mended"),
        pytest.param([[found("in/a", "NOW")], [found("in/a", "NOW")]], {"done", "doubled"}, id="two rows"),
        pytest.param([[found("in/a", "NOW")], [found("in/a", "NOW", version="4")]], {"done"}, id="of two models"),
        pytest.param([[found("in/a\udc80", "NOW")]], {"missing", "orphaned"}, id="a row of another image"),
        pytest.param([[found("elsewhere/a", "NOW")], [found("inline:a", "1")]], {"missing"}, id="rows of others"),
    ],
)
def test_the_status_of_an_image(folder, rows, expected):
    now = put("in/a")
    named = [[row._replace(row=dated(row.row, now)) for row in some] for some in rows]
    assert {status for status, _ in statuses(rows=named)[0]} == expected


def dated(row, now):
    if row["image"].get("generation") == "NOW":
        row = {**row, "image": {**row["image"], "generation": now}}
    return row


def test_only_the_rows_of_a_model_count_where_one_is_named(folder):
    now = put("in/a")
    rows = [[found("in/a", now)]]
    assert statuses(rows=rows, model=("bright", "3"))[0] == {("done", "in/a")}
    assert statuses(rows=rows, model=("bright", "4"))[0] == {("missing", "in/a")}


def test_a_manifest_names_images_of_any_version_and_no_orphans(folder):
    put("in/a")
    (folder / "list.txt").write_text("in/a\nin/b\ngs://b/c\n")
    rows = [[found("in/a", "0-1"), found("in/other"), dead("gs://b/c")]]
    assert statuses("list.txt", rows=rows)[0] == {("done", "in/a"), ("missing", "in/b"), ("dead", "gs://b/c")}


def test_what_is_complete(folder):
    now = put("in/a")
    rows = [[dead("in/a", now, stage="decode", reason="corrupt")]]
    assert statuses(rows=rows)[1].is_complete, "permanently dead is done"
    put("in/b")
    assert not statuses()[1].is_complete
    rows = [[dead("in/b", reason="storage_unavailable")]]
    outcome = statuses(rows=rows, output="other")[1]
    assert (outcome.is_transient, outcome.is_complete) == (1, False)


def test_images_are_counted_by_the_day_of_their_name_else_of_their_generation(folder):
    now = [put(f"in/{name}") for name in ("2026/11/20/a", "2026/11/21/b", "c")]
    outcome = statuses(rows=[[found("in/2026/11/20/a", now[0])]])[1]
    assert outcome.days == {("2026-11-20", "done"): 1, ("2026-11-21", "missing"): 1, ("2023-11-14", "missing"): 1}


def test_tfrecord_files_and_results_are_no_images(folder):
    put("in/a.tfrecord")
    write_rows("in", NAME.format(number=1), [found("x")])
    outcome = reconcile(["in/**"], "in")
    assert (outcome.listed, outcome.left_out) == (0, 1)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_all_that_is_listed_has_one_status_however_small_the_spills_are(tmp_path_factory, data):
    names = [f"{n:02d}" for n in range(12)]
    there = data.draw(st.sets(st.sampled_from(names)))
    old, now, twice, letters = (data.draw(st.sets(st.sampled_from(names))) for _ in range(4))
    root = tmp_path_factory.mktemp("reconcile")
    generations = {name: put(f"{root}/in/{name}") for name in there}
    rows = [
        [found(f"{root}/in/{name}", "0-1") for name in old],
        [found(f"{root}/in/{name}", generations.get(name, "9-9")) for name in now],
        [found(f"{root}/in/{name}", generations.get(name, "9-9")) for name in twice],
        [dead(f"{root}/in/{name}") for name in letters],
    ]
    told, outcome = statuses(f"{root}/in/**", rows=rows, output=f"{root}/out", spill_bytes=300)
    done = there & (now | twice)
    dead_ones = (there & letters) - done
    stale = (there & old) - done - dead_ones
    expected = {"done": done, "dead": dead_ones, "stale": stale, "missing": there - done - dead_ones - stale}
    expected |= {"doubled": there & now & twice, "orphaned": (old | now | twice) - there}
    assert told == {(status, f"{root}/in/{name}") for status, some in expected.items() for name in some}
    assert outcome.listed == len(there)
