"""Many small files become few large ones; whenever that is killed, no row is missing, and the next compaction finishes."""

import datetime
import glob
import os
import shutil
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import requests

from models import progress
from pipeline import compact as module
from pipeline.compact import compact, main
from pipeline.errors import BusyError
from pipeline.results.cancellation import confirmed_before_commit
from pipeline.results.claims import EVERYTHING
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS, archive_name, is_result, shard_name
from pipeline.results.lease import leased
from pipeline.results.ledger import list_files_of_rows, read_entries
from pipeline.results.run import Run, fence
from pipeline.results.write_policy import check_write_policy, run_name
from pipeline.storage.files import list_files, write_file
from pipeline.write.write_parquet import write_parquet
from tests.results.test_run import dies_at, visible
from tests.rows_of_files import MAKER, dead, found, lines_in, uris_in, write_rows

STREAM = [f"20261120T{hour:02d}0000Z-0a1b-00000-of-00001" for hour in range(4)]
EXPECTED = sorted([*(found(uri).line for uri in "abcde"), dead("x").line, dead(message="?").line])


def fill(output):
    """A batch job's files, a stream's windows, and files of somebody else."""
    write_rows(output, "00000-of-00001", [found("a"), found("b", boxes=1), dead("x")])
    write_rows(output, STREAM[0], [found("b"), found("c"), dead("d")])
    write_rows(output, STREAM[1], [found("c"), found("d"), dead(message="?")], None)
    write_rows(output, STREAM[2], [found("e")])
    old = datetime.datetime(2026, 11, 19).timestamp()
    for path in glob.glob(f"{output}/*/*-00000-of-00001.jsonl"):
        os.utime(path, (old, old))
    for name in ("detections/mine.jsonl", "notes.txt", "summary.json"):
        write_file(f"{output}/{name}", b"{}")


@pytest.fixture
def output(tmp_path):
    fill(f"{tmp_path}/out")
    return f"{tmp_path}/out"


def rows_in(output):
    return sorted(line for kind in (DETECTIONS, DEAD_LETTERS) for line in lines_in(output, kind) if line != b"{}")


def settings_in(output):
    """What the ledger says of each image."""
    entries = [entry for file in list_files_of_rows(output) for entry in read_entries(file)]
    return {(entry.kind, entry.uri): entry.settings for entry in entries}


def test_many_files_become_one_of_each_kind_and_each_row_stands_once(output):
    assert compact(output) == (7, 2, 7, 3)
    names = [file.path.removeprefix(f"{output}/") for file in list_files_of_rows(output)]
    assert [name.partition("-20261120T020000Z-compact")[0] for name in names] == [
        "detections/detections",
        "dead_letters/dead_letters",
    ]
    assert all(is_result(f"{output}/{name}", output) for name in names)
    assert rows_in(output) == EXPECTED
    assert lines_in(output)[:-1] == sorted(lines_in(output)[:-1])  # the last is somebody else's
    others = {name: content for name, content in visible(output).items() if content == b"{}"}
    assert set(others) == {"detections/mine.jsonl", "notes.txt", "summary.json"}
    assert len(visible(output)) == 3 + 2 + 2
    assert not glob.glob(f"{output}/.staging-*/*.json")


def test_the_ledger_knows_as_much_as_before(output):
    compact(output)
    assert settings_in(output) == {
        **{(DETECTIONS, uri): MAKER.detections for uri in "abce"},
        (DETECTIONS, "d"): "",  # the window that has no index
        (DEAD_LETTERS, "x"): MAKER.dead_letters,
    }


def test_compacting_again_changes_nothing_until_there_is_something_new(output):
    compact(output)
    before = visible(output)
    assert compact(output) == (0, 0, 0, 0)
    assert visible(output) == before
    write_rows(output, STREAM[3], [found("f"), found("a")])
    assert compact(output) == (3, 2, 8, 1)
    assert rows_in(output) == sorted([*EXPECTED, found("f").line])


def test_large_files_are_cut(output):
    assert compact(output, rows_per_file=2).files == 4
    files = [file for file in list_files_of_rows(output) if file.kind == DETECTIONS]
    assert [file.path[-20:] for file in files] == [f"{n:05d}-of-00003.jsonl"[-20:] for n in range(3)]
    assert [[entry.uri for entry in read_entries(file)] for file in files] == [["a", "b"], ["c", "d"], ["e"]]
    assert all(file.index_path for file in files)


