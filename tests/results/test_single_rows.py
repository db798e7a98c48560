"""Of many rows of one image generation and model version, one stays: the right one."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.results import single_rows as module
from pipeline.results.completion import Provenance
from pipeline.results.layout import DETECTIONS
from pipeline.results.ledger import list_files_of_rows
from tests.rows_of_files import MAKER, Row, dead, found, write_rows

OTHER = Provenance("0e0e0e0e", "0e0e0e0f", "bright", "4")


def kept(output, *files, makers=None):
    """The rows that stay of files of rows, the oldest file first."""
    for number, rows in enumerate(files):
        provenance = (makers or itertools.repeat(MAKER))[number] if makers else MAKER
        write_rows(str(output), f"20261121T02{number:04d}Z-job-00000-of-00001", rows, provenance)
    listed = [(float(file.path.partition("T02")[2][:4]), file) for file in list_files_of_rows(str(output))]
    return list(module.single_rows(listed, f"{output}/merge"))


@pytest.mark.parametrize(
    ("files", "staying"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([[found("a")], [found("a")]], [found("a")], id="equal rows once"),
        pytest.param([[found("a"), found("a")]], [found("a")], id="also in one file"),
        pytest.param([[found("a", "1")], [found("a", "2")]], [found("a", "1"), found("a", "2")], id="each version"),
        pytest.param([[found("a")], [found("a", version="4")]], [found("a"), found("a", version="4")], id="each model"),
        pytest.param([[found("a", boxes=2)], [found("a", boxes=1)]], [found("a", boxes=1)], id="of two that differ the newer"),
        pytest.param([[found("a", boxes=1)], [found("a", boxes=2)]], [found("a", boxes=2)], id="whatever their order as text"),
        pytest.param([[dead("a", "1", reason="unreadable")], [found("a")]], [found("a")], id="a row beats a dead letter"),
        pytest.param([[found("a")], [dead("a", "1", reason="unreadable")]], [found("a")], id="also one after it"),
        pytest.param([[dead("a", "2")], [found("a")]], [found("a"), dead("a", "2")], id="not one of another version"),
        pytest.param([[dead("a")], [found("a")]], [found("a")], id="a dead letter without a version before a row of the image"),
        pytest.param([[found("a")], [dead("a")]], [found("a"), dead("a")], id="after it says that the image is gone"),
        pytest.param([[dead("a")], [found("ab")]], [found("ab"), dead("a")], id="another image whose name begins alike"),
        pytest.param([[dead("a", message="x")], [dead("a", message="y")]], [dead("a", message="y")], id="the newest dead letter"),
        pytest.param([[dead(), dead(message="y")], [dead()]], [dead(), dead(message="y")], id="messages"),
        pytest.param([[found("a")], [found("é\udc80")]], [found("a"), found("é\udc80")], id="names that are no Unicode"),
    ],
)
def test_which_row_stays(tmp_path, files, staying):
    rows = kept(tmp_path, *files)
    assert sorted(row.line for row in rows) == sorted(row.line for row in staying)
    for kind in {row.kind for row in rows}:
        lines = [row.line for row in rows if row.kind == kind]
        assert lines == sorted(lines)


def test_a_dead_letter_of_another_model_stays_beside_a_row(tmp_path):
    rows = kept(tmp_path, [dead("a", "1")], [found("a", "1")], makers=[OTHER, MAKER])
    assert [row.line for row in rows] == [found("a", "1").line, dead("a", "1").line]


def test_a_dead_letter_of_nobody_knows_which_model_goes(tmp_path):
    rows = kept(tmp_path, [dead("a", "1")], [found("a", "1")], makers=[None, MAKER])
    assert [row.line for row in rows] == [found("a", "1").line]


@pytest.mark.parametrize("makers", [(MAKER, None), (None, MAKER)], ids=["the first", "the second"])
def test_of_equal_rows_the_one_stays_whose_settings_are_known(tmp_path, makers):
    (row,) = kept(tmp_path, [found("a")], [found("a")], makers=makers)
    assert (row.entry.settings, row.age) == (MAKER.detections, 1)


def test_each_row_keeps_the_settings_that_it_was_made_with(tmp_path):
    rows = kept(tmp_path, [found("a"), dead("b", "1")], [found("c", version="4")], makers=[MAKER, OTHER])
    told = [(row.entry.uri, row.entry.settings, row.entry.model, row.entry.version) for row in rows]
    expected = [("a", "5e771265", "bright", "3"), ("b", "5e771266", "bright", "3"), ("c", "0e0e0e0e", "bright", "4")]
    assert told == expected


A_ROW = st.one_of(
    st.builds(found, st.sampled_from("abc"), st.sampled_from("12"), version=st.sampled_from("34"), boxes=st.integers(0, 2)),
    st.builds(dead, st.sampled_from(["", *"abc"]), st.sampled_from(["", *"12"]), message=st.sampled_from("xy")),
)


def expected_of(files: list[list[Row]]) -> set[bytes]:
    """The rules of the module, written down without an order."""
    rows = [(age, each) for age, rows in enumerate(files) for each in rows]
    best: dict[tuple, tuple[int, bytes]] = {}
    for age, each in rows:
        image, model = each.row["image"], each.row.get("model", {}).get("version", "3")
        key = (each.kind, image.get("uri"), image.get("generation"), model) if "uri" in image else each.line
        best[key] = max(best.get(key, (age, each.line)), (age, each.line))
    newest = {}
    for (kind, uri, _, model), (age, _) in ((key, value) for key, value in best.items() if isinstance(key, tuple)):
        if kind == DETECTIONS and model == "3":
            newest[uri] = max(age, newest.get(uri, 0))
    mended = {
        key
        for key, (age, _) in best.items()
        if isinstance(key, tuple)
        and key[0] != DETECTIONS
        and ((DETECTIONS, *key[1:]) in best if key[2] else newest.get(key[1], -1) >= age)
    }
    return {line for key, (_, line) in best.items() if key not in mended}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(A_ROW, max_size=6, unique_by=lambda row: row.line), min_size=1, max_size=5))
def test_the_rules_hold_for_any_rows_in_any_files(tmp_path_factory, files):
    """Of rows of one file that differ, the last one in its order stays: any, but always the same."""
    output = tmp_path_factory.mktemp("rows")
    rows = kept(output, *files)
    assert {row.line for row in rows} == expected_of(files)
    assert len(rows) == len({row.line for row in rows})


def test_more_files_than_can_be_read_at_once(tmp_path):
    files = [[found(f"{n:03d}-{m}") for m in range(3)] + [found("same", boxes=n % 2)] for n in range(70)]
    rows = kept(tmp_path, *files)
    assert len(rows) == 211
    assert [row.line for row in rows if row.entry.uri == "same"] == [found("same", boxes=1).line]
    assert not list((tmp_path / "merge").iterdir())
