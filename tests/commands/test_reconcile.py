"""The listing beside the rows: each listed image has one status; the command prints a table and writes manifests."""

import errno
import json
import os
import re
import shutil

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.base import progress
from pipeline import run
from pipeline.commands.reconcile import main
from pipeline.config import load_config
from pipeline.listing import statuses as module
from pipeline.listing.statuses import statuses as statuses_of
from pipeline.results.compact import compact
from pipeline.results.completion import RowVersion
from tests import tfrecord_files
from tests.conftest import write_bright_image
from tests.listing.test_archives import write
from tests.listing.test_videos import write_video
from tests.shard_rows import detected, failed, write_rows

SECOND = 1_700_000_000
VERSION = RowVersion.of(load_config([], {"model.path": "digits"}).as_dict(), ("digits", "1"))
OTHER = VERSION._replace(version="2")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(name, version=1):
    """Makes a file; its generation, which names the version."""
    os.makedirs(os.path.dirname(name), exist_ok=True)
    with open(name, "wb") as file:
        file.write(b"\xff\xd8\xff" + b"x" * version)  # what begins like an image is one whatever its name
    os.utime(name, (SECOND, SECOND))
    return f"{version + 3}-{SECOND}000000000"


def put_rows(images, letters=(), *, version=VERSION, output="out", **more):
    """Writes rows of images, each a name with its generation."""
    images = [detected(absolute(uri), generation, version=version) for uri, generation in images]
    write_rows(output, images, [failed(absolute(uri), *rest) for uri, *rest in letters], version=version, **more)


def statuses(*patterns, version=VERSION, output="out"):
    """Each image's status, and how many images are listed."""
    config = load_config([], {"input": list(patterns or ("in/**",)), "output": output, "model.path": "digits"})
    parts = statuses_of(config, output, version)
    told = [(status, uri.removeprefix(f"{os.getcwd()}/")) for status, images in parts for uri, _ in images]
    assert len(told) == len(set(told))
    return {*told}, sum(status != "orphaned" for status, _ in told)


def absolute(uri):
    """The URI of an image, which lies in the current folder if it is named `in/…`."""
    return f"{os.getcwd()}/{uri}" if uri.startswith("in/") else uri


def printed(capsys, *arguments):
    """Exit code, and what the command printed."""
    code = main(["--input", "in/**", "--output", "out", "--model", "digits", *arguments])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err


@pytest.mark.slow
def test_what_a_job_did_is_complete_and_what_came_afterwards_is_missing(folder, bright_model, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0)
    for name in "abc":
        write_bright_image(folder / "in" / f"{name}.png", (64, 48), (10, 12, 30, 36))
    assert run.main(["--input", "in/**", "--output", "out", "--model", bright_model]) == 0
    capsys.readouterr()
    code, said, shown = printed(capsys, "--model", bright_model)
    assert (code, said[:2], said[-1]) == (0, ["          3 listed", "          3 done"], "complete")
    assert "comparing: 3 images" in shown

    write_bright_image(folder / "in" / "d.png", (64, 48), (10, 12, 30, 36))
    (folder / "in" / "a.png").write_bytes((folder / "in" / "a.png").read_bytes() + b" ")
    code, said, _ = printed(capsys, "--model", bright_model, "--write-missing", "missing.jsonl", "--write-stale", "stale.jsonl")
    assert code == 1
    assert said == [
        "          4 listed",
        "          2 done",
        "          0 dead",
        "          1 stale",
        f"            {folder}/in/a.png",
        "          1 missing",
        f"            {folder}/in/d.png",
        "          0 orphaned",
        "not complete: the same job does what is missing or stale",
    ]
    for name, uri in (("missing", "in/d.png"), ("stale", "in/a.png")):
        (row,) = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
        assert row["uri"] == f"{folder}/{uri}" and re.fullmatch(r"\d+-\d+", row["generation"])
    assert run.main(["--input", "missing.jsonl", "--output", "recovered", "--model", bright_model]) == 0


