"""The results folder as a user meets it: other jobs, other settings, other people's files, and names that are no text."""

import glob
import json
import os
import shutil
import signal

import pyarrow.parquet as pq
import pytest

from tests.forked_jobs import KILLED, ForkedJob, SystemCall
from tests.launch.jobs import files_of, images_of, rows_of, signal_at_work, without_run, write_images, write_work


def test_a_file_name_that_is_no_utf8_is_a_name_like_any_other(tmp_path, run_job, bright_model):
    """It is read, detected, sorted, shown and dead-lettered under its own name."""
    write_images(tmp_path / "in", "a.png", "b.png")
    folder = os.fsencode(tmp_path / "in") + b"/"
    names = [b"\xff\xfe.png", b"caf\xe9 \x80.png", b"\xe7\x8c.png", b"broken\xff.png"]
    for name in names[:3]:
        os.link(folder + b"a.png", folder + name)
    os.close(os.open(folder + names[3], os.O_CREAT))
    out = tmp_path / "out"

    arguments = ["--input", tmp_path / "in", "--output", out, "--model", bright_model]
    code, _, err = run_job(*arguments, "--shards", 2, "--parquet", "--coco", "--samples", 9, "--max-dead-share", 1)

    assert code == 0, err
    found = [os.fsencode(os.path.basename(row["image"]["uri"])) for row in rows_of(out)]
    dead = [os.fsencode(os.path.basename(row["image"]["uri"])) for row in rows_of(out, "dead_letters")]
    assert (sorted(found + dead), images_of(out)["read"]) == (sorted([*names, b"a.png", b"b.png"]), 6)
    assert dead == names[3:]
    rows = sum(len(pq.read_table(path)) for path in glob.glob(f"{out}/detections/*.parquet"))
    assert rows == len(found) == len(json.loads((out / "coco" / "images.json").read_text())["images"])
    assert len(list((out / "samples").iterdir())) == len(found)


def test_two_jobs_with_the_same_output_do_not_disturb_each_other(tmp_path, run_job, bright_model):
    """The same command twice at the same time: both end well, and the results are there once."""
    write_work(tmp_path / "in")
    out = tmp_path / "out"
    arguments = ["--input", tmp_path / "in", "--output", out, "--model", bright_model, "--request-images", 16]
    with ForkedJob(arguments, tmp_path / "log") as first:
        assert run_job(*arguments)[0] == 0
        assert first.wait() == 0, (tmp_path / "log").read_text()
    assert len(rows_of(out)) == images_of(out)["detected"] == 2000
    assert not list(out.glob(".*"))


def test_what_a_killed_job_leaves_is_no_result_and_goes_with_the_next_job(tmp_path, run_job, bright_model):
    """SIGKILL while images are worked on: no reader finds anything, and the next job that ends well cleans up."""
    write_work(tmp_path / "work")
    write_images(tmp_path / "in", "a.png")
    out = tmp_path / "out"
    arguments = ["--output", out, "--model", bright_model, "--request-images", 16, "--input"]
    signal_at_work(signal.SIGKILL, [*arguments, tmp_path / "work"], out)
    assert [path for path in glob.glob(f"{out}/**", recursive=True) if os.path.isfile(path)] == []
    assert len(list(out.glob(".staging-*"))) == 1
    assert run_job(*arguments, tmp_path / "in")[0] == 0
    assert not list(out.glob(".*"))
    assert len(rows_of(out)) == 1


@pytest.fixture(scope="module")
def done_before(tmp_path_factory, run_job, bright_model):
    """The arguments of a job, and the results of one with COCO files."""
    folder = tmp_path_factory.mktemp("earlier")
    write_images(folder / "in", *(f"{n}.png" for n in range(6)))
    arguments = ["--input", folder / "in", "--model", bright_model]
    assert run_job(*arguments, "--output", folder / "out", "--shards", 3, "--coco")[0] == 0
    return arguments, folder


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("run.json#2", id="committed"),
        *("-00001-of-00002.jsonl", "-00001-of-00002.parquet"),
        pytest.param("run.json#3", id="done"),
        "summary.json",
    ],
)
def test_a_job_killed_while_it_commits_is_finished_by_the_next_one(place, tmp_path, run_job, done_before):
    """Before the results are complete nothing happens to the earlier ones; after that the next job gives them their names."""
    arguments, folder = done_before
    out = shutil.copytree(folder / "out", tmp_path / "out")
    arguments = [*arguments, "--output", out, "--shards"]
    earlier = files_of(out)

    assert run_job(*arguments, 2, at=SystemCall(f"os.rename:{place}", signal.SIGKILL))[0] == KILLED
    if place == "run.json#2":
        assert {name: files_of(out).get(name) for name in earlier} == earlier

    refused = run_job(*arguments, 2, "--score-threshold", "0.5")
    assert refused[0] == 2 and "with score_threshold 0.25 where this one has 0.5" in refused[2]
    assert sorted(row["image"]["uri"] for row in rows_of(out)) == [f"{folder}/in/{n}.png" for n in range(6)]

    assert run_job(*arguments, 2)[0] == 0
    assert without_run(files_of(out)) == [
        "dead_letters/dead_letters-00000-of-00001.jsonl",
        "detections/detections-00000-of-00002.jsonl",
        "detections/detections-00001-of-00002.jsonl",
        "index/dead_letters-00000-of-00001.parquet",
        "index/detections-00000-of-00002.parquet",
        "index/detections-00001-of-00002.parquet",
    ]
    assert len(rows_of(out)) == 6


