"""A stream's archive: rows of a window in memory, one shard of each kind, then the acknowledgement of their messages."""

import errno
import os
import threading
import uuid
from collections import Counter
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pipeline.process import PROCESS
from pipeline.results.layout import DEAD_LETTERS
from pipeline.results.lock import locked
from pipeline.results.reader import list_shards
from pipeline.results.run_folder import Run
from pipeline.results.shards import COMPACTED
from pipeline.stream import archive as module
from pipeline.stream.archive import ArchiveRows, RowWriter
from tests.archived_stream import BUNDLES, ArchivedStream, archived
from tests.forked_jobs import KILLED, Moment, run_forked
from tests.processes import wait_until
from tests.recorded_disk import laid_out, recorded
from tests.shard_rows import VERSION, detected, rows_in, write_rows


class Stream(ArchivedStream):
    """One that may die."""

    def __init__(self, folder):
        super().__init__(str(folder), self._acknowledge, uuid.uuid4().hex[:12])
        self.is_dead = False

    def _acknowledge(self, messages):
        if not self.is_dead:
            self.held.subtract(messages)

    def waiting(self):
        """The messages that are not acknowledged."""
        return sorted((+self.held).elements())

    def rows(self):
        return Counter(uris_in(self.folder))


def uris_in(folder, kinds=("detections", DEAD_LETTERS)):
    return [row["image"]["uri"] for kind in kinds for row in rows_in(str(folder), kind)]


@pytest.fixture
def stream(tmp_path):
    stream = Stream(tmp_path)
    yield stream
    stream.threads.close()


@pytest.fixture
def disk(monkeypatch):
    """A disk whose server is away, or back."""
    fsync, away = os.fsync, threading.Event()

    def fails(fd):
        if away.is_set():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fails)
    return away


def test_a_message_is_held_until_all_of_its_rows_are_in_shards_of_their_window(stream):
    stream.add("b", "a", message="both")
    stream.add("x1")
    stream.clock.now += 9.9
    stream.archive.write_if_over()
    assert (stream.waiting(), stream.rows()) == (["both", "both", "x1"], {})
    stream.clock.now += 0.2
    stream.add("c", message="both")
    stream.archive.write_if_over()
    assert (stream.waiting(), stream.rows()) == ([], Counter(["a", "b", "c", "x1"]))
    assert [shard.kind for shard in list_shards(stream.folder)] == ["dead_letters", "detections"]
    stream.add("d")
    assert stream.waiting() == ["d"], "of the next window"


def test_names_that_are_no_unicode_end_no_stream(stream):
    """Their messages would come again, and end the next stream as well."""
    stream.add("\udc80.jpg", "x\ud800", "\0")
    stream.archive.finish()
    assert sum(stream.rows().values()) == 3


def test_a_stream_merges_its_own_shards_as_it_runs(stream, monkeypatch):
    """Those of other runs, and what is merged, it does not even read."""
    monkeypatch.setattr(module, "COMPACTED_SHARDS", 3)
    (other,) = write_rows(stream.folder, [detected("other")], run="other")
    Path(other).write_bytes(b"PAR1")
    stream.threads.start("compacting", stream.archive.keep_compacting)
    for number in range(2):
        for name in "abc":
            stream.add(f"{name}{number}")
            stream.archive.finish()
        wait_until(
            lambda number=number: (
                sorted(shard.run for shard in list_shards(stream.folder)) == ["compact"] * (number + 1) + ["other"]
            )
        )
    os.remove(other)
    assert stream.rows() == Counter(f"{name}{number}" for name in "abc" for number in range(2))
    stream.threads.raise_failure()


def test_on_object_storage_shards_are_written_and_merged_as_the_stream_runs(bucket, monkeypatch):
    monkeypatch.setattr(module, "COMPACTED_SHARDS", 3)
    stream = Stream(f"{bucket}/out")
    try:
        stream.threads.start("compacting", stream.archive.keep_compacting)
        for name in "abc":
            stream.add(name, f"x{name}")
            stream.archive.finish()
        wait_until(lambda: {shard.run for shard in list_shards(stream.folder)} == {COMPACTED})
        assert (stream.waiting(), stream.rows()) == ([], Counter(["a", "b", "c", "xa", "xb", "xc"]))
        stream.threads.raise_failure()
    finally:
        stream.threads.close()


