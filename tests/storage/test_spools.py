"""Sorted spools: what is merged from them is what was put in, in order, however small the memory."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.storage import files, spools
from pipeline.storage.spools import Spooler, merge_lines, merge_spools

LINES = st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=5).map(lambda line: line.replace(b"\n", b"") + b"\n")))


@given(LINES, st.integers(1, 60), st.integers(2, 5))
def test_all_lines_come_back_sorted(tmp_path_factory, lines, most_bytes, at_once):
    folder = tmp_path_factory.mktemp("spools")
    spooler, found = Spooler(f"{folder}/spool", most_bytes, ".rows", lambda spools: b"%d keys" % len(spools)), defaultdict(list)
    for key, line in lines:
        for of, spool in spooler.add(key, line):
            found[of].append(spool)
    for of, spool in spooler.flush():
        found[of].append(spool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spools, "_MERGED_AT_ONCE", at_once)
        merged = {key: list(merge_spools(found[key], f"{folder}/merge")) for key in found}
    assert merged == {key: sorted(line for of, line in lines if of == key) for key in {of for of, _ in lines}}
    assert {key: sum(spool.lines for spool in found[key]) for key in found} == {key: len(merged[key]) for key in merged}
    by_path = defaultdict(list)
    for spool in (spool for key in found for spool in found[key]):
        by_path[spool.path].append(spool)
    assert {str(path): path.read_bytes() for path in folder.rglob("*/*")} == {
        path: b"".join(line for spool in sorted(spools, key=lambda spool: spool.start) for line in spool.read())
        + b"%d keys" % len(spools)
        for path, spools in by_path.items()
    }
    assert all(path.endswith(".rows") for path in by_path)


def test_nothing_spooled_is_nothing_written(tmp_path):
    assert list(Spooler(f"{tmp_path}/spool").flush()) == []
    assert list(merge_lines([], f"{tmp_path}/merge")) == []
    assert list(tmp_path.iterdir()) == []


def test_of_an_object_just_the_spool_is_read(gcs_bucket, monkeypatch):
    """A few requests for as many bytes, whatever else the object holds."""
    monkeypatch.setattr(files, "_PART_BYTES", 8)
    spooler = Spooler(f"gs://{gcs_bucket.name}/spool")
    for key, line in ((1, b"row one\n"), (2, b"a row of two\n"), (3, b"x\n"), (2, b"1\n")):
        assert list(spooler.add(key, line)) == []
    spools = dict(spooler.flush())
    (blob,) = gcs_bucket.list_blobs()
    assert {key: list(spool.read()) for key, spool in spools.items()} == {
        1: [b"row one\n"],
        2: [b"1\n", b"a row of two\n"],
        3: [b"x\n"],
    }
    assert [(spool.path.rpartition("/")[2], spool.lines) for spool in spools.values()] == [
        (blob.name.rpartition("/")[2], lines) for lines in (1, 2, 1)
    ]
