"""What the benchmark beside other frameworks counts as lost among damaged images."""

import json

import pytest

from tests.benchmarks import hostile
from tests.benchmarks.hostile import Losses, count_losses

GOOD, BAD = ["a.jpg", "b.jpg"], ["x.gif", "y.bmp", "z.tif"]


@pytest.mark.parametrize(
    ("rows", "recorded", "good_lost", "hostile_rows", "hostile_recorded", "hostile_lost"),
    [
        pytest.param([], [], 2, 0, 0, 3, id="nothing came out"),
        pytest.param([*GOOD, *BAD], [], 0, 3, 0, 0, id="all have rows"),
        pytest.param([*GOOD, "x.gif"], ["y.bmp", "z.tif"], 0, 1, 2, 0, id="rows or dead letters"),
        pytest.param(GOOD, ["x.gif"], 0, 0, 1, 2, id="some vanish"),
        pytest.param(["a.jpg"], ["b.jpg", *BAD], 1, 0, 3, 0, id="a good one fails with its batch: recorded, and still lost"),
        pytest.param([*GOOD, "x.gif"], ["x.gif"], 0, 1, 0, 2, id="a row counts before a record"),
        pytest.param([*GOOD, "of another run.jpg"], [], 0, 0, 0, 3, id="names that were not asked for"),
    ],
)
def test_good_images_need_a_row_and_hostile_ones_a_row_or_a_record(
    rows, recorded, good_lost, hostile_rows, hostile_recorded, hostile_lost
):
    losses = count_losses(GOOD, BAD, rows, recorded)
    assert losses == Losses(2, good_lost, 3, hostile_rows, hostile_recorded, "ends")
    assert losses.hostile_lost == hostile_lost


def test_good_images_are_spread_among_the_others_and_found_again_by_their_names(tmp_path):
    for name in (*GOOD, *BAD):
        (tmp_path / name).write_bytes(b"")
    good, bad = hostile.mix([tmp_path / name for name in GOOD], [tmp_path / name for name in BAD], tmp_path / "mixed")
    assert sorted(path.name for path in (tmp_path / "mixed").iterdir()) == sorted(good + bad)
    assert [name in good for name in sorted(good + bad)] == [True, False, True, False, False]


def test_rows_dead_letters_and_noted_failures_are_read_whatever_their_uris_look_like(tmp_path):
    for file, uri in [("detections/rows.jsonl", "file:///x/a.jpg"), ("dead_letters/d.jsonl", "/x/y.bmp")]:
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(json.dumps({"image": {"uri": uri}}) + "\n")
    (tmp_path / "detections" / "failed.txt-00000-of-00001").write_text("/x/z.tif\n")
    assert hostile.names_in(tmp_path) == ({"a.jpg"}, {"y.bmp", "z.tif"})
