"""Each row is in BigQuery once, whatever is killed, merged or refused; against a server of its REST protocol."""

import base64
import datetime
import glob
import json
import shutil
import sys
import threading
from pathlib import Path

import jsonschema
import pytest

from models import progress
from pipeline.compact import compact
from pipeline.load_bigquery import main
from pipeline.results import bigquery_loader
from pipeline.results.bigquery_loader import table_schema
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, is_result
from pipeline.row_schema import dead_letter_schema, detection_schema
from tests.bigquery_server import bigquery_server
from tests.fixtures import REPO
from tests.processes import running, wait_until
from tests.results.test_run import dies_at
from tests.rows_of_files import Row, dead, found, write_rows

HOURS = [f"20261120T{hour:02d}0000Z-0a1b-00000-of-00001" for hour in range(4)]
ROWS = [found("a", boxes=2, extra={"camera": 7}), found("b"), dead("x")]


@pytest.fixture
def server(monkeypatch):
    with bigquery_server() as running:
        monkeypatch.setenv("BIGQUERY_EMULATOR_HOST", running.host)
        yield running


@pytest.fixture
def output(tmp_path):
    write_rows(f"{tmp_path}/out", HOURS[0], ROWS)
    return f"{tmp_path}/out"


def load(output, table="p.d.t", *flags):
    return main(["--output", output, "--table", table, *flags])


def uris(server, table="d.t"):
    """The images of a table's rows, in order, each as often as it is there."""
    return sorted(row["image"].get("uri", "") for row in server.rows.get(table, []))


def log_of(output):
    return glob.glob(f"{output}/bigquery/*/*.jsonl")


def test_tables_are_created_with_columns_from_the_schema_by_day_and_model(server, output, capsys):
    assert load(output) == 0, capsys.readouterr().err
    assert capsys.readouterr().out == "3 rows loaded; 0 refused\n"
    row = server.rows["d.t"][0]
    assert row["detections"] == ROWS[0].row["detections"]
    assert row["extra"] == {"camera": 7}
    assert row["made_at"] == datetime.datetime(2026, 11, 20, tzinfo=datetime.timezone.utc)
    assert row["model_name"] == "bright"
    assert uris(server) == ["a", "b"]
    assert [row["reason"] for row in server.rows["d.t_dead_letters"]] == ["not_found"]
    for table in server.tables.values():
        assert table["timePartitioning"]["field"] == "made_at"
        assert table["clustering"]["fields"] == ["model_name"]
    assert not log_of(output)
    state = glob.glob(f"{output}/bigquery/*/*")
    assert state
    assert all(is_result(path, output) for path in state)


def test_a_load_that_takes_long_shows_how_far_it_is(server, output, capsys, monkeypatch):
    write_rows(output, HOURS[1], [found("c")])
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0)
    assert load(output) == 0
    assert "loading detections:  50% 1/2" in capsys.readouterr().err


def test_a_second_load_sends_what_is_new_and_a_merged_file_is_nothing_new(server, output):
    load(output)
    write_rows(output, HOURS[1], [found("c"), found("b")])
    assert compact(output).before
    assert load(output) == 0
    jobs = {*server.jobs}
    write_rows(output, HOURS[2], [found("b")])
    assert compact(output).before
    assert load(output) == load(output) == 0
    assert uris(server) == ["a", "b", "c"]
    assert {*server.jobs} == jobs


def test_a_folder_on_cloud_storage_and_a_load_that_was_killed_there(server, strict_gcs_bucket, monkeypatch):
    """The job is accepted, and the state does not know it; a compaction comes in between."""
    output = f"gs://{strict_gcs_bucket.name}/out"
    write_rows(output, HOURS[0], ROWS)

    def die(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bigquery_loader._Loader, "_remember", die)
        assert load(output) == 130
    assert len(server.jobs) == 1
    assert [blob.name for blob in strict_gcs_bucket.list_blobs(prefix="out/bigquery/") if blob.name.endswith(".jsonl")]
    write_rows(output, HOURS[1], [found("c"), found("b")])
    assert compact(output).before
    assert load(output) == load(output) == 0
    assert uris(server) == ["a", "b", "c"]
    assert len(server.rows["d.t_dead_letters"]) == 1


def test_the_age_of_a_row_is_that_of_its_window_also_after_it_was_merged(server, output):
    write_rows(output, HOURS[3], [found("c")])
    compact(output)
    load(output)
    assert {row["image"]["uri"]: row["made_at"].hour for row in server.rows["d.t"]} == {"a": 0, "b": 0, "c": 3}


