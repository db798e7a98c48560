"""Many small shards become few large ones; whenever that is killed, paused or cut off from power, no reader loses a row."""

import os
import shutil
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from models.base import progress
from pipeline.commands.compact import main
from pipeline.log_lines import log_lines
from pipeline.records import row_bytes
from pipeline.results.compact import Compacted, compact
from pipeline.results.layout import DEAD_LETTERS, DETECTIONS
from pipeline.results.lock import LOCK, locked
from pipeline.results.reader import ResultsFolder, list_shards
from pipeline.results.rows import detections_table, json_rows
from pipeline.results.shards import COMPACTED, parquet_bytes, write_shard
from pipeline.storage.cloud import blob_of
from pipeline.storage.files import delete_files, read_file, write_file
from pipeline.storage.listing import files_of
from tests.fixtures import RELEASE
from tests.forked_jobs import KILLED, Moment, run_forked
from tests.recorded_disk import folders_left, recorded
from tests.shard_rows import OTHER, VERSION, detected, failed, rows_in, write_rows

OTHERS = ("detections/mine.jsonl", "detections/mine.parquet", "notes.txt")
MESSAGE = failed("", "", stage="message", reason="bad_json")


def fill(output):
    """Shards of a job, of a stream, of one without views, and files of somebody else."""
    write_rows(output, [detected("a"), detected("b")], [failed("x"), failed("d"), failed("e", ""), failed("a")], made_at=1.0)
    write_rows(output, [detected("b", confidence=0.75), detected("c")], [MESSAGE, failed("z", "")], made_at=2.0)
    write_rows(output, [], [MESSAGE], made_at=3.0)
    write_shard(output, DETECTIONS, detections_table([detected("d"), detected("e", "2")], VERSION, "0a1b", 4.0), "0a1b")
    for name in OTHERS:
        write_file(f"{output}/{name}", b"{}")


@pytest.fixture
def output(tmp_path):
    fill(f"{tmp_path}/out")
    return f"{tmp_path}/out"


def counted(output):
    """Key -> the row that counts, for every reader of the folder."""
    best = {}
    for kind in (DEAD_LETTERS, DETECTIONS):
        for _, batch in ResultsFolder(output, (kind,)).batches():
            for row, shown in zip(batch.to_pylist(), json_rows(batch, kind), strict=True):
                found = (kind == DETECTIONS, row["made_at"], row_bytes(shown))
                best[row["key"]] = max(best.get(row["key"], (False,)), found)
    return {key: row[-1] for key, row in best.items()}


def count_rows(output):
    return len(rows_in(output)) + len(rows_in(output, DEAD_LETTERS))


def names_in(output, kind=DETECTIONS):
    return sorted(os.listdir(f"{output}/{kind}"))


def uris(rows):
    return [row["image"].get("uri", "") for row in rows]


def test_many_files_become_one_of_each_kind_and_each_key_has_one_row(output, capsys, monkeypatch):
    """Again, it changes nothing until there is something new."""
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0)
    before = counted(output)
    assert main([f"{output}/"]) == 0
    captured = capsys.readouterr()
    dropped = "6 files of rows became 2: 5 rows dropped as duplicate or superseded"
    assert captured.out == f"{dropped}; left in {output}: 5 rows of detections and 3 dead letters\n"
    assert "reading keys:  " in captured.err and "merging:  50% 1/2 " in captured.err
    assert [row["detections"][0]["confidence"] for row in rows_in(output)] == [0.5, 0.75, 0.5, 0.5, 0.5]
    assert uris(rows_in(output)) == ["a", "b", "c", "d", "e"]
    assert sorted(uris(rows_in(output, DEAD_LETTERS))) == ["", "x", "z"]
    assert counted(output).items() <= before.items() and count_rows(output) == len(counted(output))
    for kind in (DETECTIONS, DEAD_LETTERS):
        (shard,) = list_shards(output, (kind,))
        assert shard.run == COMPACTED
    assert names_in(output)[-2:] == ["mine.jsonl", "mine.parquet"] and len(names_in(output)) == 3
    assert all(Path(output, name).read_bytes() == b"{}" for name in OTHERS)
    names = sorted(Path(output).rglob("*"))
    assert main([output]) == 0
    assert capsys.readouterr().out == f"nothing to compact in {output}\n" and sorted(Path(output).rglob("*")) == names
    write_rows(output, [detected("f"), detected("a")])
    assert compact(output) == Compacted(before=2, files=1, rows=6, dropped=1)


