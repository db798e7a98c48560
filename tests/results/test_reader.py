"""One reader: what is gone, what cannot be read now, and what is damaged; rows of other releases and programs; planted files."""

import contextlib
import errno
import json
import os
import resource
import shutil
import threading
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.commands import check, compact, export, rows
from pipeline.errors import UnreadableError
from pipeline.log_lines import log_lines
from pipeline.results.compact import Compacted
from pipeline.results.compact import compact as compacted
from pipeline.results.current import current_rows
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.reader import ResultsFolder, batches_in, done_keys, list_shards, parquet_file
from pipeline.results.rows import FORMATS, Column, RowFormat
from pipeline.results.shards import write_shard
from pipeline.results.wanted import ALL, Wanted
from pipeline.storage.listing import MAX_PARALLEL
from pipeline.storage.stores import store_of
from tests.fixtures import RELEASE
from tests.results.test_results_folders import damaged
from tests.shard_rows import OTHER, VERSION, detected, failed, rows_in, write_rows


@pytest.fixture
def output(tmp_path):
    for uri in "abc":
        write_rows(f"{tmp_path}/out", [detected(uri)], made_at=1.0)
    return f"{tmp_path}/out"


def uris(output, wanted=ALL):
    return sorted(row["image"]["uri"] for row in current_rows(output, wanted))


def test_rows_of_0_1_0_count_beside_a_column_that_a_later_release_adds(tmp_path, monkeypatch):
    """D9: they would vanish from exports and compaction, while their images were done."""
    output = str(shutil.copytree(RELEASE, tmp_path / "out"))
    before, found = rows_in(output), uris(output)
    for kind in (DETECTIONS, DEAD_LETTERS):
        columns = (*FORMATS[kind].columns, Column("camera", pa.string(), "none", "9.9.0"))
        monkeypatch.setitem(FORMATS, kind, RowFormat(columns))
    write_rows(output, [detected("new")])
    assert uris(output) == sorted([*found, "new"]) and len(found) == 2
    assert compacted(output).before == 2
    assert [row for row in rows_in(output) if row["image"]["uri"] != "new"] == before
    (shard,) = list_shards(output, (DETECTIONS,))
    assert pq.read_table(shard.path)["camera"].to_pylist() == ["none"] * 3


@pytest.mark.parametrize("program", ["DuckDB", "pandas", "large types"])
def test_rows_that_another_program_wrote_anew_count(output, program):
    before = rows_in(output)
    for shard in list_shards(output):
        table = pq.read_table(shard.path)
        if program == "DuckDB":
            duckdb.sql(f"copy (select * from '{shard.path}') to '{shard.path}.new' (format parquet)")
            os.replace(f"{shard.path}.new", shard.path)
        elif program == "pandas":
            table.to_pandas().to_parquet(shard.path)
        else:
            wide = {pa.string(): pa.large_string(), pa.int32(): pa.int64(), pa.timestamp("us", "UTC"): pa.timestamp("ns")}
            pq.write_table(
                table.cast(pa.schema([(field.name, wide.get(field.type, field.type)) for field in table.schema])), shard.path
            )
    assert rows_in(output) == before and uris(output) == ["a", "b", "c"]
    assert len(done_keys(output, VERSION, DETECTIONS)) == 3
    assert compacted(output) == Compacted(3, 1, 3, 0) and rows_in(output) == before


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_folder_that_cannot_be_listed_now_is_never_an_empty_one(output, number, monkeypatch, capsys):
    """D3, D8: whichever listing fails. Compaction would delete what it did not see."""
    scandir, calls = os.scandir, [0]

    def failing(folder):
        if str(folder).endswith(DETECTIONS):
            calls[0] += 1
            if calls[0] == fails_at:
                raise OSError(number, os.strerror(number))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", failing)
    commands = ([compact, output], [export, output, "--format", "csv"], [rows, output], [check, output])
    for command, *arguments in commands:
        seen = 0
        for fails_at in range(1, 9):
            calls[0] = 0
            code = command.main(arguments)
            if calls[0] < fails_at:
                break
            seen += code == 1
            assert code in (0, 1, 2), capsys.readouterr().err
        assert seen, command
    monkeypatch.undo()
    assert uris(output) == ["a", "b", "c"]