def test_a_result_that_differs_is_a_row_of_its_own(server, output):
    load(output)
    write_rows(output, HOURS[1], [found("b", boxes=3)])
    load(output)
    assert uris(server) == ["a", "b", "b"]


def test_killed_at_any_change_of_the_disk_and_compacted_no_row_is_missing_or_doubled(server, output, tmp_path, monkeypatch):
    monkeypatch.setattr(bigquery_loader, "_ROWS_A_JOB", 2)
    write_rows(output, HOURS[1], [found("c"), found("d"), found("e")])
    number, accepted = 0, set()
    while True:
        number += 1
        copy, table = f"{tmp_path}/{number}", f"t{number}"
        shutil.copytree(output, copy)
        killed = dies_at(number, lambda copy=copy, table=table: load(copy, f"p.d.{table}"))
        accepted.add((len(server.rows.get(f"d.{table}", [])), len(log_of(copy))))
        compact(copy)
        assert load(copy, f"p.d.{table}") == 0
        assert uris(server, f"d.{table}") == [*"abcde"], number
        assert uris(server, f"d.{table}_dead_letters") == ["x"], number
        assert not log_of(copy)
        if not killed:
            break
    assert {(0, 0), (2, 1)} <= accepted, "the worst moment: BigQuery has the job, and the state does not know it"


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_answer_that_is_lost_is_asked_for_again(when, server, output):
    failures = [503, 503]
    server.answer_instead = lambda at: failures.pop() if at == when and failures else None
    assert load(output) == 0
    assert not failures
    assert uris(server) == ["a", "b"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_load_that_fails_goes_on_after_a_compaction(when, server, output, capsys):
    """Its rows are in the log, and BigQuery has its job or has not."""
    server.answer_instead = lambda at: 403 if at == when else None
    assert load(output) == 1
    assert capsys.readouterr().err.startswith("error: the load failed, and the next one goes on: 403")
    assert (uris(server), len(log_of(output))) == ([] if when == "before" else ["a", "b"], 1)
    write_rows(output, HOURS[1], [found("c")])
    compact(output)
    server.answer_instead = lambda _at: None
    assert load(output) == 0
    assert uris(server) == ["a", "b", "c"]


def test_a_job_that_fails_for_bigquerys_own_reasons_is_repeated_under_another_id(server, output):
    failures = [{"reason": "backendError", "message": "try again"}]
    server.outcome = lambda _job: failures.pop() if failures else None
    assert load(output) == 0
    assert uris(server) == ["a", "b"]
    assert sorted(name[-2:] for name in server.jobs) == ["-0", "-0", "-1"]


def test_a_refused_row_is_kept_with_its_reason_and_costs_no_other_row(server, output, capsys):
    wrong = Row(DETECTIONS, {**found("w").row, "colour": "red"})
    write_rows(output, HOURS[1], [found("c"), wrong, found("d")])
    Path(output, "detections", f"detections-{HOURS[2]}.jsonl").write_bytes(found("e").line + b"no row\n")
    assert load(output) == 1
    assert uris(server) == [*"abcde"]
    printed = capsys.readouterr()
    assert printed.out == "6 rows loaded; 2 refused\n"
    assert "No such field: colour; it is in " in printed.err
    assert len(printed.err.splitlines()) == 2
    kept = [Path(path).read_text().splitlines() for path in glob.glob(f"{output}/bigquery/*/*.refused")]
    assert {json.loads(row).get("image", {}).get("uri") for row, _reason in kept} == {"w", None}
    assert load(output) == 0
    assert uris(server) == [*"abcde"]


def test_killed_while_it_looks_for_a_refused_row(server, output, tmp_path):
    write_rows(output, HOURS[1], [found("c"), Row(DETECTIONS, {**found("w").row, "colour": "red"}), found("d")])
    number, killed = 0, True
    while killed:
        number += 1
        copy, table = f"{tmp_path}/{number}", f"t{number}"
        shutil.copytree(output, copy)
        killed = dies_at(number, lambda copy=copy, table=table: load(copy, f"p.d.{table}"))
        compact(copy)
        load(copy, f"p.d.{table}")
        assert uris(server, f"d.{table}") == [*"abcd"], number
        assert len(glob.glob(f"{copy}/bigquery/*/*.refused")) == 1


def test_many_refused_rows_stop_the_load(server, output, capsys, monkeypatch):
    monkeypatch.setattr(bigquery_loader, "_MOST_REFUSED", 2)
    write_rows(output, HOURS[1], [Row(DETECTIONS, {**found(uri).row, "colour": "red"}) for uri in "vwxyz"])
    assert load(output) == 2
    assert "BigQuery refused 2 rows, so the load stops" in capsys.readouterr().err


def test_another_load_at_the_same_time_is_refused(server, output, capfd):
    """While the first waits for its answer, the second ends; together they load each row once."""
    arrived, go_on = threading.Event(), threading.Event()

    def hold(when):
        if when == "before":
            arrived.set()
            go_on.wait()

    server.answer_instead = hold
    command = [sys.executable, "-m", "pipeline.load_bigquery", "--output", output, "--table", "p.d.t"]
    with running(command, cwd=REPO) as first:
        try:
            wait_until(arrived.is_set, process=first)
            assert load(output) == 3
        finally:
            go_on.set()
        assert first.wait() == 0, capfd.readouterr().err
    assert "another load of the table is at work" in capfd.readouterr().err
    assert load(output) == 0
    assert uris(server) == ["a", "b"]


def test_a_table_that_was_made_anew_gets_all_rows(server, output):
    load(output)
    server.tables.clear()
    server.rows.clear()
    server.tables["d.other"] = {}
    load(output)
    assert uris(server) == ["a", "b"]


def test_a_large_job_is_sent_in_parts(server, output):
    long = "x" * 30_000
    write_rows(output, HOURS[1], [found(f"{number:03d}{long}") for number in range(200)])
    assert load(output) == 0
    assert len(server.rows["d.t"]) == 202


def test_rows_of_megabytes_are_loaded_in_jobs_of_bounded_size(server, output):
    """Dead letters may carry the bytes of their image; a job of 100,000 of them would not fit into memory."""
    letters = [dead(f"{number:02d}") for number in range(40)]
    for letter in letters:
        letter.row["payload_base64"] = "QUJD" * 500_000
    write_rows(output, HOURS[1], letters)
    assert load(output) == 0
    assert len(server.rows["d.t_dead_letters"]) == 41
    jobs = [job for job in server.jobs.values() if "dead_letters" in str(job["configuration"]["load"]["destinationTable"])]
    assert len(jobs) == 2


def test_wrong_places_are_one_line(server, output, capsys, monkeypatch):
    assert load(output, "p.nowhere.t") == 2
    assert "expected its dataset to exist" in capsys.readouterr().err
    assert load(output, "t") == 2
    assert capsys.readouterr().err == "error: --table: expected project.dataset.table, got 't'\n"
    assert load(f"{output}x") == 2
    assert "found none there" in capsys.readouterr().err
    load(output)
    capsys.readouterr()
    columns = server.tables["d.t"]["schema"]["fields"]
    columns[0]["type"] = "INTEGER"
    assert load(output) == 2
    assert "column row_id is INTEGER NULLABLE, expected STRING NULLABLE" in capsys.readouterr().err
    monkeypatch.delenv("BIGQUERY_EMULATOR_HOST")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", f"{output}/none.json")
    assert load(output) == 2
    assert capsys.readouterr().err.startswith("error: no credentials for BigQuery: ")


def test_columns_beside_ours_are_no_other_schema(server, output):
    load(output)
    server.tables["d.t"]["schema"]["fields"].append({"name": "label", "type": "STRING", "mode": "NULLABLE"})
    write_rows(output, HOURS[1], [found("c")])
    assert load(output) == 0


def test_every_field_of_rows_and_dead_letters_has_its_column(server, output):
    letter = {**dead("y").row, "model": {"name": "m", "version": ""}, "record": "f@0-1", "extra": {"a": None}}
    letter["payload_base64"] = base64.b64encode(b"\xff?").decode()
    jsonschema.validate(letter, dead_letter_schema())
    jsonschema.validate(ROWS[0].row, detection_schema())
    assert letter.keys() == dead_letter_schema()["properties"].keys()
    write_rows(output, HOURS[1], [Row(DEAD_LETTERS, letter), found("\udcff")])
    assert load(output) == 0
    assert uris(server) == ["?", "a", "b"]
    kept = next(row for row in server.rows["d.t_dead_letters"] if row["image"]["uri"] == "y")
    assert kept["payload_base64"] == b"\xff?"
    for kind in (DETECTIONS, DEAD_LETTERS):
        assert len({column.name for column in table_schema(kind)}) == len(table_schema(kind))
