"""Sorted spools: what is merged from them is what was put in, in order, however small the memory."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.storage import spools
from pipeline.storage.spools import Spooler, merge_lines

LINES = st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=5).map(lambda line: line.replace(b"\n", b"") + b"\n")))


@given(LINES, st.integers(1, 60), st.integers(2, 5))
def test_all_lines_come_back_sorted(tmp_path_factory, lines, most_bytes, at_once):
    folder = tmp_path_factory.mktemp("spools")
    spooler, found = Spooler(f"{folder}/spool", most_bytes), defaultdict(list)
    for key, line in lines:
        for of, spool in spooler.add(key, line):
            found[of].append(spool)
    for of, spool in spooler.flush():
        found[of].append(spool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spools, "_MERGED_AT_ONCE", at_once)
        merged = {key: list(merge_lines([spool.path for spool in found[key]], f"{folder}/merge")) for key in found}
    assert merged == {key: sorted(line for of, line in lines if of == key) for key in {of for of, _ in lines}}
    assert {key: sum(spool.lines for spool in found[key]) for key in found} == {key: len(merged[key]) for key in merged}
    assert sorted(map(str, folder.rglob("*/*"))) == sorted(spool.path for key in found for spool in found[key])


def test_nothing_spooled_is_nothing_written(tmp_path):
    assert list(Spooler(f"{tmp_path}/spool").flush()) == []
    assert list(merge_lines([], f"{tmp_path}/merge")) == []
    assert list(tmp_path.iterdir()) == []
