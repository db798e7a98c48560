"""Each row is in BigQuery once, whatever is killed, merged or refused; against a server of its REST protocol."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
from google.cloud import bigquery

from models.base import progress
from pipeline.commands.load import main
from pipeline.log_lines import log_lines
from pipeline.records import DeadLetter, ImageRef
from pipeline.results import bigquery_loader
from pipeline.results.compact import compact
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.reader import list_shards
from pipeline.results.rows import FORMATS, Column, RowFormat
from pipeline.results.shards import write_shard
from tests.bigquery_server import BigQueryServer
from tests.emulators import answering
from tests.memory import less_memory_than
from tests.shard_rows import detected, failed, write_rows

CAMERA = DeadLetter(ImageRef("inline:cam.png", "ab", extra='{"camera": 7}'), "detect", "model_failed", "no", b"\xff?")


@pytest.fixture
def server(monkeypatch):
    running = BigQueryServer()
    with answering(running.answer) as port:
        monkeypatch.setenv("BIGQUERY_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        yield running


@pytest.fixture
def output(tmp_path):
    write_rows(f"{tmp_path}/out", [detected("a"), detected("b")], [failed("x"), CAMERA])
    return f"{tmp_path}/out"


def load(output, table="p.d.t", *flags):
    return main(["--output", output, "--table", table, *flags])


def uris(server, table="d.t"):
    """The images of a table's rows, in order, each as often as it is there."""
    return sorted(row["uri"] for row in server.rows.get(table, []))


def test_tables_have_the_columns_of_shards_by_day_and_model(server, output, capsys):
    before = {path: path.stat().st_mtime_ns for path in Path(output).rglob("*")}
    assert load(output) == 0, capsys.readouterr().err
    assert capsys.readouterr().out == "4 rows loaded; 0 files refused\n"
    assert uris(server) == ["a", "b"]
    kept = next(row for row in server.rows["d.t_dead_letters"] if row["uri"] == "inline:cam.png")
    assert (kept["payload"], json.loads(kept["extra"]), kept["reason"]) == (b"\xff?", {"camera": 7}, "model_failed")
    assert server.rows["d.t"][0]["detections"][0]["box_xyxy"] == [1.0, 2.0, 30.5, 40.25]
    assert sorted(server.tables) == ["d.t", "d.t_dead_letters"], "the temporary tables are dropped"
    for kind, table in zip((DETECTIONS, DEAD_LETTERS), server.tables.values(), strict=True):
        assert (table["timePartitioning"]["field"], table["clustering"]["fields"]) == ("made_at", ["model"])
        assert [column["name"] for column in table["schema"]["fields"]] == FORMATS[kind].schema.names
    assert {path: path.stat().st_mtime_ns for path in Path(output).rglob("*")} == before, "a load keeps no log"


@pytest.mark.slow
def test_a_second_load_adds_what_is_new_and_a_merged_shard_is_nothing_new(server, output, capsys, monkeypatch):
    """And shows how far it is where it takes long."""
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0)
    load(output)
    write_rows(output, [detected("c"), detected("b", "2")])
    monkeypatch.setattr(bigquery_loader, "_PART_FILES", 1)
    assert load(output) == load(output) == 0
    assert "loading detections:  50% 1/2" in capsys.readouterr().err
    assert uris(server) == ["a", "b", "b", "c"]
    assert compact(output).files == 1
    capsys.readouterr()
    assert load(output) == 0
    assert capsys.readouterr().out.startswith("0 rows loaded") and uris(server) == ["a", "b", "b", "c"]


def test_a_bundle_that_ran_twice_is_in_the_table_once_and_a_newer_row_is_a_row_of_its_own(server, output):
    for _ in range(2):
        write_rows(output, [detected("c")], run="0a1b", made_at=1_795_226_400.5)
    write_rows(output, [detected("c")], run="0a1c", made_at=1_795_312_800.0)
    assert load(output) == 0
    assert uris(server) == ["a", "b", "c", "c"]


