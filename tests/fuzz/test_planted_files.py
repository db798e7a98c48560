"""Whatever lies in a results folder: a job and a compaction end well or in one line, touch nothing outside, and lose no row."""

import json
import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.commands import reconcile
from pipeline.config import Config
from pipeline.errors import UserError
from pipeline.listing.dead_letter_replay import DeadLetterReplay
from pipeline.outcome.conclude import Conclusion
from pipeline.results.compact import COMPACTED, compact
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, check_output, check_reports
from pipeline.results.lock import locked
from pipeline.results.reader import done_keys
from pipeline.results.run_folder import Run, remove_abandoned
from pipeline.results.shards import parquet_bytes
from pipeline.stats.job_stats import JobStats
from pipeline.stats.summary import RunFacts
from pipeline.stats.worker_reports import WorkerReports
from pipeline.storage.files import write_file
from pipeline.stream.messages import replay_message
from tests.shard_rows import VERSION, detected, rows_in, write_rows

TIME, UUID = "20261121T020000Z", "0123456789abcdef" * 2
RUN = "0123456789ab"
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "2000")) // 4 if os.environ.get("FUZZ") == "1" else 40

names = st.sampled_from(
    [
        *("../outside/secret", "/etc/passwd", "..", ".", "", "a\0b", "photo.jpg", "\udc80", "summary.json"),
        *("exports/../../outside/secret", "samples/.staging-a/../../../outside/secret", "samples/001-a.jpg"),
        *(f".staging-{RUN}/{name}" for name in ("submitted", "../../outside/secret", "link/secret")),
        "runs/../../outside/x",
    ]
)
values = st.recursive(
    names | st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400) | st.just("batch"),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(names, part, max_size=3),
)
holders = st.fixed_dictionaries({"what": names, "host": values, "pid": values, "since": values})
summaries = st.fixed_dictionaries(
    {"images": values, "config": st.dictionaries(names, values, max_size=2), "mode": values | st.just("batch")},
    optional={"run": names, "samples": st.lists(names, max_size=3) | values},
)
texts = names.map(lambda name: name.encode("utf-8", "replace").decode())
columns = {
    "key": st.integers(0, 2**63 - 1) | texts,
    "uri": texts,
    "uri_bytes": st.none() | st.binary(max_size=4),
    "generation": texts,
    **dict.fromkeys(("model", "version", "settings"), st.sampled_from(VERSION) | texts),
    "stage": texts | st.sampled_from(["read", "decode", "message"]),
    "reason": texts | st.sampled_from(["not_found", "corrupt"]),
    "record": texts,
    "payload": st.none() | st.binary(max_size=9),
}


@st.composite
def shards(draw):
    """A Parquet file that has some columns of a shard, and may say that it holds others."""
    chosen = draw(st.sets(st.sampled_from([*columns]))) | draw(st.sampled_from([set(), {*columns}]))
    table = pa.table({name: [draw(columns[name])] for name in columns if name in chosen} or {"a": [1]})
    said = json.dumps(draw(values | st.lists(names, max_size=2))).encode()
    return parquet_bytes(table.replace_schema_metadata({b"sources": said, b"level": said}) if draw(st.booleans()) else table)


contents = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"", b"[" * 9000, b"\0" * 30, b"{", b"PAR1" + b"\0" * 20 + b"PAR1"]),
    (holders | summaries | values).map(lambda value: json.dumps(value).encode()),
    shards(),
)
places = st.one_of(
    st.builds(
        "{}/{}".format,
        st.sampled_from([f".staging-{RUN}", ".staging-photos", ".staging-", "OWN"]),
        st.sampled_from(["submitted", "open", "figures/0a", f"{TIME}-{RUN}-{UUID}.parquet", "a.jpg"]),
    ),
    st.sampled_from(["summary.json", "report.html", ".lock-0a", ".lock-compact", "samples/001-a.jpg", "index/a.parquet"]),
    st.builds(
        "{}/{}-{}-{}.{}".format,
        st.sampled_from(["detections", "dead_letters", "exports"]),
        st.sampled_from([TIME, "99999999T999999Z"]),
        st.sampled_from([RUN, COMPACTED]),
        st.sampled_from([UUID, "x"]),
        st.sampled_from(["parquet", "jsonl"]),
    ),
    st.sampled_from([f"detections/.staging-{RUN}", f"dead_letters/.staging-{UUID}"]),
)
planted = st.dictionaries(places, contents, min_size=1, max_size=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("planted")


def laid(folder, files, link):
    """A results folder with rows, an image, and planted files; beside it what nobody may touch."""
    top = Path(tempfile.mkdtemp(dir=folder))
    output = f"{top}/out"
    write_file(f"{top}/outside/secret", b"secret")
    write_file(f"{output}/photo.jpg", b"photo")
    for number in range(2):
        write_rows(output, [detected(f"{number}.jpg")], run=f"{number}")
    for name, content in files.items():
        if not name.startswith("OWN/"):
            write_file(f"{output}/{name}", content)
    if link:
        os.makedirs(f"{output}/.staging-{RUN}", exist_ok=True)
        os.symlink(f"{top}/outside", f"{output}/.staging-{RUN}/link")
    for path in Path(output).glob(".staging-*/**/*"):
        os.utime(path, (0, 0))
    return output


def a_job(output, own):
    """What a job does beside its images; `own` is planted in its own folder while it works."""
    check_output(output)
    run = Run.new(output)
    with locked(output, "0a"), run.opened():
        for name, content in own.items():
            write_file(f"{run.folder}/{name}", content)
        for kind in (DETECTIONS, DEAD_LETTERS):
            done_keys(output, VERSION, kind)
        list(DeadLetterReplay(output, (output,), replay_message).refs_in_results())
        WorkerReports(run).now()
        write_rows(output, [detected("2.jpg")], run=run.name)
        check_reports(output)
        facts = RunFacts(0.0, 1.0, 2.0, "command", Config().as_dict())
        Conclusion(run, facts).reported(JobStats(read=1, skipped=1)).keep(run)
    remove_abandoned(output)


@settings(max_examples=EXAMPLES)
@given(planted, st.booleans())
def test_whatever_is_planted_runs_nothing_and_touches_nothing_outside_and_no_row_is_lost(folder, files, link):
    """Somebody who may write to the results folder can harm these results, and nothing else."""
    output = laid(folder, files, link)
    own = {name.removeprefix("OWN/"): content for name, content in files.items() if name.startswith("OWN/")}
    listed = ["--input", f"{output}/*.jpg", "--output", output, "--model", "digits"]
    for work, arguments in ((a_job, (output, own)), (compact, (output,)), (reconcile.main, (listed,))):
        try:
            work(*arguments)
        except UserError as err:
            assert len(str(err).splitlines()) == 1
    assert (Path(output).parent / "outside" / "secret").read_bytes() == b"secret"
    assert sorted(os.listdir(Path(output).parent)) == ["out", "outside"]
    assert os.listdir(Path(output).parent / "outside") == ["secret"]
    assert Path(f"{output}/photo.jpg").read_bytes() == b"photo"
    assert {"0.jpg", "1.jpg"} <= {row["image"]["uri"] for row in rows_in(output)}