@pytest.mark.slow
def test_damaged_containers_are_dead_once_the_job_does_not_open_them_again(folder, bright_model, capsys):
    """Their dead letters have no generation: they were missing for ever, of a job that found nothing new."""
    write_bright_image(folder / "a.png", (64, 48), (10, 12, 30, 36))
    images = {f"{number}.png": (folder / "a.png").read_bytes() + os.urandom(1000) for number in range(30)}
    whole = write_video(folder / "whole.mkv", frames=100, codec="mpeg4", g="1")
    for file, share in ((whole, 0.5), (write(folder / "whole.tgz", images), 0.5), (write(folder / "whole.zip", images), 0.99)):
        put(f"in/cut{file.suffix}")
        content = file.read_bytes()
        (folder / f"in/cut{file.suffix}").write_bytes(content[: int(share * len(content))])
    job = ["--input", "in/**", "--output", "out", "--model", bright_model]
    assert run.main(job) == 0
    shutil.copytree("out", "unnoted", ignore=lambda _, names: {"containers"} & {*names})
    assert run.main(job) == 0
    assert "nothing is new" in capsys.readouterr().out
    code, said, _ = printed(capsys, "--model", bright_model)
    assert (code, said[-1]) == (0, "complete"), said
    assert {"          0 missing", "          0 stale", f"            {folder}/in/cut.mkv  broken_file"} < {*said}
    code, said, _ = printed(capsys, "--model", bright_model, "--output", "unnoted")
    assert code == 1 and "          0 stale" in said, "a job without the note opens them again"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--input", "in/**"], "error: no output: expected --output"),
        (["--output", "out"], "error: no input: expected --input"),
        (["--input", "in/**", "--output", "out", "--model", "digits"], "error: output 'out': expected a results folder"),
        (["--input", "in/**", "--output", "out"], "error: no model"),
        (["--input", "in/**", "--output", "projects/p/topics/t"], "error: no output: expected --output"),
        (["--input", "gs://", "--output", "out"], "error: input gs:"),
        (["--input", "in/**", "--output", "out", "--model", "nothing-here"], "error: model nothing-here"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_is_one_line(folder, capsys, arguments, said):
    put("in/a")
    code = main(arguments)
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert captured.err.startswith(said)
    assert os.listdir() == ["in"]


def test_a_pattern_that_names_nothing_is_not_complete(folder, capsys):
    """As a wrong path; where all images are gone, their rows are orphaned."""
    put_rows([("in/a", "1")])
    assert main(["--input", "inn/**", "--output", "out", "--model", "digits"]) == 2
    assert re.fullmatch(r"error: input inn/\*\*: names no image, .*; check the path\n", capsys.readouterr().err)
    assert printed(capsys)[0] == 0


def test_a_manifest_has_its_name_only_when_all_is_compared(folder, capsys):
    (folder / "list.txt").write_text("in/a.png\n")
    (folder / "loop.txt").symlink_to("loop.txt")
    code = main(["--input", "list.txt", "loop.txt", "--output", "out", "--model", "digits", "--write-missing", "missing.jsonl"])
    assert (code, capsys.readouterr().err.count("\n")) == (2, 1)
    assert sorted(os.listdir()) == ["list.txt", "loop.txt"]


def test_results_that_nobody_may_write_are_read(folder, capsys, monkeypatch):
    """As those of another team, or on a disk that is mounted read-only; root may write in any other folder."""
    put_rows([("in/a.jpg", put("in/a.jpg"))])
    monkeypatch.setattr(os, "access", lambda _path, mode: not mode & os.W_OK)
    code, said, _ = printed(capsys)
    assert (code, said[-1]) == (0, "complete")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_no_manifest_and_stays(folder, capsys, make):
    put("in/a.jpg")
    put_rows([])
    make("target")
    os.symlink("target", "link")
    kinds = {name: os.lstat(name).st_mode for name in os.listdir()}
    for name in ("target", "link"):
        expected = (
            f"error: --write-missing {name}: expected a file or a free name, found something else there; choose another name\n"
        )
        assert printed(capsys, "--write-missing", name) == (2, [], expected)
    assert {name: os.lstat(name).st_mode for name in os.listdir()} == kinds


def test_a_link_to_a_manifest_stays_and_its_file_is_written(folder, capsys):
    put("in/a.jpg")
    put_rows([("in/gone.jpg", "1")])
    os.mkdir("lists")
    os.symlink("lists/missing.jsonl", "link")
    for _ in ("new", "replaced"):
        assert printed(capsys, "--write-missing", "link")[0] == 1
        assert os.readlink("link") == "lists/missing.jsonl" and os.listdir("lists") == ["missing.jsonl"]
    with open("link") as file:
        assert json.loads(file.read())["uri"] == absolute("in/a.jpg")


def test_on_cloud_storage(gcs_bucket, capsys):
    for name in ("a", "b"):
        gcs_bucket.blob(f"raw/{name}.png").upload_from_string(b"x")
    output, uri = f"gs://{gcs_bucket.name}/out", f"gs://{gcs_bucket.name}/raw/a.png"
    write_rows(output, [detected(uri, str(gcs_bucket.get_blob("raw/a.png").generation), version=VERSION)], version=VERSION)
    assert main(["--input", f"gs://{gcs_bucket.name}/raw/**", "--output", output, "--model", "digits"]) == 1
    assert capsys.readouterr().out.splitlines()[:2] == ["          2 listed", "          1 done"]


def test_rows_of_other_images_count_only_where_the_pattern_names_them(folder):
    now = put("in/a")
    put_rows([("in/gone\udc80", now), ("in/gone\udc80", "0-1"), ("elsewhere/a", "1"), ("inline:a", "1")])
    assert statuses()[0] == {("missing", "in/a"), ("orphaned", "in/gone\udc80")}


def test_only_rows_of_the_job_count(folder):
    """D5: rows of any version made a check after a release green."""
    now = put("in/a")
    put_rows([("in/a", now)])
    assert statuses()[0] == {("done", "in/a")}
    for other in (OTHER, VERSION._replace(settings="00000000")):
        assert statuses(version=other)[0] == {("missing", "in/a")}
    put_rows([("in/a", now)], version=OTHER)
    assert statuses()[0] == statuses(version=OTHER)[0] == {("done", "in/a")}


def test_the_images_of_a_manifest_have_the_generation_that_they_have_now_and_no_orphans(folder):
    now = put("in/a"), put("in/c")
    (folder / "list.txt").write_text("in/a\nin/b\nin/c\n")
    put_rows([("in/a", "0-1"), ("in/other", "1"), ("in/c", now[1])], [("in/b", "7")])
    assert statuses("list.txt")[0] == {("stale", "in/a"), ("missing", "in/b"), ("done", "in/c")}


def test_an_image_that_several_inputs_name_counts_once_however_few_are_compared_at_once(folder, monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 2)
    for number in range(9):
        put(f"in/{number}")
    assert statuses("in/**", "in/[0-4]", "in/3")[1] == 9


def test_what_is_complete_is_what_the_job_would_not_do(folder, capsys):
    put_rows([], [("in/a", put("in/a"))])
    assert printed(capsys)[0] == 0, "permanently dead is done"
    assert printed(capsys, "--max-megapixels", "1")[0] == 1, "with other limits it is tried again"
    now = put("in/b")
    assert printed(capsys)[0] == 1
    letter = failed(f"{folder}/in/b", now, stage="read", reason="storage_unavailable")
    write_rows("out", letters=[letter], version=VERSION, made_at=2e9)
    code, said, _ = printed(capsys)
    assert code == 1 and said[4:7] == [
        "          0 stale",
        "          1 missing",
        f"            {folder}/in/b  storage_unavailable",
    ]


def test_an_input_with_a_folder_that_cannot_be_listed_is_not_complete(folder, monkeypatch):
    put("in/closed/a")
    scandir = os.scandir

    def failing(path):
        if "closed" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    assert statuses() == ({("missing", "in/closed")}, 1)


def test_images_of_tfrecord_files_and_archives_are_listed_and_results_are_none(folder):
    """D5: an input of TFRecord files alone was complete without any row."""
    os.mkdir("in")
    images = [tfrecord_files.example(image_encoded=content) for content in (b"\xff\xd8\xff", b"\xff\xd8\xff!")]
    tfrecord_files.write(folder / "in" / "a.tfrecord", *images)
    put_rows([("x", "1")], output="in")
    told, listed = statuses(output="in")
    assert {status for status, _ in told} == {"missing"} and listed == 2


def test_where_a_compaction_takes_shards_away_meanwhile_the_command_compares_again(folder, capsys, monkeypatch):
    """Between its listing and the first file that it opens."""
    put_rows([("in/a", put("in/a"))])
    put_rows([("in/b", put("in/b"))])
    opened, compactions = pa.OSFile, []

    def compact_first(*arguments):
        if not compactions:
            compactions.append("begun")
            compactions.append(compact("out").before)
        return opened(*arguments)

    monkeypatch.setattr(pa, "OSFile", compact_first)
    code, said, _ = printed(capsys)
    assert (code, said[:2], compactions) == (0, ["          2 listed", "          2 done"], ["begun", 2])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_all_that_is_listed_has_one_status_however_few_are_compared_at_once(tmp_path_factory, data):
    names = [f"{n:02d}" for n in range(12)]
    there = data.draw(st.sets(st.sampled_from(names)))
    old, now, twice, *letters = (data.draw(st.sets(st.sampled_from(names))) for _ in range(6))
    of_any, of_this, of_older = letters
    root = tmp_path_factory.mktemp("reconcile")
    generations = {name: put(f"{root}/in/{name}") for name in there}
    put_rows([(f"{root}/in/{name}", "0-1") for name in old], output=f"{root}/out")
    for some in (now, twice):
        put_rows([(f"{root}/in/{name}", generations.get(name, "9-9")) for name in some], output=f"{root}/out")
    put_rows([], [(f"{root}/in/{name}", "") for name in of_any], output=f"{root}/out")
    put_rows([], [(f"{root}/in/{name}", generations.get(name, "9-9")) for name in of_this], output=f"{root}/out")
    put_rows([], [(f"{root}/in/{name}", "0-1") for name in of_older], output=f"{root}/out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_AT_ONCE", data.draw(st.integers(1, 5)))
        told, listed = statuses(f"{root}/in/**", output=f"{root}/out")
    done = there & (now | twice)
    dead_ones = (there & of_this) - done
    stale = (there & old) - done - dead_ones
    expected = {"done": done, "dead": dead_ones, "stale": stale, "missing": there - done - dead_ones - stale}
    expected |= {"orphaned": (old | now | twice) - there}
    assert told == {(status, f"{root}/in/{name}") for status, some in expected.items() for name in some}
    assert listed == len(there)
