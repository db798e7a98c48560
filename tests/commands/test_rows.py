"""`detect-objects rows` and other tools: a results folder is read with one call each."""

import json
import os
import re
import shutil
import subprocess
import sys

import duckdb
import pandas as pd
import pytest

from pipeline.commands import export, rows
from pipeline.commands.compact import main as compact
from pipeline.records import dead_letter_row, detection_row
from pipeline.results.current import current_rows
from pipeline.results.layout import DEAD_LETTERS
from pipeline.results.row_rule import current_sql
from tests.conftest import REPO
from tests.shard_rows import OTHER, VERSION, detected, failed, write_rows
from tests.spark.job_server import JARS, OPENS

OTHER_SETTINGS = VERSION._replace(settings="00000000")


@pytest.fixture
def out(tmp_path, monkeypatch):
    """A results folder with superseded rows, `out` in the current folder."""
    monkeypatch.chdir(tmp_path)
    write_rows("out", [detected("a.jpg"), detected("\udc80.jpg")], [failed("b.jpg"), failed("c.jpg")], made_at=1.0)
    write_rows("out", [detected("a.jpg", confidence=0.75), detected("c.jpg")], made_at=2.0)
    return "out"


def printed(capfdbinary, *arguments):
    assert rows.main([*arguments]) == 0
    lines = capfdbinary.readouterr().out.splitlines()
    return sorted(map(json.loads, lines), key=str)


def as_rows(*records):
    to_row = {True: detection_row, False: dead_letter_row}
    return sorted((json.loads(json.dumps(to_row[hasattr(each, "width")](each))) for each in records), key=str)


def test_rows_prints_what_counts_or_all_and_dead_letters_that_no_detection_answers(out, capfdbinary):
    newest = (detected("a.jpg", confidence=0.75), detected("\udc80.jpg"), detected("c.jpg"))
    assert printed(capfdbinary, out) == as_rows(*newest)
    assert printed(capfdbinary, out, "--all") == as_rows(*newest, detected("a.jpg"))
    assert printed(capfdbinary, out, "--dead") == as_rows(failed("b.jpg"))
    assert printed(capfdbinary, out, "--dead", "--all") == as_rows(failed("b.jpg"), failed("c.jpg"))
    before = printed(capfdbinary, out)
    assert compact([out]) == 0
    capfdbinary.readouterr()
    assert printed(capfdbinary, out) == printed(capfdbinary, out, "--all") == before


def test_the_same_rows_are_an_export(out, capfdbinary):
    assert export.main([out, "--format", "jsonl", "--to", "exported"]) == 0
    capfdbinary.readouterr()
    with open("exported/detections.jsonl", "rb") as file:
        assert sorted(map(json.loads, file), key=str) == printed(capfdbinary, out)
    assert len(pd.read_json("exported/detections.jsonl", lines=True)) == 3


@pytest.mark.slow
def test_a_reader_that_stops_early_is_no_error(tmp_path):
    for number in range(20):
        write_rows(f"{tmp_path}", [detected(f"{number}-{n}.jpg") for n in range(500)])
    command = [sys.executable, "-m", "pipeline", "rows", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPO) as process:
        assert json.loads(process.stdout.readline())["model"]["name"] == "yolo"
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


@pytest.mark.parametrize("folder", ["missing", "photos"])
def test_a_folder_without_results_is_one_line(tmp_path, monkeypatch, capsys, folder):
    monkeypatch.chdir(tmp_path)
    os.mkdir("photos")
    assert rows.main([folder]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: output ") and captured.err.count("\n") == 1


def natural_calls() -> dict[str, str]:
    """The calls that docs/results.md shows, by the tool whose name they begin with."""
    document = (REPO / "docs" / "results.md").read_text()
    (block,) = re.findall(r"```python\n(# one call each.*?)```", document, re.DOTALL)
    return {line.partition(".")[0]: line for line in block.splitlines() if not line.startswith("#")}


def test_pandas_and_duckdb_read_a_folder_with_the_call_that_the_docs_show(out):
    """They see every row, also those that a newer one superseded."""
    calls = natural_calls()
    by_pandas = eval(calls["pandas"], {"pandas": pd})
    assert sorted(by_pandas.uri) == ["\\udc80.jpg", "a.jpg", "a.jpg", "c.jpg"]
    assert by_pandas.detections.explode().str["class_name"].tolist() == ["cat"] * 4
    assert len(eval(calls["duckdb"], {"duckdb": duckdb})) == 4
    assert len(pd.read_parquet(f"{out}/{DEAD_LETTERS}")) == 2


def test_duckdb_applies_the_rule_with_the_query_that_the_docs_show(out):
    document = (REPO / "docs" / "results.md").read_text()
    (query,) = re.findall(r"```sql\n(WITH every_row AS .*?'out/detections.*?)```", document, re.DOTALL)
    found = duckdb.sql(query).df()
    assert sorted(found.uri) == ["\\udc80.jpg", "a.jpg", "c.jpg"]
    assert found[found.uri == "a.jpg"].detections.iloc[0][0]["confidence"] == pytest.approx(0.75)


def test_the_query_of_the_docs_gives_the_current_rows(tmp_path, monkeypatch):
    """Of several versions, generations and models, and beside newer dead letters."""
    monkeypatch.chdir(tmp_path)
    write_rows("out", [detected("a", confidence=0.5), detected("b"), detected("c")], made_at=1.0)
    write_rows("out", [detected("a", confidence=0.75, version=OTHER)], version=OTHER, made_at=2.0)
    write_rows("out", [detected("a", confidence=0.9)], [failed("b", "2"), failed("c", ""), failed("a")], made_at=3.0)
    write_rows(
        "out", [detected("a", version=VERSION._replace(model="other"))], version=VERSION._replace(model="other"), made_at=1.0
    )
    found = duckdb.sql(current_sql("'out/detections/*.parquet'", "'out/dead_letters/*.parquet'")).df()
    by_sql = sorted((row.uri, row.model, round(row.detections[0]["confidence"], 2)) for row in found.itertuples())
    rows = current_rows("out")
    assert by_sql == sorted((row["image"]["uri"], row["model"]["name"], row["detections"][0]["confidence"]) for row in rows)
    assert by_sql == [("a", "other", 0.5), ("a", "yolo", 0.9), ("c", "yolo", 0.5)]


IN_SPARK = """
import org.apache.spark.sql.*;

public class InSpark {
  public static void main(String[] arguments) {
    SparkSession spark = SparkSession.builder().master("local[1]").config("spark.ui.enabled", "false").getOrCreate();
    for (Row row : CALL.select("uri").collectAsList()) System.out.println("uri " + row.getString(0));
    spark.stop();
  }
}
"""


@pytest.mark.matrix
def test_spark_reads_a_folder_with_the_call_that_the_docs_show(out, tmp_path):
    """In Java, on the Spark of other tests: its call is Python's, but for the brackets behind `read`."""
    if not (JARS.is_dir() and shutil.which("javac")):
        pytest.skip("no Spark, or no JDK; get Spark with `make spark`")
    program = tmp_path / "InSpark.java"
    program.write_text(IN_SPARK.replace("CALL", natural_calls()["spark"].replace("spark.read.", "spark.read().")))
    done = subprocess.run(["java", *OPENS, "-cp", f"{JARS}/*", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = [line.removeprefix("uri ") for line in done.stdout.splitlines() if line.startswith("uri ")]
    assert sorted(found) == ["\\udc80.jpg", "a.jpg", "a.jpg", "c.jpg"]