def _wrong(batch):
    """What a caller does to rows that are whole, each with a mistake."""
    yield AttributeError, lambda: batch.no_such_method().more
    yield TypeError, lambda: len(batch) + "1"
    yield KeyError, lambda: batch["no such column"]
    yield ValueError, lambda: int(batch["uri"][0].as_py())
    yield pa.ArrowInvalid, lambda: batch["uri"].cast(pa.int32())


@pytest.mark.parametrize("number", range(5))
def test_a_mistake_of_this_program_is_neither_damage_nor_a_disk_that_fails(output, number, capsys):
    """Only what fails while a shard is opened and read is damage of the shard, not what a caller makes of its rows."""
    results = ResultsFolder(output)
    error, wrong = [*_wrong(next(results.batches())[1])][number]

    def project(shard, source):
        with parquet_file(shard, source) as file:
            for _ in batches_in(shard, file):
                wrong()

    with pytest.raises(error):
        list(results.read(project))
    assert not results.damaged and capsys.readouterr().err == ""


def test_a_process_without_free_descriptors_loses_no_row(output, capsys):
    """D8: what cannot be opened now is an error, and no damage."""
    shards = list_shards(output)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))
    held = []
    try:
        with contextlib.suppress(OSError):  # of the numbers below the limit, too, some may be free
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises((UnreadableError, OSError), match=r"Too many open files|cannot be"):
            done_keys(output, VERSION, DETECTIONS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in held:
            os.close(each)
    assert list_shards(output) == shards and capsys.readouterr().err == ""


@pytest.mark.parametrize("storage", ["local", "gs"])
def test_sixteen_shards_are_read_at_once(storage, tmp_path, request, monkeypatch):
    """D6: one by one, those of a day of a stream took a quarter of an hour before a job; here each waits for the others."""
    output = f"{tmp_path}/out" if storage == "local" else f"gs://{request.getfixturevalue('gcs_bucket').name}/out"
    for number in range(MAX_PARALLEL):
        write_rows(output, [detected(f"{number}.jpg")])
    together = threading.Barrier(MAX_PARALLEL)
    place, name = (pa, "OSFile") if storage == "local" else (type(store_of(output)), "read_range")
    opened = getattr(place, name)

    def waiting(*arguments):
        together.wait(60)
        return opened(*arguments)

    monkeypatch.setattr(place, name, waiting)
    assert len(done_keys(output, VERSION, DETECTIONS)) == MAX_PARALLEL
    results = ResultsFolder(output)
    assert len([*results.tables(["uri"])]) == MAX_PARALLEL
    if storage == "gs":
        assert len([*results.batches()]) == MAX_PARALLEL


def test_a_reader_begins_anew_where_a_compaction_deletes_what_it_has_listed(output, monkeypatch):
    """Between its listing and the first file that it opens."""
    opened, compactions = pa.OSFile, []

    def compact_first(*arguments):
        if not compactions:
            compactions.append("begun")
            compactions.append(compacted(output))
        return opened(*arguments)

    monkeypatch.setattr(pa, "OSFile", compact_first)
    assert len(done_keys(output, VERSION, DETECTIONS)) == 3 and compactions[1:] == [Compacted(3, 1, 3, 0)]


def test_damage_in_boxes_fails_an_export_and_the_next_job_detects_again_after_a_check(output, capsys):
    """D8: its images were done for ever, and the export without them replaced the complete one."""
    assert export.main([output, "--format", "csv"]) == 0
    before = Path(output, "exports", "detections.csv").read_bytes()
    (path,) = write_rows(output, [detected("d"), detected("a", confidence=0.75)], made_at=2.0)
    damaged(path, "values")
    assert export.main([output, "--format", "csv"]) == 1
    assert Path(output, "exports", "detections.csv").read_bytes() == before
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith(f"error: output {output}: 1 file of rows damaged, such as {path}; run detect-objects check")
    assert len(done_keys(output, VERSION, DETECTIONS)) == 5
    assert check.main([output]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 whole files of rows, with 3 rows" and lines[1] == "1 damaged file:"
    assert lines[3:5] == ["1 image without another row:", "  d"]
    assert len(done_keys(output, VERSION, DETECTIONS)) == 3, "a and d are to be detected again"
    assert rows.main([output]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 3
    os.remove(path)
    assert check.main([output]) == export.main([output, "--format", "csv"]) == 0
    assert not [name for name in os.listdir(f"{output}/{DETECTIONS}") if name.startswith(".damaged")]


def test_a_check_sees_whether_a_merged_file_has_the_rows_that_were_merged(output, capsys):
    compacted(output)
    (shard,) = list_shards(output)
    assert check.main([output]) == 0
    table = pq.read_table(shard.path)
    pq.write_table(table.slice(1), shard.path)
    capsys.readouterr()
    assert check.main([output]) == 1
    assert "expected the rows that a compaction merged into it, got others" in capsys.readouterr().out
    assert uris(output) == ["b", "c"] and len(done_keys(output, VERSION, DETECTIONS)) == 2, "a is to be detected again"


def test_a_mark_that_somebody_put_there_hides_nothing(output):
    for shard in list_shards(output):
        Path(shard.path).with_name(f".damaged-{Path(shard.path).stem}").write_bytes(b"")
    assert uris(output) == ["a", "b", "c"] and len(done_keys(output, VERSION, DETECTIONS)) == 3


def test_compaction_keeps_a_healthy_row_beside_a_newer_damaged_one(output):
    """D8: it dropped the healthy one for the newer one, whose boxes nobody can read."""
    (path,) = write_rows(output, [detected("a", confidence=0.75)], made_at=2.0)
    damaged(path, "values")
    assert compacted(output) == Compacted(3, 1, 3, 0)
    os.remove(path)
    assert uris(output) == ["a", "b", "c"]


@pytest.mark.parametrize("held", [0, 1], ids=["none", "one of them"])
def test_an_added_file_that_claims_all_rows_hides_and_deletes_none(output, held):
    """D4."""
    before = rows_in(output)
    shards = list_shards(output)
    table = (
        pq.read_table(shards[0].path)
        .slice(0, held)
        .replace_schema_metadata(
            {b"sources": json.dumps([os.path.basename(shard.path) for shard in shards]).encode(), b"level": b"+++"}
        )
    )
    write_shard(output, DETECTIONS, table, "compact")
    assert uris(output) == ["a", "b", "c"]
    compacted(output)
    assert rows_in(output) == before


def test_what_a_disk_does_not_give_back_as_it_was_written_replaces_nothing(output, monkeypatch):
    """D4, A5: a merged shard that loses rows on its way to the disk."""
    from pipeline.results import compact as module

    written = module.write_shard
    monkeypatch.setattr(module, "write_shard", lambda output, kind, table, run: written(output, kind, table.slice(1), run))
    with pytest.raises(UnreadableError, match="is not read back as it was; nothing was deleted"):
        compacted(output)
    monkeypatch.undo()
    assert uris(output) == ["a", "b", "c"]


@pytest.mark.slow
def test_compaction_holds_a_bounded_number_of_bytes_whatever_they_shrink_to(tmp_path):
    """D14: payloads of zeros are a thousand times smaller as Parquet; together they overflowed a column."""
    output, payloads = str(tmp_path), 40
    for number in range(payloads):
        letter = failed("", "", stage="message", reason="bad_json")
        write_rows(output, [], [type(letter)(letter.ref, "message", "bad_json", "no", bytes(9_000_000 - number))])
    done = compacted(output)
    assert (done.before, done.rows, done.dropped) == (payloads, payloads, 0) and 5 <= done.files <= 10
    assert compacted(output) == Compacted(), "what is merged stays"
    assert len(rows_in(output, DEAD_LETTERS)) == payloads


@log_lines()
def test_a_planted_file_of_many_rows_takes_no_memory(output, capsys):
    """D19: 60 million equal rows are a file of 3 MB; a key takes 8 bytes."""
    schema = FORMATS[DETECTIONS].schema
    (row,) = pq.read_table(list_shards(output)[0].path, columns=schema.names).to_pylist()
    several = pa.Table.from_pylist([{**row, "detections": []}], schema)
    path = f"{output}/{DETECTIONS}/20261121T020000Z-0a1b-{0:032x}.parquet"
    pq.write_table(several.take(np.zeros(200_000, np.int64)), path)
    assert len(done_keys(output, VERSION, DETECTIONS)) == 3
    assert "expected a key of 8 bytes for each row, got 200000 rows in" in capsys.readouterr().err


def test_null_sizes_are_unknown_ones_and_other_nulls_are_damage(output):
    """D19: a planted null width ended exports."""
    first, second, _ = list_shards(output)
    for shard, column in ((first, "width"), (second, "made_at")):
        table = pq.read_table(shard.path)
        place = table.schema.get_field_index(column)
        nulls = pa.nulls(len(table), table.schema.field(column).type)
        pq.write_table(table.set_column(place, table.schema.field(column), nulls), shard.path)
    for name in ("csv", "yolo", "voc", "cvat", "label-studio", "coco", "tfrecord"):
        assert export.main([output, "--format", name]) == 1, "for the second one"
    os.remove(second.path)
    for name in ("csv", "yolo", "voc", "cvat", "label-studio", "coco", "tfrecord"):
        assert export.main([output, "--format", name]) == 0, name


@pytest.mark.parametrize(
    ("wanted", "confidences"),
    [
        pytest.param(Wanted(), [0.25], id="the newest row chooses, also after a rollback"),
        pytest.param(Wanted(version="8"), [0.75], id="a version"),
        pytest.param(Wanted(settings="00000000"), [0.9], id="settings"),
        pytest.param(Wanted(every=True), [0.25, 0.75, 0.9], id="of each version and settings"),
    ],
)
def test_the_current_row_of_an_image_and_a_model(tmp_path, wanted, confidences):
    """D1: an export after a new version of a model had both rows."""
    output = str(tmp_path)
    write_rows(output, [detected("a", confidence=0.5)], made_at=1.0)
    write_rows(output, [detected("a", confidence=0.9)], version=VERSION._replace(settings="00000000"), made_at=2.0)
    write_rows(output, [detected("a", confidence=0.75, version=OTHER)], version=OTHER, made_at=3.0)
    write_rows(output, [detected("a", confidence=0.25)], made_at=4.0)
    write_rows(output, [], [failed("a")], made_at=5.0)  # of the key of the row before, which it does not beat
    for _ in range(2):
        found = sorted(row["detections"][0]["confidence"] for row in current_rows(output, wanted))
        assert found == confidences
        compacted(output)


def test_a_newer_generation_without_a_result_has_no_row_of_the_older_one(tmp_path):
    output = str(tmp_path)
    write_rows(output, [detected("a", "1"), detected("b", "1")], made_at=1.0)
    write_rows(output, [], [failed("a", "2"), failed("b", "")], made_at=2.0)
    assert uris(output) == ["b"], "whose dead letter knows no generation"
    assert [row["image"]["uri"] for row in current_rows(output, kind=DEAD_LETTERS)] == ["a"]


@log_lines()
def test_a_compaction_leaves_alone_what_another_release_merged_by_another_rule(output, capsys):
    before = rows_in(output)
    path = write_shard(
        output, DETECTIONS, pq.read_table(list_shards(output)[0].path).replace_schema_metadata({b"rule": b"9"}), "compact"
    )
    assert compacted(output) == Compacted(3, 1, 3, 0)
    assert os.path.exists(path) and "another release merged it by another rule" in capsys.readouterr().err
    assert sorted({row["image"]["uri"] for row in before}) == uris(output)


def test_shards_have_checksums_that_are_checked(output):
    (path,) = write_rows(output, [detected("d")])
    damaged(path, "values")
    assert pq.read_table(path, columns=["key"]).num_rows == 1
    results = ResultsFolder(output)
    assert len([*results.batches()]) == 3
    assert "CRC checksum" in results.damaged[path]