def test_the_views_of_0_1_0_go_also_where_nothing_is_merged(tmp_path):
    """They were JSON Lines beside each shard, for people; what others have written stays."""
    output = str(shutil.copytree(RELEASE, tmp_path / "out"))
    Path(output, "detections", "mine.jsonl").write_text("{}")
    rows, views = counted(output), [path for path in Path(output).rglob("*.jsonl") if path.name != "mine.jsonl"]
    assert views and compact(output) == Compacted() and not any(path.exists() for path in views)
    assert counted(output) == rows and names_in(output)[-1] == "mine.jsonl"


@pytest.mark.parametrize(
    ("earlier", "later", "kept"),
    [
        pytest.param(([detected("a")], []), ([detected("a", confidence=0.75)], []), [0.75], id="the newest row"),
        pytest.param(
            ([detected("a")], []), ([], [failed("a")]), [0.5, "not_an_image"], id="a newer dead letter, which may choose"
        ),
        pytest.param(([], [failed("a")]), ([detected("a")], []), [0.5], id="a detection before an older dead letter"),
        pytest.param(([], [failed("a")]), ([], [failed("a", reason="corrupt")]), ["corrupt"], id="the newest dead letter"),
        pytest.param(([], [failed("a", "")]), ([detected("a", "7")], []), [0.5], id="one without a generation is answered"),
        pytest.param(([detected("a", "7")], []), ([], [failed("a", "")]), [0.5, "not_an_image"], id="not by an older row"),
        pytest.param(
            ([], [failed("a", "")]), ([detected("a", version=OTHER)], []), [0.5, "not_an_image"], id="nor by another version"
        ),
        pytest.param(([detected("a")], []), ([detected("a", "2")], []), [0.5, 0.5], id="each generation has its row"),
        pytest.param(([], [failed("a")]), ([detected("a", "2")], []), [0.5, "not_an_image"], id="a dead letter its generation's"),
    ],
)
@pytest.mark.parametrize("is_later_first", [False, True])
def test_which_row_stays(tmp_path, earlier, later, kept, is_later_first):
    """It depends on when rows were made, not on the names of their files."""
    for made_at, rows in sorted([(1.0, earlier), (2.0, later)], reverse=is_later_first):
        write_rows(str(tmp_path), *rows, made_at=made_at)
    compact(str(tmp_path))
    detections = [row["detections"][0]["confidence"] for row in rows_in(str(tmp_path))]
    assert detections + [row["reason"] for row in rows_in(str(tmp_path), DEAD_LETTERS)] == kept


ROW = st.tuples(st.sampled_from("abc"), st.sampled_from("12"), st.booleans(), st.integers(1, 3))


@pytest.mark.slow
@given(st.lists(st.lists(ROW, min_size=1, max_size=4), max_size=6), st.data())
@settings(max_examples=30)
def test_however_rows_are_spread_over_files_the_same_ones_stay(tmp_path_factory, shards, data):
    """Also if some were merged before the others came."""
    output = str(tmp_path_factory.mktemp("out"))
    for number, rows in enumerate(shards):
        for uri, generation, is_detection, made_at in rows:
            images, letters = ([detected(uri, generation)], []) if is_detection else ([], [failed(uri, generation)])
            write_rows(output, images, letters, made_at=float(made_at))
        expected = counted(output)
        if data.draw(st.booleans()) or number == len(shards) - 1:
            compact(output)
        assert counted(output) == expected
    newest = dict(
        sorted(((uri, generation), (made_at, is_detection)) for rows in shards for uri, generation, is_detection, made_at in rows)
    )
    detected_once = {(uri, generation) for rows in shards for uri, generation, is_detection, _ in rows if is_detection}
    newer_letters = [key for key, (_, is_detection) in newest.items() if key in detected_once and not is_detection]
    assert count_rows(output) == len(counted(output)) + len(newer_letters)


def test_keep_latest_leaves_one_detection_of_each_image_and_model(tmp_path, capsys):
    output = str(tmp_path)
    again = VERSION._replace(settings="00000000")
    write_rows(output, [detected("a"), detected("b"), detected("\udcff")], [failed("a", "0")], made_at=1.0)
    write_rows(output, [detected("a", "2"), detected("\udcff", "2")], made_at=2.0)
    write_rows(output, [detected("a", "2", 0.75)], version=again, made_at=3.0)
    write_rows(output, [detected("a", version=VERSION._replace(model="other"))], made_at=1.0)
    compact(output)
    assert len(rows_in(output)) == 7
    assert main([output, "--keep", "latest"]) == 0
    found = [(row["image"]["uri"], row["image"]["generation"], row["model"]["name"]) for row in rows_in(output)]
    assert sorted(found) == [("a", "1", "other"), ("a", "2", "yolo"), ("b", "1", "yolo"), ("\udcff", "2", "yolo")]
    assert uris(rows_in(output, DEAD_LETTERS)) == ["a"]
    dropped = "1 file of rows became 1: 3 rows dropped as duplicate or superseded"
    assert capsys.readouterr().out == f"{dropped}; left in {output}: 4 rows of detections and 1 dead letter\n"


