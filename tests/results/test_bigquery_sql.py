"""The statements for BigQuery in docs/results.md: parsed in its dialect by sqlglot, and run on a folder, in DuckDB.

No emulator of BigQuery that analyses statements as BigQuery does can be installed here.
"""

import re

import duckdb
import pytest
import sqlglot
from sqlglot import exp

from pipeline.results.compact import compact
from pipeline.results.current import current_rows
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.rows import FORMATS, json_rows
from tests.conftest import REPO
from tests.shard_rows import OTHER, VERSION, detected, failed, write_rows


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """Several versions, generations and models, names that are no Unicode, and newer dead letters; a database beside them."""
    monkeypatch.chdir(tmp_path)
    other_model = VERSION._replace(model="other")
    write_rows("out", [detected("a", confidence=0.5), detected("b"), detected("c"), detected("\udc80")], made_at=1.0)
    write_rows("out", [detected("a", confidence=0.75, version=OTHER)], version=OTHER, made_at=2.0)
    write_rows("out", [detected("c", version=OTHER)], version=OTHER, made_at=2.0)
    write_rows("out", [], [failed("a"), failed("b", "2"), failed("c", ""), failed("d")], made_at=3.0)
    write_rows("out", [detected("a", version=other_model)], version=other_model, made_at=1.0)
    with duckdb.connect() as database:
        database.execute("CREATE SCHEMA dataset")
        yield database


def statement(beginning):
    """A statement that the docs show, which begins so."""
    document = (REPO / "docs" / "results.md").read_text()
    (found,) = re.findall(rf"```sql\n({beginning}.*?)```", document, re.DOTALL)
    return found


def in_duckdb(said, name=None, kind=DETECTIONS):
    """A statement of BigQuery for DuckDB. An external table is a view of its files, in `out` instead of the bucket."""
    parsed = sqlglot.parse_one(said, dialect="bigquery")
    assert isinstance(parsed, exp.Create) and not parsed.find(exp.Command, exp.Anonymous), "parsed as a whole"
    if parsed.args["kind"] == "VIEW":
        return parsed.sql("duckdb")
    assert parsed.find(exp.ExternalProperty) and parsed.find(exp.FileFormatProperty).this.this == "PARQUET"
    options = {each.name: each.args["value"] for each in parsed.find_all(exp.Property) if type(each) is exp.Property}
    assert options.keys() == {"enable_list_inference", "uris"} and options["enable_list_inference"].this is True
    (uri,) = (each.this for each in options["uris"].expressions)
    files = uri.removeprefix("gs://bucket/").replace(DETECTIONS, kind)
    return f"CREATE VIEW {name or parsed.this.sql('duckdb')} AS SELECT * FROM '{files}'"


def rows_of(found):
    """The rows of a relation that has the columns of detections, in order."""
    names = FORMATS[DETECTIONS].schema.names
    table = found.to_arrow_table().select(names)
    batches = (FORMATS[DETECTIONS].conform(batch) for batch in table.to_batches())
    return sorted((row for batch in batches for row in json_rows(batch, DETECTIONS)), key=repr)


def test_bigquery_reads_a_folder_with_the_call_that_the_docs_show(dataset):
    """It sees every row, as pandas, DuckDB and Spark do."""
    dataset.execute(in_duckdb(statement("CREATE EXTERNAL TABLE")))
    found = rows_of(dataset.sql("FROM dataset.detections"))
    assert [row["image"]["uri"] for row in found].count("a") == 3 and len(found) == 7


@pytest.mark.parametrize("merged", [False, True])
def test_the_view_of_bigquery_has_the_rows_that_count(dataset, merged):
    tables = {DETECTIONS: "dataset.detections", DEAD_LETTERS: "dataset.detections_dead_letters"}
    for kind, name in tables.items():
        dataset.execute(in_duckdb(statement("CREATE EXTERNAL TABLE"), name, kind))
    dataset.execute(in_duckdb(statement("CREATE OR REPLACE VIEW")))
    if merged:
        compact("out")
    found = rows_of(dataset.sql("FROM dataset.current_detections"))
    assert found == sorted(current_rows("out"), key=repr)
    counted = sorted((row["image"]["uri"], row["model"]["name"], row["model"]["version"]) for row in found)
    assert counted == [("a", "other", "7"), ("a", "yolo", "7"), ("c", "yolo", "8"), ("\udc80", "yolo", "7")]
