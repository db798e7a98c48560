"""Files of the release before become shards, once, wherever the upgrade is killed; nothing that it cannot read is lost."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import compact, export, run
from pipeline import upgrade as command
from pipeline.errors import OutputError
from pipeline.records import row_bytes
from pipeline.results.completion import RowVersion
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.shards import contains, done_keys, list_shards, read_batches
from pipeline.results.upgrade import refuse_old_files, upgrade
from pipeline.storage.files import list_files, read_file, write_file
from tests.deaths import dies_at
from tests.fixtures import REPO
from tests.shard_rows import rows_in

CONFIG = {"detect": {"score_threshold": 0.25, "max_megapixels": 100}, "read": {"max_file_mb": 50}, "model": {}}
VERSION = RowVersion.of(CONFIG, ("bright", "3"))
JOB, WINDOW, MERGED = "3f2a9c01", "20261120T030000Z-0a1b2c3d", "20261121T000000Z-compact0123456789ab"


def found(uri, generation="1"):
    box = {"box_xyxy": [0.01, 0.0, 1.25, 2.0], "class_id": 0, "class_name": "cat", "confidence": 0.12345}
    image = {"uri": uri, "generation": generation, "width": 10, "height": 20}
    return {"image": image, "model": {"name": "bright", "version": "3"}, "detections": [box], "extra": {"camera": 7}}


def dead(uri, **more):
    image = {"uri": uri, "generation": "1"} if uri else {}
    return {"image": image, "stage": "decode", "reason": "corrupt", "message": "no", **more}


def put(output, kind, run, rows, *, made_at=None, version=VERSION, index=True):
    """A file of rows and its index, as the release before wrote them."""
    name, content = f"{kind}-{run}-00000-of-00001", b"".join(row_bytes(row) + b"\n" for row in rows)
    write_file(f"{output}/{kind}/{name}.jsonl", content)
    images = [row["image"] for row in rows if row["image"]]
    columns = {
        "uri_hash": pa.array(np.zeros(len(images), np.uint64)),
        "identity_hash": pa.array(np.zeros(len(images), np.uint64)),
        "uri": pa.array([image["uri"].encode("utf-8", "surrogatepass") for image in images], pa.binary()),
        "generation": pa.array([image["generation"].encode() for image in images], pa.binary()),
        "model": [version.model] * len(images),
        "version": [version.version] * len(images),
        "settings": [version.settings_of(kind)] * len(images),
        "reason": [row.get("reason", "") for row in rows if row["image"]],
        "made_at": pa.array([made_at] * len(images), pa.float64()),
    }
    if index:
        sink, table = io.BytesIO(), pa.table(columns)
        with pq.ParquetWriter(sink, table.schema, compression="zstd") as writer:
            writer.write_table(table)
            writer.add_key_value_metadata({b"bytes_of_rows": str(len(content))})
        write_file(f"{output}/index/{name}.parquet", sink.getvalue())


@pytest.fixture
def output(tmp_path):
    folder = f"{tmp_path}/out"
    put(folder, DETECTIONS, JOB, [found("a"), found("b\udcff")], made_at=1_700_000_000.5)
    put(folder, DEAD_LETTERS, JOB, [dead("x"), dead("", payload_base64="e30=")], made_at=1_700_000_000.5)
    put(folder, DETECTIONS, WINDOW, [found("c")])
    put(folder, DETECTIONS, MERGED, [found("d")], made_at=1_600_000_000.0)
    write_file(f"{folder}/detections/detections-{JOB}-00000-of-00001.parquet", b"made from the rows")
    summary = {"images": {}, "config": CONFIG, "mode": "batch", "run": JOB}
    write_file(f"{folder}/runs/{JOB}/summary.json", json.dumps(summary).encode())
    return folder


def columns(output, *names):
    rows = [row for shard in list_shards(output) for batch in read_batches(shard) for row in batch.to_pylist()]
    return {row["uri"]: tuple(row[name] for name in names) for row in rows}


def test_rows_count_as_done_with_the_age_and_run_that_they_had(output):
    before = {
        kind: [json.loads(line) for path in list_files(f"{output}/{kind}/*.jsonl") for line in read_file(path).splitlines()]
        for kind in (DETECTIONS, DEAD_LETTERS)
    }
    with pytest.raises(OutputError, match=r"run once: detect-objects upgrade "):
        refuse_old_files(output)
    assert upgrade(output) == (4, [])
    refuse_old_files(output)
    for kind, rows in before.items():
        assert rows_in(output, kind) == sorted(rows, key=row_bytes)
    named = [row["image"]["uri"] for rows in before.values() for row in rows if row["image"]]
    keys = np.array([VERSION.key(uri, "1") for uri in named], np.uint64)
    assert contains(done_keys(output, VERSION), keys).all()
    told = {uri: (moment.timestamp(), run) for uri, (moment, run) in columns(output, "made_at", "run").items() if uri}
    assert told == {
        **dict.fromkeys(["a", "b\\udcff", "x"], (1_700_000_000.5, JOB)),
        "c": (1_795_143_600.0, WINDOW),
        "d": (1_600_000_000.0, MERGED),
    }
    left = {path.name for path in Path(output).rglob("*") if path.is_file()}
    assert all(name == "summary.json" or "-upgrade-" in name for name in left)
    views = [line for shard in list_shards(output) for line in read_file(shard.view).splitlines(True)]
    assert len(views) == 6


@pytest.mark.slow
def test_killed_at_any_change_of_the_disk_nothing_is_doubled_or_lost(output, tmp_path):
    upgrade(shutil.copytree(output, f"{tmp_path}/undisturbed"))
    wanted = [rows_in(f"{tmp_path}/undisturbed", kind) for kind in (DETECTIONS, DEAD_LETTERS)]
    number, killed, moments = 0, True, set()
    while killed:
        number += 1
        copy = shutil.copytree(output, f"{tmp_path}/{number}")
        killed = dies_at(number, lambda copy=copy: upgrade(copy))
        moments.add((len(list_shards(copy)), len(list_files(f"{copy}/detections/detections-*.jsonl"))))
        assert not upgrade(copy).left
        assert [rows_in(copy, kind) for kind in (DETECTIONS, DEAD_LETTERS)] == wanted, number
        refuse_old_files(copy)
    assert (1, 3) in moments, "the worst moment: the shard is durable, and its file is still there"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(lambda index, rows: index.unlink(), "it has no index", id="no index"),
        pytest.param(
            lambda index, rows: rows.write_bytes(rows.read_bytes() * 2), "its index was made for other rows", id="longer"
        ),
        pytest.param(lambda index, rows: index.write_bytes(b"x" * 20), "Parquet magic bytes", id="damaged index"),
        pytest.param(lambda index, rows: rows.write_bytes(b"[" * 200_000), "recursion", id="hostile rows"),
    ],
)
def test_a_file_that_cannot_be_read_stays_and_is_named(output, capsys, spoil, said):
    rows, index = (
        Path(output, place, f"detections-{JOB}-00000-of-00001.{of}")
        for place, of in (("detections", "jsonl"), ("index", "parquet"))
    )
    spoil(index, rows)
    content = rows.read_bytes()
    assert command.main([output]) == 1
    printed = capsys.readouterr()
    assert printed.out == "3 files of the release before are shards\n"
    assert printed.err.startswith(f"warning: {rows} stays: ") and said in printed.err and printed.err.count("\n") == 1
    assert rows.read_bytes() == content
    with pytest.raises(OutputError):
        refuse_old_files(output)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (".staging-0a1b2c3d/archive/detections-20261121T020000Z-00000-of-00001-5e77-aa.rows", b"{}\n"),
        (".staging-3f2a9c01/run.json", b'{"state": "committed"}'),
    ],
    ids=["a stream's acknowledged rows", "a commit"],
)
def test_a_run_that_is_not_finished_is_named_and_nothing_changes(output, capsys, name, content):
    write_file(f"{output}/{name}", content)
    assert command.main([output]) == 2
    said = capsys.readouterr().err
    assert name in said and "run its command once with the release before" in said and said.count("\n") == 1
    assert not list_shards(output)


def test_a_folder_of_this_release_is_left_alone(tmp_path):
    refuse_old_files(f"{tmp_path}")
    assert upgrade(f"{tmp_path}") == (0, [])


@pytest.mark.parametrize(
    "refused",
    [lambda output: compact.main([output]), lambda output: export.main([output, "--format", "csv"])],
    ids=["compact", "export"],
)
def test_a_command_that_would_not_see_old_rows_names_the_upgrade(output, capsys, refused):
    assert refused(output) == 2
    said = capsys.readouterr().err
    assert f"run once: detect-objects upgrade {output}" in said and said.count("\n") == 1


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["job", "dry run"])
def test_a_stream_does_not_archive_beside_old_rows(output, capsys, pubsub_emulator, bright_model, more):
    (_, subscription), (topic, _) = pubsub_emulator.create(), pubsub_emulator.create()
    places = ["--input", subscription, "--output", topic, "--archive", output, "--model", bright_model]
    assert run.main(["--config", f"{REPO}/configs/streaming_pubsub_direct.yaml", *places, *more]) == 2
    assert f"run once: detect-objects upgrade {output}" in capsys.readouterr().err.splitlines()[-1]
    assert not list_shards(output)