@pytest.mark.slow
def test_one_new_row_costs_one_small_file_and_not_everything(tmp_path):
    output = str(tmp_path)
    images = [detected(f"gs://bucket/{n * 2654435761 % 2**32}.jpg") for n in range(20_000)]
    (large,) = write_rows(output, images)
    write_rows(output, [detected("a")])
    assert compact(output) == Compacted()
    write_rows(output, [detected("b")])
    assert compact(output) == Compacted(2, 1, 2, 0)
    assert os.path.exists(large)
    write_rows(output, images[:3000], made_at=4e9)
    assert compact(output).dropped == 0  # less than a fifth of the large file: readers apply the rule
    write_rows(output, images[3000:5000], made_at=4e9)
    assert compact(output).dropped == 5000
    assert not os.path.exists(large) and count_rows(output) == len(counted(output)) == 20_002


def test_only_what_was_made_until_a_day(output):
    """By the times of rows: a name tells when its run began."""
    (path,) = write_rows(output, [detected("f")], made_at=1795219200.0)  # 2026-11-21
    os.rename(path, new := f"{output}/detections/20261120T000000Z-0a1b-{0:032x}.parquet")
    assert main(["--output", output, "--until", "2026-11-20"]) == 0
    assert sorted(shard.run for shard in list_shards(output)) == ["0a1b", COMPACTED, COMPACTED]
    assert os.path.exists(new) and uris(rows_in(output)) == list("abcdef")


@pytest.mark.slow
def test_killed_or_cut_off_from_power_at_any_moment_no_reader_loses_a_row_and_the_next_one_finishes(tmp_path):
    """Between any two changes of the disk, with what a power cut then leaves."""
    disk = tmp_path / "disk"
    disk.mkdir()
    fill(f"{disk}/out")
    before = counted(f"{disk}/out")
    compact(str(shutil.copytree(disk / "out", tmp_path / "undisturbed")))
    after = counted(f"{tmp_path}/undisturbed")
    code, cuts = recorded(disk, "pipeline.commands.compact", f"{disk}/out")
    assert code == 0 and len(cuts) > 20
    half_deleted = 0
    for _, folder, what in folders_left(cuts, tmp_path, live=True):
        out = f"{folder}/out"
        assert after.items() <= counted(out).items() <= before.items(), what
        half_deleted += {COMPACTED} < {shard.run for shard in list_shards(out, (DETECTIONS,))}
        compact(out)
        assert counted(out) == after and count_rows(out) == len(after), what
        names = [
            name for kind in (DETECTIONS, DEAD_LETTERS) for name in names_in(out, kind) if not name.startswith(("mine", "."))
        ]
        assert len(names) == 2 and all(f"-{COMPACTED}-" in name for name in names), what
    assert half_deleted


@pytest.mark.slow
def test_one_that_was_paused_for_a_day_loses_and_hides_nothing(output, tmp_path, monkeypatch):
    """Before any change of the disk: its lock expires, another one merges and deletes everything, and new rows come."""
    left, expected = 0, {}

    def meanwhile():
        for path in Path(copy).glob(f"{LOCK}*"):
            path.unlink()
        write_rows(copy, [detected("a", confidence=0.25), detected("new")], [failed("new")], made_at=9.0)
        compact(copy)
        expected.update(counted(copy))

    def pausing(change):
        def changed(*args, **how):
            nonlocal left
            left -= 1
            if left == 0:
                meanwhile()
            return change(*args, **how)

        return changed

    for name in ("replace", "remove", "mkdir"):
        monkeypatch.setattr(os, name, pausing(getattr(os, name)))
    for number in range(1, 100):
        copy, expected = f"{tmp_path}/{number}", {}
        shutil.copytree(output, copy)
        left = number
        compact(copy)
        if left > 0:
            break
        assert counted(copy).items() >= expected.items(), number
        compact(copy)
        assert counted(copy) == expected and count_rows(copy) == len(expected), number
    assert number > 8


def test_of_equal_rows_that_in_the_merged_file_stays_whatever_the_clock_was(tmp_path):
    """So a copy that another compaction relies on never loses to an older one."""
    output = str(tmp_path)
    for uri in "ab":
        write_rows(output, [detected(uri)], made_at=1.0)
    compact(output)
    (merged,) = list_shards(output)
    os.rename(merged.path, f"{output}/detections/20200101T000000Z-{COMPACTED}-{0:032x}.parquet")
    write_rows(output, [detected("a", confidence=0.25)], made_at=1.0)
    assert compact(output).dropped == 1
    assert [row["detections"][0]["confidence"] for row in rows_in(output)] == [0.5, 0.5]