@pytest.mark.matrix
def test_a_folder_on_cloud_storage_is_read_by_bigquery_itself(server, gcs_bucket):
    output = f"gs://{gcs_bucket.name}/out"
    write_rows(output, [detected("a")], [failed("x")])
    write_rows(output, [detected("b")])
    assert load(output) == 0
    assert compact(output).files == 1
    assert load(output) == 0
    assert (uris(server), uris(server, "d.t_dead_letters")) == (["a", "b"], ["x"])
    loads = [job["configuration"]["load"] for job in server.jobs.values() if "load" in job["configuration"]]
    assert [len(job["sourceUris"]) for job in loads] == [2, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_or_failed_at_any_job_the_next_load_adds_each_row_once(server, output, when):
    """Also after BigQuery accepted the MERGE, and the answer is lost."""
    write_rows(output, [detected("c")])
    number, failed_once = 0, 1
    while failed_once:
        number += 1
        answers = iter([*[None] * (number - 1), 403])

        def refuse(at, answers=answers):
            return next(answers, None) if at == when else None

        server.answer_instead = refuse
        failed_once = load(output, f"p.d.t{number}")
        server.answer_instead = lambda _at: None
        assert load(output, f"p.d.t{number}") == 0
        assert uris(server, f"d.t{number}") == ["a", "b", "c"], number
        assert uris(server, f"d.t{number}_dead_letters") == ["inline:cam.png", "x"], number
    assert number == 6, "two uploads and a MERGE of detections, an upload and a MERGE of dead letters"


@pytest.mark.slow
@log_lines()
def test_a_file_that_bigquery_refuses_costs_no_other_file(server, output, capsys):
    write_rows(output, [detected("c")])
    (kept,) = write_rows(output, [detected("w")])
    pq.write_table(pq.read_table(kept).append_column("colour", pa.array(["red"])), kept)
    (damaged,) = write_rows(output, [detected("v")])
    Path(damaged).write_bytes(b"PAR1")
    write_rows(output, [detected("d")])
    assert load(output) == 1
    printed = capsys.readouterr()
    assert printed.out == "6 rows loaded; 2 files refused\n"
    assert f"warning: BigQuery refuses {kept}: " in printed.err and "No such field: colour" in printed.err
    assert f"warning: {damaged} cannot be read and is ignored: " in printed.err and len(printed.err.splitlines()) == 2
    assert uris(server) == [*"abcd"]
    assert sorted(server.tables) == ["d.t", "d.t_dead_letters"]


def test_a_shard_that_a_compaction_takes_away_meanwhile_is_read_in_the_merged_one(server, output):
    write_rows(output, [detected("c")])
    merges = []

    def merge_once(_when):
        if not merges:
            merges.append(compact(output).files)

    server.answer_instead = merge_once
    assert load(output) == 0
    assert merges == [1] and uris(server) == ["a", "b", "c"]


@pytest.mark.slow
def test_large_dead_letters_are_loaded_in_parts_of_bounded_bytes(server, tmp_path, monkeypatch):
    """150 dead letters with 2 MB each made one job of 400 MB."""
    monkeypatch.setattr(bigquery_loader, "_PART_BYTES", 4 << 20)
    output, random = f"{tmp_path}/out", np.random.default_rng(1)
    for number in range(12):
        letter = DeadLetter(ImageRef("inline:a", str(number)), "detect", "model_failed", "no", random.bytes(2_000_000))
        write_rows(output, letters=[letter])
    with less_memory_than(100 << 20):  # the server in this process keeps 24 MB, and the uploads a few
        assert load(output) == 0
    assert len(server.rows["d.t_dead_letters"]) == 12
    assert sum("query" in job["configuration"] for job in server.jobs.values()) == 6, "a part is two files here"


def test_a_release_with_one_more_column_adds_it_to_the_table(server, output, monkeypatch):
    load(output)
    columns = server.tables["d.t"]["schema"]["fields"]
    columns.append({"name": "label", "type": "STRING", "mode": "NULLABLE"})
    columns = (*FORMATS[DETECTIONS].columns, Column("colour", pa.string(), None, "9.9.0"))
    monkeypatch.setitem(FORMATS, DETECTIONS, RowFormat(columns))
    (row, _) = pq.read_table(list_shards(output, (DETECTIONS,))[0].path).to_pylist()
    write_shard(
        output,
        DETECTIONS,
        pa.Table.from_pylist([{**row, "uri": "c", "key": 7, "colour": "red"}], FORMATS[DETECTIONS].schema),
        "0a1b",
    )
    assert load(output) == 0
    assert {row["uri"]: row.get("colour") for row in server.rows["d.t"]} == {"a": None, "b": None, "c": "red"}
    assert [column["name"] for column in server.tables["d.t"]["schema"]["fields"]][-2:] == ["label", "colour"]


def test_a_broken_connection_is_no_file_that_bigquery_refuses(server, output, capsys, monkeypatch):
    """D18: each half was sent again, down to single files, which were then refused."""
    sent = []

    def broken(self, file, *_args, **_how):
        sent.append(file.name)
        raise requests.ConnectionError("Connection aborted")

    write_rows(output, [detected("c")])
    monkeypatch.setattr(bigquery.Client, "load_table_from_file", broken)
    assert load(output) == 1
    said = capsys.readouterr().err
    assert len(sent) == 1 and said == "error: the load failed, and the next one goes on: Connection aborted\n"


def test_since_leaves_out_files_that_were_written_before(server, output, capsys):
    assert load(output, "p.d.t", "--since", "2999-01-01") == 0
    assert capsys.readouterr().out == "0 rows loaded; 0 files refused\n"
    assert load(output, "p.d.t", "--since", "yesterday") == 0
    assert uris(server) == ["a", "b"]


@pytest.mark.parametrize(
    ("table", "flags", "said"),
    [
        ("p.nowhere.t", (), "error: table p.nowhere.t: expected its dataset to exist"),
        ("t", (), "error: --table: expected project.dataset.table, got 't'"),
        ("p.d.t", ("--dead-letters-table", "d"), "error: --dead-letters-table: expected project.dataset.table, got 'd'"),
        ("p.d.t", ("--output", "nowhere"), "error: output 'nowhere': expected a results folder, found none there"),
        ("p.d.t", ("--since", "2026-13-01"), "error: --since: expected days such as 2026-11-20"),
    ],
)
def test_a_wrong_place_or_time_is_one_line(server, output, capsys, table, flags, said):
    assert load(output, table, *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == 1


def test_a_table_of_another_schema_and_missing_credentials_are_one_line(server, output, capsys, monkeypatch):
    load(output)
    server.tables["d.t"]["schema"]["fields"][1]["type"] = "INTEGER"
    assert load(output) == 2
    assert "column uri is INTEGER NULLABLE, expected STRING NULLABLE" in capsys.readouterr().err
    monkeypatch.delenv("BIGQUERY_EMULATOR_HOST")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", f"{output}/none.json")
    assert load(output) == 2
    assert capsys.readouterr().err.startswith("error: no credentials for BigQuery: ")