def test_retrying_dead_letters_into_the_same_folder_is_refused_and_wipes_nothing(tmp_path, run_job, bright_model):
    """The line names what differs and the ways out; with one of them the earlier results go."""
    write_images(tmp_path / "in", "good.png")
    (tmp_path / "in" / "broken.png").touch()
    out = tmp_path / "out"
    assert run_job("--input", tmp_path / "in", "--output", out, "--model", bright_model, "--coco", "--samples", 1)[0] == 0
    before = files_of(out)
    write_images(tmp_path / "in", "broken.png")
    again = ["--input", f"{out}/dead_letters/*.jsonl", "--output", out, "--model", bright_model, "--allow-uri-prefix", tmp_path]

    code, _, err = run_job(*again)
    assert code == 2 and err.count("\n") == 1
    assert err.startswith(f'error: output {out}: holds the results of a run with input ["{tmp_path}/in"] where this one has ["')
    assert err.endswith("; give --only-new to add what they lack, --replace to remove them, or another folder\n")
    assert files_of(out) == before
    code, _, err = run_job(*again, "--dry-run")
    assert code == 2 and "--replace to remove them" in err

    assert run_job(*again, "--replace")[0] == 0
    assert [row["image"]["uri"] for row in rows_of(out)] == [f"{tmp_path}/in/broken.png"]
    assert without_run(files_of(out)) == without_run(
        name for name in before if not name.startswith(("coco/", "samples/", "runs/"))
    )


def test_what_an_earlier_run_wrote_on_request_does_not_stay_beside_a_newer_summary(tmp_path, run_job, bright_model):
    """COCO files and samples are those of the latest run, or not there; samples that somebody else put there stay."""
    write_images(tmp_path / "in", "a.png", "b.png")
    out = tmp_path / "out"
    arguments = ["--input", tmp_path / "in", "--output", out, "--model", bright_model]
    assert run_job(*arguments, "--coco", "--samples", 2, "--parquet")[0] == 0
    write_images(out / "samples", "003-mine.jpg", "mine.jpg")
    (tmp_path / "in" / "a.png").rename(tmp_path / "in" / "c.png")
    assert run_job(*arguments, "--samples", 1)[0] == 0
    samples = sorted(path.name for path in (out / "samples").iterdir())
    assert len(samples) == 3 and samples[0] in ("001-b.jpg", "001-c.jpg") and samples[1:] == ["003-mine.jpg", "mine.jpg"]
    assert not list(out.glob("coco/*")) and not list(out.glob("detections/*.parquet"))


def test_input_and_output_may_be_one_folder(tmp_path, run_job, bright_model):
    """Only what this program wrote is left out, and it is counted; images that others put among the results are read."""
    write_images(tmp_path, "a.png", "samples/a.png", "detections/deep/b.png")
    (tmp_path / "dead_letters").mkdir()
    (tmp_path / "dead_letters" / "broken.png").touch()
    arguments = ["--input", tmp_path, "--output", tmp_path, "--model", bright_model, "--samples", 2, "--coco"]
    for skipped in (0, 16):
        assert run_job(*arguments)[0] == 0
        assert images_of(tmp_path) == {"read": 4 + skipped, "detected": 3, "dead": 1, "skipped": skipped}
        assert [row["image"]["uri"] for row in rows_of(tmp_path)] == [
            f"{tmp_path}/{name}" for name in ("a.png", "detections/deep/b.png", "samples/a.png")
        ]