def test_only_what_was_written_until_a_day(output):
    write_rows(output, "20261121T000000Z-0a1b-00000-of-00001", [found("f")])
    assert main(["--output", output, "--until", "2026-11-20"]) == 0
    assert f"{output}/detections/detections-20261121T000000Z-0a1b-00000-of-00001.jsonl" in list_files(f"{output}/detections/*")
    assert rows_in(output) == sorted([*EXPECTED, found("f").line])
    assert len(list_files_of_rows(output)) == 3


def test_a_row_of_a_newer_file_wins_also_after_older_ones_were_compacted(output):
    write_rows(output, "20261121T000000Z-0a1b-00000-of-00001", [found("a", boxes=3)])
    main(["--output", output, "--until", "2026-11-20"])
    compact(output)
    assert rows_in(output) == sorted([*EXPECTED[1:], found("a", boxes=3).line] if EXPECTED[0] == found("a").line else [])


DAY = 86_400.0
NOON = datetime.datetime(2026, 11, 20, 12, tzinfo=datetime.timezone.utc).timestamp()
NOON_NAME, EVENING_NAME = "20261120T120000Z-0a1b-00000-of-00001", "20261120T180000Z-0a1b-00000-of-00001"


def copied(output, copy, seconds):
    """As `cp -r` does it: each file is as old as its copy, whenever that was made."""
    shutil.copytree(output, copy)
    for path in Path(copy).rglob("*"):
        os.utime(path, (seconds, seconds))
    return str(copy)


@pytest.mark.parametrize("copied_at", [NOON - DAY, NOON + DAY], ids=["older than any row", "newer than any row"])
@pytest.mark.parametrize(
    ("job_at", "kept"),
    [pytest.param(NOON - 3600, 1, id="job before the window"), pytest.param(NOON + 3600, 2, id="job after the window")],
)
def test_which_row_is_the_newest_does_not_depend_on_when_files_were_copied(tmp_path, job_at, kept, copied_at):
    output = f"{tmp_path}/out"
    write_rows(output, "3f2a9c01-00000-of-00001", [found("a", boxes=2), dead("gone")], made_at=job_at)
    write_rows(output, NOON_NAME, [found("a", boxes=1), found("gone")])
    copy = copied(output, tmp_path / "copy", copied_at)
    letters = [dead("gone").line] if job_at > NOON else []  # one that is older is mended by the row
    for each in (output, copy):
        compact(each)
        assert rows_in(each) == sorted([found("a", boxes=kept).line, found("gone").line, *letters])
    assert [Path(path).name[:28] for path in list_files(f"{output}/detections/*.jsonl")] == [
        Path(path).name[:28] for path in list_files(f"{copy}/detections/*.jsonl")
    ]


@pytest.mark.parametrize("copied_at", [NOON - DAY, NOON + DAY], ids=["older than any row", "newer than any row"])
def test_rows_in_a_merged_file_are_as_old_as_they_were(tmp_path, copied_at):
    """A window that comes later is newer than they are, although a still later one was merged with them."""
    output = f"{tmp_path}/out"
    write_rows(output, STREAM[0], [found("a", boxes=2), dead("gone")])
    write_rows(output, EVENING_NAME, [found("z")])
    compact(output)
    output = copied(output, tmp_path / "copy", copied_at)
    write_rows(output, NOON_NAME, [found("a", boxes=1), found("gone")])
    compact(output)
    assert rows_in(output) == sorted(row.line for row in (found("a", boxes=1), found("gone"), found("z")))


def test_an_index_of_an_earlier_version_says_no_age_and_the_time_of_the_file_counts(tmp_path):
    output = f"{tmp_path}/out"
    write_rows(output, "00000-of-00001", [found("a", boxes=2)])
    index = f"{output}/index/detections-00000-of-00001.parquet"
    table = pq.read_table(index)
    pq.write_table(table.drop_columns(["made_at"]), index)
    write_rows(output, NOON_NAME, [found("a", boxes=1)])
    os.utime(f"{output}/detections/detections-00000-of-00001.jsonl", (NOON + 1, NOON + 1))
    assert settings_in(output) == {(DETECTIONS, "a"): MAKER.detections}
    compact(output)
    assert rows_in(output) == [found("a", boxes=2).line]


@pytest.mark.parametrize("planted", [float("nan"), float("inf"), -1.0, 1e300])
def test_an_age_that_is_none_is_not_known(tmp_path, planted):
    output = f"{tmp_path}/out"
    write_rows(output, NOON_NAME, [found("a", boxes=2)], made_at=planted)
    write_rows(output, EVENING_NAME, [found("a", boxes=1)])
    compact(output)
    assert rows_in(output) == [found("a", boxes=1).line]


