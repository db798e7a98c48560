"""Which files are results: only those with a name that this program gives, wherever the folder is."""

import os

import pytest

from pipeline.errors import OutputError
from pipeline.results.layout import check_output, is_result_name, is_sample_name, sample_name
from pipeline.results.reader import list_shards

SHARD = "20261121T020000Z-3f2a9c01b2d4-" + "0123456789abcdef" * 2
OWN = [
    f"detections/{SHARD}.parquet",
    f"detections/{SHARD}.jsonl",
    f"dead_letters/{SHARD}.parquet",
    f"detections/{SHARD.replace('3f2a9c01b2d4', 'compact')}.parquet",
    sample_name(1, "gs://bucket/a.png"),
    sample_name(1234, "in/ä b?\udc80.jpg"),
    sample_name(1, ".jpg"),
    "summary.json",
    "report.html",
    "containers/20261121T020000Z-3f2a9c01-0123456789abcdef0123456789abcdef.contents",
    "exports/coco/results.json",
    "runs/3f2a9c01-20261121T020000Z/summary.json",
    f"runs/3f2a9c01/{sample_name(1, 'a.png')}",
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


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("gs://b/deep/photo one.tar.png", "samples/007-photo_one.tar.jpg"),
        ("猫" * 82 + ".jpg", "samples/007-" + "猫" * 40 + ".jpg"),
        ("a\udc80b.jpg", "samples/007-a_b.jpg"),
        ("inline:", "samples/007-inline_.jpg"),
    ],
)
def test_samples_are_named_after_their_images_in_bounded_bytes(uri, name):
    assert sample_name(7, uri) == name and is_sample_name(name)


@pytest.mark.parametrize("write", [True, False])
def test_a_folder_with_rows_from_before_0_1_0_is_refused_and_keeps_them(tmp_path, write):
    """No command would count them as done."""
    older = tmp_path / "detections" / "detections-0a1b2c3d-00000-of-00001.jsonl"
    older.parent.mkdir()
    older.write_text("{}\n")
    with pytest.raises(OutputError, match="was written before 0") as refused:
        check_output(str(tmp_path), write)
    assert "\n" not in str(refused.value) and [path.name for path in tmp_path.rglob("*.*")] == [older.name]