def test_killed_while_it_writes_to_object_storage_it_has_acknowledged_no_row_that_is_not_there(bucket, tmp_path):
    """Before and after each request that changes something."""
    number, code = 0, KILLED
    while code == KILLED:
        number += 1
        output, acknowledged = f"{bucket}/{number}", tmp_path / str(number)
        acknowledged.mkdir()
        request = "urllib3.connectionpool:HTTPConnectionPool.urlopen"
        at = Moment(request, number // 2 + 1, ("before", "after")[number % 2], "'(POST|PUT|PATCH|DELETE)'")
        code = run_forked([output, acknowledged], tmp_path / "log", at, "tests.archived_stream")
        assert {*os.listdir(acknowledged)} <= {*uris_in(output)}, number
    assert code == 0 and number > 4 and sorted(uris_in(output)) == sorted("".join(BUNDLES))


def test_a_compaction_that_fails_ends_no_stream(stream, monkeypatch, caplog):
    monkeypatch.setattr(module, "COMPACTED_SHARDS", 1)
    caplog.set_level("WARNING", "pipeline")
    with locked(stream.folder, COMPACTED):
        stream.threads.start("compacting", stream.archive.keep_compacting)
        stream.add("a")
        stream.archive.finish()
        wait_until(lambda: "the archive is not compacted" in caplog.text)
    stream.add("b")
    stream.archive.finish()
    wait_until(lambda: [shard.run for shard in list_shards(stream.folder)] == [COMPACTED])
    assert stream.rows() == Counter("ab")


@pytest.fixture
def writer(stream, disk, monkeypatch, caplog):
    """The thread that writes windows of three rows, while storage is away: one is being written, the next is full."""
    caplog.set_level("WARNING", "pipeline")
    monkeypatch.setattr(module, "WINDOW_ROWS", 3)
    disk.set()
    thread = stream.threads.start("archiving", stream.archive.keep_writing)
    stream.add("a", "b", "c")
    wait_until(lambda: "archive" in PROCESS.failing)
    stream.add("d", "e", "f")
    return thread


@pytest.mark.slow
def test_while_storage_is_away_messages_wait_and_memory_is_bounded(stream, disk, writer, caplog):
    """A third bundle waits, and nothing is acknowledged."""
    third = stream.threads.start("a bundle", lambda: stream.add("g"))
    wait_until(lambda: stream.waiting() == [*"abcdefg"])
    third.join(0.5)
    assert third.is_alive() and stream.rows() == {}
    assert any("the archive cannot be written ([Errno 116]" in record.message for record in caplog.get_records("setup"))
    disk.clear()
    third.join()
    wait_until(lambda: stream.waiting() == ["g"])
    assert "archive" not in PROCESS.failing
    stream.threads.stop.set()
    writer.join()
    stream.archive.finish()
    assert (stream.waiting(), stream.rows()) == ([], Counter("abcdefg"))


def test_a_stream_that_stops_while_storage_is_away_acknowledges_nothing_and_ends(stream, disk, writer):
    stream.threads.stop.set()
    writer.join()
    stream.add("g")
    with pytest.raises(OSError, match="Stale"):
        stream.archive.finish()
    stream.threads.raise_failure()
    assert (stream.waiting(), stream.rows()) == ([*"abcdefg"], {})
    disk.clear()
    stream.archive.finish()
    assert (stream.waiting(), stream.rows()) == ([], Counter("abcdefg"))


def test_a_permanent_failure_of_storage_ends_the_stream(stream, monkeypatch):
    """Also the bundles that wait for room."""
    monkeypatch.setattr(module, "WINDOW_ROWS", 1)
    (Path(stream.folder) / "detections").touch()
    stream.threads.start("archiving", stream.archive.keep_writing)
    stream.add("a")
    with pytest.raises(OSError):
        for name in "bc":
            stream.add(name)
    assert "a" in stream.waiting()


@pytest.mark.slow
def test_what_a_stream_has_acknowledged_is_in_its_archive_after_a_power_cut(tmp_path):
    (tmp_path / "disk" / "acknowledged").mkdir(parents=True)
    code, cuts = recorded(tmp_path / "disk", "tests.archived_stream", f"{tmp_path}/disk/out", f"{tmp_path}/disk/acknowledged")
    assert code == 0
    seen = []
    for number, cut in enumerate(cuts):
        acknowledged = {path.rsplit("/")[-1] for path in cut.live if path.startswith("acknowledged/")}
        for place, tree in enumerate(cut.left):
            if (tree, acknowledged) not in seen:
                seen.append((tree, acknowledged))
                folder = laid_out(tree, tmp_path / f"{number}-{place}")
                assert {*uris_in(f"{folder}/out")} >= acknowledged, f"before {cut.before}: {sorted(tree)}"
    assert acknowledged == {*"".join(BUNDLES)}


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["bundle", "wait", "write", "killed", "killed before it acknowledges", "stopped"]), max_size=25))
def test_each_message_gets_a_row_whatever_happens(tmp_path_factory, steps):
    """What a killed stream held comes again; rows come twice only where it died between shard and acknowledgement."""
    folder, asked, twice = tmp_path_factory.mktemp("archive"), [], Counter()
    stream = Stream(folder)
    for step in steps:
        if step == "bundle":
            asked.append(str(len(asked)))
            stream.add(asked[-1], f"x{asked[-1]}", message=asked[-1])
        elif step == "wait":
            stream.clock.now += 6.0
        elif step == "write":
            stream.archive.write_if_over()
        else:
            stream.is_dead = step != "stopped"
            if step != "killed":
                stream.archive.finish()
            again = {*stream.waiting()}
            assert {*asked} - again <= {*stream.rows()}
            twice.update(again if step == "killed before it acknowledges" else ())
            stream = Stream(folder)
            for message in sorted(again):
                stream.add(message, f"x{message}", message=message)
    stream.archive.finish()
    assert stream.waiting() == []
    assert stream.rows() == Counter({name: 1 + twice[each] for each in asked for name in (each, f"x{each}")})