@pytest.mark.parametrize("damage", ["cut off", "no time", "a folder", "a link"])
@log_lines()
def test_what_is_no_whole_shard_is_left_alone(output, damage, tmp_path, capsys):
    (path,) = write_rows(output, [detected("f")])
    whole = Path(path).rename(tmp_path / "f")
    if damage == "a folder":
        os.mkdir(path)
    elif damage == "a link":
        os.symlink(whole, path)
    elif damage == "cut off":
        write_file(path, whole.read_bytes()[:2000])
    else:
        table = detections_table([detected("f")], VERSION, "0a1b", 1.0).drop_columns(["made_at"])
        write_file(path, parquet_bytes(table))
    assert compact(output).before == 6
    assert os.path.lexists(path)
    assert (f"warning: {path} cannot be read" in capsys.readouterr().err) is (damage not in ("a folder", "a link"))


def test_a_second_compaction_beside_the_first_is_refused(output, capsys):
    before = names_in(output)
    with locked(output, COMPACTED):
        assert main([output, "--busy-wait-s", "0"]) == 3
        assert names_in(output) == before
    assert capsys.readouterr().err.count("\n") == 1
    assert main([output]) == 0


@pytest.mark.matrix
def test_killed_while_object_storage_changes_no_reader_loses_a_row(bucket, tmp_path):
    """Before each request that changes something."""
    number, code = 0, KILLED
    while code == KILLED:
        number += 1
        output = f"{bucket}/{number}"
        write_rows(output, [detected("a"), detected("b")], [failed("x")], made_at=1.0)
        write_rows(output, [detected("b", confidence=0.75), detected("c")], [failed("c")], made_at=2.0)
        expected = counted(output)
        at = Moment("urllib3.connectionpool:HTTPConnectionPool.urlopen", number, having="'(POST|PUT|PATCH|DELETE)'")
        code = run_forked([output], tmp_path / "log", at, "pipeline.commands.compact")
        assert counted(output) == expected, number
        delete_files(file.path for file in files_of(output, f"{LOCK}*"))  # it expires
        compact(output)
        assert counted(output) == expected and count_rows(output) == len(expected), number
        left = [len([*files_of(f"{output}/{kind}")]) for kind in (DETECTIONS, DEAD_LETTERS)]
        assert left == [1, 1], number
    assert code == 0 and number > 10


def test_a_shard_that_was_replaced_after_it_was_read_is_not_deleted(strict_gcs_bucket, monkeypatch):
    """Each deletion names the generation that was read, at which the emulator does not look."""
    output = f"gs://{strict_gcs_bucket.name}/out"
    (path,) = write_rows(output, [detected("a")])
    write_rows(output, [detected("b")])
    replaced, content, asked, send = blob_of(path), read_file(path), [], requests.Session.request

    def request(self, method, url, *args, **kwargs):
        asked.append((method, url))
        if method == "GET" and sum("alt=media" in url for _, url in asked) == 3:  # the keys of both are read
            replaced.upload_from_string(content)
        return send(self, method, url, *args, **kwargs)

    monkeypatch.setattr(requests.Session, "request", request)
    generations = {blob.name: str(blob.generation) for blob in strict_gcs_bucket.list_blobs(prefix="out/detections/2")}
    assert all(name.endswith((".parquet", ".jsonl")) for name in generations)
    assert compact(output) == Compacted(2, 1, 2, 0)
    deleted = {unquote(url): parse_qs(urlsplit(url).query) for method, url in asked if method == "DELETE" and LOCK not in url}
    for name, generation in generations.items():
        if name.endswith(".jsonl"):
            continue  # a view
        (condition,) = (query for url, query in deleted.items() if f"/{name}?" in url)
        assert condition["ifGenerationMatch"] == [generation], name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuchscheme://x"], "error: output nosuchscheme://x: expected a folder"),
        ([".", "--until", "soon"], "error: --until: expected days such as 2026-11-20"),
        (["--output", ""], "error: output '': expected a results folder"),
        (["--output", " "], "error: output '': expected a results folder"),
        (["--output", "detectoins"], "error: output 'detectoins': expected a results folder"),
    ],
)
def test_a_wrong_command_is_one_line_and_makes_no_folder(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n"), os.listdir()) == ("", 1, [])
    assert captured.err.startswith(said)
