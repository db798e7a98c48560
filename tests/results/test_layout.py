"""Which files are results: only those with a name that this program gives, wherever the folder is."""

import pytest

from pipeline.results.layout import archive_name, index_name, is_result, list_rows, read_summary, sample_name, shard_name

OWN = [
    f"{shard_name('detections', 0, 1)}.jsonl",
    f"{shard_name('detections', 123456, 1234567)}.parquet",
    f"{shard_name('detections', 0, 1)}.tfrecord",
    f"{shard_name('dead_letters', 0, 3)}.jsonl",
    f"{shard_name('detections', 0, 1, '3f2a9c01')}.jsonl",
    f"{shard_name('dead_letters', 0, 3, '3f2a9c01-20261121T020000Z')}.jsonl",
    index_name(shard_name("detections", 0, 1)),
    index_name(shard_name("dead_letters", 0, 1, "3f2a9c01")),
    archive_name("detections", "20261121T020000Z", "0a1b2c3d", 0, 1),
    archive_name("dead_letters", "20261121T020000Z", "0a1b2c3d", 12, 13),
    index_name(archive_name("detections", "20261121T020000Z", "0a1b2c3d", 0, 1)),
    sample_name(1, "gs://bucket/a.png"),
    sample_name(1234, "in/ä b?\udc80.jpg"),
    sample_name(1, ".jpg"),
    "coco/results.json",
    "coco/images.json",
    "summary.json",
    "report.html",
    "runs/3f2a9c01-20261121T020000Z/summary.json",
    "runs/0a1b2c3d/report.html",
    "runs/3f2a9c01/coco/results.json",
    f"runs/3f2a9c01/{sample_name(1, 'a.png')}",
    ".staging-0123456789ab/spill/a\nb",
    "detections/.staging-0123456789ab",
]
STRANGE = [
    "a.jpg",
    "samples/a.jpg",
    "samples/01-a.jpg",
    "samples/001-a.png",
    "samples/001-a.jpg/b.jpg",
    "samples/deep/001-a.jpg",
    "detections/a.jpg",
    "detections/detections-00000-of-00001.jpg",
    "detections/dead_letters-00000-of-00001.jsonl",
    "detections/detections-final.jsonl",
    "in/detections/detections-00000-of-00001.jsonl",
    "coco/a.json",
    "summary.json.jpg",
    "summary.jsonl",
    "in/summary.json",
    "runs/a.jpg",
    "runs/3f2a9c01/a.jpg",
    "runs/3f2a9c01/deep/summary.json",
    "index/a.parquet",
    "detections/detections-mine-00000-of-00001.jsonl",
    "in/.staging-0123456789ab/a.jpg",
]


@pytest.mark.parametrize("output", ["out", "./out", "out/", "/abs/out", "gs://bucket/out", "/"])
@pytest.mark.parametrize(("names", "own"), [(OWN, True), (STRANGE, False)], ids=["own", "strange"])
def test_only_names_that_this_program_gives_are_results(output, names, own):
    assert [name for name in names if is_result(f"{output.rstrip('/')}/{name}", output) is not own] == []
    assert not any(is_result(f"elsewhere/{name}", output) for name in names if output != "/")


def test_rows_are_listed_by_who_wrote_them(tmp_path):
    output = tmp_path / "out[1]"
    for name in [*OWN, *STRANGE]:
        if "\n" not in name and not name.startswith("samples/001-a.jpg"):
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (output / name).touch()
    rows = list_rows(str(output))
    assert sorted(rows.of_batch) == sorted([*OWN[:8], "coco/results.json", "coco/images.json"])
    assert sorted(rows.of_streams) == sorted(OWN[8:11])
    assert list_rows(f"{tmp_path}/absent") == ([], [])


@pytest.mark.parametrize("content", [None, "", "{", "[]", '"summary"', '{"images": {}}', "\udc80"])
def test_a_summary_of_somebody_else_is_none(tmp_path, content):
    if content is not None:
        (tmp_path / "summary.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert read_summary(str(tmp_path)) == {}


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
    assert sample_name(7, uri) == name
