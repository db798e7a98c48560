"""Sorted spills: what is merged from them is what was put in, in order, however small the memory."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.storage import files, spill_files
from pipeline.storage.spill_files import SpillWriter, merge_lines, merge_spills

LINES = st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=5).map(lambda line: line.replace(b"\n", b"") + b"\n")))


@given(LINES, st.integers(1, 60), st.integers(2, 5))
def test_all_lines_come_back_sorted(tmp_path_factory, lines, most_bytes, at_once):
    folder = tmp_path_factory.mktemp("spills")
    spiller, found = (
        SpillWriter(f"{folder}/spill", most_bytes, ".rows", lambda spills: b"%d keys" % len(spills)),
        defaultdict(list),
    )
    for key, line in lines:
        for of, spill in spiller.add(key, line):
            found[of].append(spill)
    for of, spill in spiller.flush():
        found[of].append(spill)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill_files, "_MERGED_AT_ONCE", at_once)
        merged = {key: list(merge_spills(found[key], f"{folder}/merge")) for key in found}
    assert merged == {key: sorted(line for of, line in lines if of == key) for key in {of for of, _ in lines}}
    assert {key: sum(spill.lines for spill in found[key]) for key in found} == {key: len(merged[key]) for key in merged}
    by_path = defaultdict(list)
    for spill in (spill for key in found for spill in found[key]):
        by_path[spill.path].append(spill)
    assert {str(path): path.read_bytes() for path in folder.rglob("*/*")} == {
        path: b"".join(line for spill in sorted(spills, key=lambda spill: spill.start) for line in spill.read())
        + b"%d keys" % len(spills)
        for path, spills in by_path.items()
    }
    assert all(path.endswith(".rows") for path in by_path)


def test_nothing_spilled_is_nothing_written(tmp_path):
    assert list(SpillWriter(f"{tmp_path}/spill").flush()) == []
    assert list(merge_lines([], f"{tmp_path}/merge")) == []
    assert list(tmp_path.iterdir()) == []


def test_of_an_object_just_the_spill_is_read(gcs_bucket, monkeypatch):
    """A few requests for as many bytes, whatever else the object holds."""
    monkeypatch.setattr(files, "_PART_BYTES", 8)
    spiller = SpillWriter(f"gs://{gcs_bucket.name}/spill")
    for key, line in ((1, b"row one\n"), (2, b"a row of two\n"), (3, b"x\n"), (2, b"1\n")):
        assert list(spiller.add(key, line)) == []
    spills = dict(spiller.flush())
    (blob,) = gcs_bucket.list_blobs()
    assert {key: list(spill.read()) for key, spill in spills.items()} == {
        1: [b"row one\n"],
        2: [b"1\n", b"a row of two\n"],
        3: [b"x\n"],
    }
    assert [(spill.path.rpartition("/")[2], spill.lines) for spill in spills.values()] == [
        (blob.name.rpartition("/")[2], lines) for lines in (1, 2, 1)
    ]
