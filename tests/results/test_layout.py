"""Which files are results: only those with a name that this program gives, wherever the folder is."""

import os

import pytest

from pipeline.errors import OutputError
from pipeline.results.layout import check_output, is_result_name
from pipeline.results.shards import list_shards

SHARD = "20261121T020000Z-3f2a9c01b2d4-" + "0123456789abcdef" * 2
OWN = [
    f"detections/{SHARD}.parquet",
    f"detections/{SHARD}.jsonl",
    f"dead_letters/{SHARD}.parquet",
    f"detections/{SHARD.replace('3f2a9c01b2d4', 'compact')}.parquet",
    "samples/001-a.jpg",
    "samples/1234-ä_b_.jpg",
    "summary.json",
    "report.html",
    "exports/coco/results.json",
    "runs/3f2a9c01-20261121T020000Z/summary.json",
    "runs/3f2a9c01/samples/001-a.jpg",
    ".staging-0123456789ab/figures/a\nb",
    "detections/.staging-0123456789ab",
    ".lock-0123456789abcdef",
]
STRANGE = [
    "a.jpg",
    "samples/a.jpg",
    "samples/001-a.png",
    "samples/001-a.jpg/b.jpg",
    "samples/deep/001-a.jpg",
    "detections/a.jpg",
    f"detections/{SHARD}.jpg",
    f"detections/mine-{SHARD}.jsonl",
    f"detections/{SHARD[:-1]}.jsonl",
    f"detections/deep/{SHARD}.jsonl",
    f"{SHARD}.jsonl",
    "coco/results.json",
    ".lock-a/b.jpg",
    "summary.json.jpg",
    "in/summary.json",
    "runs/3f2a9c01/a.jpg",
    "runs/3f2a9c01/deep/summary.json",
    "detections/detections-00000-of-00001.jsonl",
    "in/.staging-0123456789ab/a.jpg",
]


@pytest.mark.parametrize(("names", "own"), [(OWN, True), (STRANGE, False)], ids=["own", "strange"])
def test_only_names_that_this_program_gives_are_results(names, own):
    assert [name for name in names if is_result_name(name) is not own] == []


def test_shards_are_listed_by_kind_and_whatever_else_lies_there_is_none(tmp_path):
    output = tmp_path / "out[1]"
    for name in [*OWN, *STRANGE]:
        if not name.startswith("samples/001-a.jpg"):
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (output / name).touch()
    shards = [OWN[2], OWN[0], OWN[3]]
    assert sorted(os.path.relpath(shard.path, output) for shard in list_shards(str(output))) == sorted(shards)
    assert [os.path.relpath(shard.path, output) for shard in list_shards(str(output), ("dead_letters",))] == [OWN[2]]
    assert list_shards(f"{tmp_path}/absent") == []


@pytest.mark.parametrize("write", [True, False])
def test_a_folder_with_rows_from_before_0_1_0_is_refused_and_keeps_them(tmp_path, write):
    """No command would count them as done."""
    older = tmp_path / "detections" / "detections-0a1b2c3d-00000-of-00001.jsonl"
    older.parent.mkdir()
    older.write_text("{}\n")
    with pytest.raises(OutputError, match="was written before 0") as refused:
        check_output(str(tmp_path), write)
    assert "\n" not in str(refused.value) and [path.name for path in tmp_path.rglob("*.*")] == [older.name]