def test_where_there_was_parquet_or_tfrecord_there_is(output):
    stem = f"{output}/{shard_name(DETECTIONS, 0, 1)}"
    write_parquet([found("a").line, found("b").line], f"{stem}.parquet")
    compact(output)
    (path,) = list_files(f"{output}/detections/*.parquet")
    assert [row["image"]["uri"] for row in pq.read_table(path).to_pylist()] == list("abcde")
    assert "-compact" in path and is_result(path, output)


@pytest.mark.parametrize(
    ("mode", "run", "window", "left"),
    [
        pytest.param("batch", "0a1b", "20261120T000000Z", True, id="a batch job's"),
        pytest.param("batch", "another", "20261120T000000Z", False, id="not those of others"),
        pytest.param("streaming", "0a1b", "20261120T033000Z", True, id="a stream's last hour"),
        pytest.param("streaming", "0a1b", "20261120T000000Z", False, id="not what it did before"),
    ],
)
def test_files_of_a_job_at_work_stay(output, mode, run, window, left):
    name = archive_name(DETECTIONS, window, "0a1b", 1, 2)
    write_file(f"{output}/{name}", found("z").line)
    four = datetime.datetime(2026, 11, 20, 4, tzinfo=datetime.timezone.utc).timestamp()
    with Run(output, run).held({"settings": {"mode": mode}}):
        compact(output, now=four)
        assert (name in visible(output)) is left
    assert uris_in(output) >= {*"abcdez"}


def test_what_a_batch_job_at_work_has_just_committed_stays(output):
    """Its files carry the name of its command."""
    about = {"settings": {"mode": "batch", "input": ["in/"]}, "started_at": 1795226400.0}
    name = f"{run_name(about['settings'], about['started_at'])}-00000-of-00001"
    write_rows(output, name, [found("z")])
    with Run.new(output).held(about):
        compact(output)
    assert f"detections/detections-{name}.jsonl" in visible(output)
    assert compact(output).before == 3
    assert rows_in(output) == sorted([*EXPECTED, found("z").line])


@pytest.mark.parametrize(
    "settings", [{"mode": "streaming"}, {"mode": "batch", "input": ["in/"]}, {"mode": "batch", "only_new": True}]
)
def test_a_job_may_start_beside_a_compaction(tmp_path, settings):
    with Run.new(str(tmp_path)).held({"settings": {"mode": "compact"}}):
        check_write_policy(str(tmp_path), settings)


def test_a_second_compaction_beside_the_first_is_refused(output):
    before = visible(output)
    with leased(Run.new(output).folder, [EVERYTHING], wait_s=0.0, lost=lambda: None, fence=fence):
        with pytest.raises(BusyError):
            compact(output)
        assert visible(output) == before


@pytest.fixture(params=["local", "storage"])
def place(request, output):
    """A results folder, on a local disk or on Cloud Storage."""
    if request.param == "local":
        return output
    there = f"gs://{request.getfixturevalue('gcs_bucket').name}/out"
    write_rows(there, STREAM[0], [found("b"), found("c")])
    write_rows(there, STREAM[1], [found("c"), found("d")])
    return there


def another_run(output):
    return leased(Run.new(output).folder, ["photos/*"], wait_s=0.0, lost=lambda: None, fence=fence)


def test_while_rows_stand_twice_no_batch_job_looks_there_and_no_other_compaction(place, monkeypatch, capsys):
    """The large files have their names, the small ones have not gone yet."""
    remove, said = module._remove, []

    def looked_at_before(output, sources):
        with pytest.raises(BusyError, match=r"run [0-9a-f]{12} \(.*\) works at \*\* since "), another_run(output):
            pass
        said.append((main(["--output", output, "--busy-wait-s", "0"]), capsys.readouterr().err))
        remove(output, sources)

    monkeypatch.setattr(module, "_remove", looked_at_before)
    assert main(["--output", place]) == 0
    ((code, err),) = said
    assert code == 3 and err.startswith(f"error: output {place}: run ") and err.endswith(" UTC\n") and err.count("\n") == 1
    with another_run(place):
        pass


def test_it_waits_for_a_batch_job_at_work(place, capsys):
    before = [file.path for file in list_files_of_rows(place)]
    with another_run(place):
        assert main(["--output", place, "--busy-wait-s", "0.05"]) == 3
        assert [file.path for file in list_files_of_rows(place)] == before
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"waiting: output {place}: run ")
    assert said[1].startswith(f"error: output {place}: run ") and said[1].endswith(", and this one waited for 0.05 s")
    assert main(["--output", place]) == 0