@pytest.mark.parametrize(
    ("limit", "most", "shards"), [("WINDOW_ROWS", 20_000, 2), ("WINDOW_ROWS", 1, 4), ("_WINDOW_BYTES", 1, 4)]
)
def test_on_workers_the_rows_of_a_kind_become_shards_of_bounded_size(tmp_path, monkeypatch, limit, most, shards):
    """Those of two detections and two dead letters that come in two collections; dead letters may have 10 MB each."""
    monkeypatch.setattr(module, limit, most)
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        parts = tuple(pipeline | f"Create {names}" >> beam.Create(map(archived, names)) for names in (("b", "a"), ("x1", "x2")))
        _ = parts | "Archive" >> ArchiveRows(RowWriter(Run(str(tmp_path), "0a1b"), VERSION), window_s=10.0)
    assert len(list_shards(str(tmp_path))) == shards
    assert (uris_in(tmp_path), uris_in(tmp_path, [DEAD_LETTERS])) == (["a", "b", "x1", "x2"], ["x1", "x2"])


def test_remote_workers_merge_the_shards_of_their_run_as_it_runs(tmp_path, monkeypatch):
    for name, value in {"WINDOW_ROWS": 1, "COMPACTED_SHARDS": 6}.items():
        monkeypatch.setattr(module, name, value)
    (other,) = write_rows(str(tmp_path), [detected("other")], run="other")
    Path(other).write_bytes(b"PAR1")
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        parts = tuple(pipeline | f"Create {names}" >> beam.Create(map(archived, names)) for names in ("abc", ("x1", "x2", "x3")))
        _ = parts | "Archive" >> ArchiveRows(RowWriter(Run(str(tmp_path), uuid.uuid4().hex[:12]), VERSION), window_s=10.0)
    wait_until(lambda: sorted(shard.run for shard in list_shards(str(tmp_path))) == ["compact", "compact", "other"])
    os.remove(other)
    assert uris_in(tmp_path) == ["a", "b", "c", "x1", "x2", "x3"]
