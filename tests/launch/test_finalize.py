"""How a batch job ends: with nothing to do, with nothing done, with names that are hard to write."""

import json
import re
import shutil

import pytest

from pipeline import run
from pipeline.config import WriteConfig
from pipeline.errors import DONE
from pipeline.launch.finalize import JobReport
from pipeline.stats.job_stats import JobStats, merge_stats
from pipeline.stats.summary import RunFacts
from tests.conftest import without_progress, write_bright_image
from tests.forked_jobs import SystemCall
from tests.launch.jobs import rows_of
from tests.stats.test_summary import detected, tally_of

NOTHING = {
    "a glob that matches nothing": "2026-11-21/*.jpg",
    "a folder that is not there": "2026-11-21/",
    "an empty manifest": "empty.txt",
    "a manifest that is not there": "absent.csv",
    "a folder without an image": "texts/",
}


def empty_inputs(folder):
    (folder / "empty.txt").write_text("")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("a label")


@pytest.fixture(scope="module")
def done_before(tmp_path_factory, run_job, bright_model):
    """The results of a job with one image."""
    folder = tmp_path_factory.mktemp("earlier")
    write_bright_image(folder / "in" / "good.png", (64, 48), (10, 10, 30, 30))
    assert run_job("--input", folder / "in", "--output", folder / "out", "--model", bright_model)[0] == 0
    return folder / "out"


@pytest.mark.parametrize("name", NOTHING.values(), ids=NOTHING)
def test_an_input_that_names_nothing_is_an_error(name, tmp_path, bright_model, done_before, capsys):
    """Such as one with a typo. Rows of an earlier run stay where they are."""
    empty_inputs(tmp_path)
    out = shutil.copytree(done_before, tmp_path / "out")
    command = ["--input", tmp_path / name, "--output", out, "--model", bright_model]
    assert run.main([*map(str, command)]) == 2
    err = without_progress(capsys.readouterr().err)
    assert err.startswith(f"error: input {tmp_path / name}") and err.count("\n") == 1
    assert ": names no image\n" in err or name not in ("empty.txt", "texts/")
    assert len(rows_of(out)) == 1


def test_inputs_that_name_nothing_may_do_so_where_the_user_says_so(tmp_path, run_job, bright_model, done_before):
    """A quiet day exits with 0 and a summary of zeros; rows of an earlier run, and its reports on top, stay where they are."""
    empty_inputs(tmp_path)
    out = shutil.copytree(done_before, tmp_path / "out")
    arguments = ["--output", out, "--model", bright_model]
    inputs, before = [tmp_path / name for name in NOTHING.values() if name != "texts/"], (out / "summary.json").read_bytes()
    (earlier,) = (out / "runs").iterdir()
    code, stdout, err = run_job("--input", *inputs, *arguments, "--allow-empty", "--samples", 3)
    assert (code, err) == (0, "")
    assert "0 images read: 0 detected, 0 dead, 0 skipped" in stdout
    assert stdout.endswith(f"results of model {bright_model} in {out}: report.html, summary.json\n")
    (run_folder,) = {*(out / "runs").iterdir()} - {earlier}
    summary = json.loads((run_folder / "summary.json").read_text())
    assert summary["images"] == {"read": 0, "detected": 0, "dead": 0, "skipped": 0}
    assert (run_folder / "report.html").read_text().count("<html") == 1
    assert (out / "summary.json").read_bytes() == before
    assert len(rows_of(out)) == 1 and not list(out.glob(".*"))


def test_where_all_images_die_of_one_cause_the_line_says_it(tmp_path, run_job, bright_model):
    """Storage that is gone, say: the cause is there to read without opening the dead letters."""
    gone = [str(tmp_path / "gone" / f"{n}.jpg") for n in range(7)]
    (tmp_path / "list.txt").write_text("\n".join([*gone, str(tmp_path / "list.txt")]))
    arguments = ["--input", tmp_path / "list.txt", "--output", tmp_path / "out", "--model", bright_model]

    code, _, err = run_job(*arguments)

    assert code == 1
    head, example = err.split(", such as: ")
    assert head == "error: 8 of 8 images failed, more than max_dead_share = 0.5; 7 of them not_found"
    assert example in [f"{path} does not exist; see {tmp_path}/out/dead_letters\n" for path in gone]


@pytest.mark.parametrize(
    ("place", "code", "said"),
    [
        pytest.param("os.rename:/detections/", 1, "error: the job failed: .*storage is gone", id="when rows get their names"),
        pytest.param("os.rename:/summary.json", 1, "error: the job failed: .*storage is gone", id="when the summary is written"),
        pytest.param("shutil.rmtree:/.staging-", 0, "", id="when all is done"),
    ],
)
def test_storage_that_fails_at_the_end_is_one_line(place, code, said, tmp_path, run_job, bright_model):
    """No traceback; and what is left over does not make a failure of a job that is done."""
    write_bright_image(tmp_path / "in" / "good.png", (64, 48), (10, 10, 30, 30))
    arguments = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--model", bright_model]
    found, stdout, stderr = run_job(*arguments, at=SystemCall(place, None))
    assert (found, stderr.count("\n")) == (code, bool(said)), stderr
    assert re.match(said, stderr)
    assert stdout.startswith("1 images read") == (code == 0)
    assert run_job(*arguments)[0] == 0
    assert len(rows_of(tmp_path / "out")) == 1


def test_a_thumbnail_that_is_no_picture_costs_the_job_its_sample_alone(tmp_path):
    """The statistics of workers pass storage, where somebody may plant any bytes."""
    stats = merge_stats([tally_of([detected(0, thumbnail=b"no picture")]), JobStats(read=1)], 3)
    facts = RunFacts(1000.0, 1002.5, 1004.5, "run", {}, "batch", "/m")
    assert JobReport(str(tmp_path), WriteConfig(samples=3), 0.5).finish(stats, facts, "run") == DONE
    assert json.loads((tmp_path / "summary.json").read_text())["samples"] == []