def test_one_that_was_taken_over_gives_nothing_its_name(gcs_bucket):
    output = f"gs://{gcs_bucket.name}/out"
    write_rows(output, STREAM[0], [found("b"), found("c")])
    write_rows(output, STREAM[1], [found("c"), found("d")])
    before = [file.path for file in list_files_of_rows(output)]
    with confirmed_before_commit(gcs_bucket.blob("out/.lease").delete):
        assert main(["--output", output]) == 3
    assert [file.path for file in list_files_of_rows(output)] == before
    assert [blob.name for blob in gcs_bucket.list_blobs() if "/." in blob.name] == []


def test_a_file_that_is_overwritten_meanwhile_stays(output):
    name = "detections/detections-00000-of-00001.jsonl"
    with confirmed_before_commit(lambda: write_file(f"{output}/{name}", found("new").line)):  # a job writes beside it
        compact(output)
    assert visible(output)[name] == found("new").line
    assert uris_in(output) >= {*"abcde", "new"}


@pytest.mark.slow
def test_killed_at_any_moment_no_row_is_missing_and_the_next_one_finishes(output, tmp_path):
    number, killed = 0, True
    while killed:
        number += 1
        copy = f"{tmp_path}/{number}"
        shutil.copytree(output, copy)
        killed = dies_at(number, lambda copy=copy: compact(copy))
        assert set(rows_in(copy)) >= set(EXPECTED), number
        known = {key for key, settings in settings_in(copy).items() if settings}
        compact(copy)
        assert rows_in(copy) == EXPECTED, number
        assert len(list_files_of_rows(copy)) == 2
        assert {key for key, settings in settings_in(copy).items() if settings} >= known - {
            (DETECTIONS, "d"),
            (DEAD_LETTERS, "d"),
        }
        assert all(file.index_path for file in list_files_of_rows(copy))
        assert len(list_files(f"{copy}/index/*")) == 2
        shutil.rmtree(copy)
    assert number > 20


def dies_at_request(number, do):
    """Does something in a process of its own that is killed before its `number`-th copy or deletion of an object: whether so."""
    child = os.fork()
    if child == 0:
        left, send = [number], requests.Session.request

        def request(self, method, url, *args, **kwargs):
            left[0] -= "/copyTo/" in url or method == "DELETE"
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return send(self, method, url, *args, **kwargs)

        requests.Session.request = request
        try:
            do()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("number", [3, 5, 7, 8, 11, 13])  # in the middle of names, of what is made of rows, of what goes
def test_killed_while_cloud_storage_changes_no_row_is_missing(gcs_bucket, number):
    everything = sorted([*(found(uri).line for uri in "bcd"), dead(message="?").line])
    output = f"gs://{gcs_bucket.name}/out"
    write_rows(output, STREAM[0], [found("b"), found("c"), dead("d")], None)
    write_rows(output, STREAM[1], [found("c"), found("d"), dead(message="?")], None)
    assert dies_at_request(number, lambda: compact(output))
    assert set(rows_in(output)) >= set(everything)
    for path in list_files(f"{output}/.staging-**"):  # a quarter of an hour later it counts as dead
        gcs_bucket.blob(path.removeprefix(f"gs://{gcs_bucket.name}/")).delete()
    compact(output)
    assert rows_in(output) == everything
    assert len(list_files_of_rows(output)) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--output", "nosuchscheme://x"], "error: output nosuchscheme://x: expected a folder"),
        (["--output", "OUT", "--until", "soon"], "error: --until: expected days such as 2026-11-20"),
    ],
)
def test_a_wrong_command_is_one_line(tmp_path, capsys, arguments, said):
    code = main([str(tmp_path) if argument == "OUT" else argument for argument in arguments])
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert captured.err.startswith(said)


def test_an_empty_folder_has_nothing_to_compact(tmp_path, capsys):
    assert main(["--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"nothing to compact in {tmp_path}\n"
    assert list(Path(tmp_path).iterdir()) == []


def test_the_command_says_what_it_did(output, capsys):
    assert main(["--output", f"{output}/"]) == 0
    assert capsys.readouterr().out == "7 files of rows became 2: 7 rows; 3 dropped, doubled or mended by others\n"


def test_a_compaction_that_takes_long_shows_how_far_it_is(output, capsys, monkeypatch):
    """By the bytes that it has read and written."""
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0)
    assert main(["--output", output]) == 0
    lines = capsys.readouterr().err.splitlines()
    shares = [int(line.partition("%")[0].removeprefix("merging:")) for line in lines if line.startswith("merging:")]
    assert shares == sorted(shares) and shares[0] < 30 and 70 < shares[-1] <= 100
    assert any(line.startswith("finishing detections: 100% 1/1 ") for line in lines)
