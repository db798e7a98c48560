"""The policy of docs/compatibility.md: what release 0.1.0 wrote is read, counts as done, and is merged with rows of this release.

`tests/golden/results_0_1_0` is the results folder of a job with the bundled detector over four objects of an emulated bucket, two
of which are damaged. Its files are never written anew; the summary lies here on one line.
"""

import dataclasses
import hashlib
import json
import shutil

import pyarrow.parquet as pq
import pytest

from pipeline import graph, run
from pipeline.commands import export
from pipeline.config import load_config
from pipeline.listing.done_rows import DETECTED, FAILED, DoneRows
from pipeline.records import ImageRef
from pipeline.results.compact import compact
from pipeline.results.completion import RowVersion
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.reader import list_shards
from pipeline.results.rows import FORMATS
from tests.fixtures import RELEASE, REPO
from tests.shard_rows import detected, rows_in, write_rows

GENERATIONS = {
    row["image"]["uri"]: row["image"]["generation"]
    for view in sorted(RELEASE.glob("*/*.jsonl"))
    for row in map(json.loads, view.read_text(encoding="utf-8").splitlines())
}
A, B, CUT, EMPTY = (f"gs://photos/day/{name}.jpg" for name in ("a", "b ä", "cut", "empty"))
SETTINGS = load_config([], {"model.path": "digits"}).as_dict()


@pytest.fixture
def results(tmp_path) -> str:
    """A copy of the folder, in which the summary has the bytes that 0.1.0 wrote."""
    summary = shutil.copytree(RELEASE, tmp_path / "out") / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text("utf-8")), indent=2, ensure_ascii=False) + "\n", "utf-8")
    assert hashlib.sha256(summary.read_bytes()).hexdigest() == "e94f7a0c920f12a4e4bf20d54f6af17dcae0fedf0247d552ec8c98ce7aeeb518"
    return str(summary.parent)


@pytest.mark.parametrize("kind", [DETECTIONS, DEAD_LETTERS])
def test_rows_are_read_as_their_views_show_them_and_no_column_is_gone_or_has_another_type(results, kind):
    (view,) = RELEASE.glob(f"{kind}/*.jsonl")
    rows = rows_in(results, kind)
    assert rows == sorted(map(json.loads, view.read_text(encoding="utf-8").splitlines()), key=lambda row: row["image"]["uri"])
    (shard,) = list_shards(results, (kind,))
    written, schema = pq.read_schema(shard.path), FORMATS[kind].schema
    assert [schema.field(name).type for name in written.names] == written.types


def test_its_rows_and_permanent_failures_are_done_for_the_same_command(results):
    """Names of settings may change, the hash of the defaults may not: a new release would detect in every image again."""
    done = DoneRows(results, RowVersion.of(SETTINGS, ("digits", "1")), prefixes=("gs://photos/day/",))
    refs = [ImageRef(uri, generation) for uri, generation in GENERATIONS.items()]
    assert dict(zip(GENERATIONS, done.among(refs), strict=True)) == {A: DETECTED, B: DETECTED, CUT: FAILED, EMPTY: FAILED}
    other = RowVersion.of(load_config([], {"model.path": "digits", "detect.score_threshold": 0.5}).as_dict(), ("digits", "1"))
    assert not done._replace(version=other).among(refs).any()


def test_exports_hold_its_rows(results, tmp_path):
    assert export.main([results, "--format", "csv", "--to", str(tmp_path / "exported")]) == 0
    lines = (tmp_path / "exported" / "detections.csv").read_text(encoding="utf-8").splitlines()
    assert sum(A in line for line in lines) == 5 and sum(B in line for line in lines) == 5


def test_its_failures_are_tried_again(results):
    config = load_config([], {"model.path": "digits", "stream.allow_uri_prefix": ["gs://photos/"]})
    refs = graph.dead_letter_replay(dataclasses.replace(config, output=results, retry_dead=True)).refs_in_results()
    assert sorted(ref.uri for ref in refs) == [CUT, EMPTY]


def test_a_newer_row_wins_and_compaction_merges_both_releases(results):
    of_now = RowVersion.of(SETTINGS, ("digits", "1"))
    write_rows(
        results, [detected(A, GENERATIONS[A], version=of_now), detected(CUT, GENERATIONS[CUT], version=of_now)], version=of_now
    )
    assert compact(results).dropped
    assert len(list_shards(results, (DETECTIONS,))) == 1
    rows = {row["image"]["uri"]: row["detections"] for row in rows_in(results)}
    assert {uri: len(found) for uri, found in rows.items()} == {A: 1, B: 5, CUT: 1}
    assert [row["image"]["uri"] for row in rows_in(results, DEAD_LETTERS)] == [EMPTY]


@pytest.mark.slow
def test_a_job_takes_over_the_folder_with_its_summary(results, tmp_path, capsys):
    """The summary and the report of 0.1.0 are this program's, so a job may replace them."""
    code = run.main(["--input", str(REPO / "models/digits/samples/scene_004.jpg"), "--output", results, "--model", "digits"])
    assert code == 0, capsys.readouterr()
    assert len(rows_in(results)) == 3


HASHES = {  # of the rows and of the dead letters of each shipped config, as release 0.1.0 wrote them
    "": ("df32920b", "a963b380"),
    "backfill_gcs_direct.yaml": ("df32920b", "a963b380"),
    "backfill_local_direct.yaml": ("df32920b", "a963b380"),
    "batch_gcs_dataflow_gpu.yaml": ("df32920b", "a963b380"),
    "batch_gcs_direct.yaml": ("df32920b", "a963b380"),
    "batch_gcs_flink.yaml": ("df32920b", "a963b380"),
    "batch_gcs_spark.yaml": ("df32920b", "a963b380"),
    "batch_local_direct.yaml": ("df32920b", "a963b380"),
    "batch_local_gpus.yaml": ("df32920b", "a963b380"),
    "batch_third_party_model.yaml": ("53ddd836", "8381c155"),
    "streaming_pubsub_dataflow_gpu.yaml": ("df32920b", "241dc0a4"),
    "streaming_pubsub_direct.yaml": ("df32920b", "241dc0a4"),
    "streaming_pubsub_flink.yaml": ("df32920b", "241dc0a4"),
    "streaming_pubsub_prism.yaml": ("df32920b", "241dc0a4"),
}


@pytest.mark.parametrize("engine", [{}, {"detect.engine": "openvino"}, {"detect.precision": "bfloat16"}], ids=str)
@pytest.mark.parametrize("name", HASHES)
def test_no_shipped_config_has_other_hashes_than_before_whatever_engine_runs_it(name, engine):
    """Another hash would detect in every image again. Which engine runs a model decides on no row."""
    assert {path.name for path in (REPO / "configs").glob("*.yaml")} <= {*HASHES}
    config = load_config([str(REPO / "configs" / name)] if name else [], {"model.path": "digits", **engine})
    version = RowVersion.of(config.as_dict())
    assert (version.settings, version.limits) == HASHES[name]
