"""How a batch job ends: with nothing to do, with nothing done, with names that are hard to write."""

import json
import re

import pytest

from pipeline.config import load_config
from pipeline.errors import DEAD, DONE
from pipeline.outcome.conclude import Conclusion
from pipeline.results.run_folder import Run
from pipeline.stats.job_stats import JobStats, merge_stats
from pipeline.stats.summary import RunFacts
from tests.forked_jobs import Moment
from tests.launch.jobs import rows_of, write_images
from tests.stats.test_summary import detected, tally_of


@pytest.fixture
def nothing(tmp_path) -> list:
    """Inputs that name no image: a manifest, and a folder with a label."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a label")
    return [tmp_path / "empty.txt", tmp_path / "texts"]


@pytest.fixture
def done_before(arguments, out, tmp_path, run_job):
    """The arguments of a job that has run, less its input; its results stand in `out`."""
    write_images(tmp_path / "in", "good.png")
    assert run_job(*arguments)[0] == 0
    return arguments[2:]


def test_inputs_that_name_nothing_are_an_error(nothing, done_before, out, error_of):
    """In a dry run, too. Rows of an earlier run stay where they are."""
    for dry in ((), ("--dry-run",)):
        for inputs in (nothing[:1], nothing[1:], nothing):
            error = error_of("--input", *inputs, *done_before, *dry)
            assert error.endswith(f"error: input {', '.join(map(str, inputs))}: names no image\n")
    assert len(rows_of(out)) == 1


def test_inputs_that_name_nothing_may_do_so_where_the_user_says_so(nothing, done_before, out, tmp_path, bright_model, run_job):
    """A quiet day exits with 0 and a summary of zeros; rows of an earlier run, and its reports on top, stay where they are."""
    before = (out / "summary.json").read_bytes()
    (earlier,) = (out / "runs").iterdir()
    inputs = [nothing[0], tmp_path / "2026-11-21/*.jpg", tmp_path / "absent.csv"]
    code, printed, error = run_job("--input", *inputs, *done_before, "--allow-empty", "--samples", 3)
    assert (code, error) == (0, "")
    assert "0 images read: 0 detected, 0 dead, 0 skipped" in printed
    assert printed.endswith(f"results in {out}: report.html, summary.json\n")
    (run_folder,) = {*(out / "runs").iterdir()} - {earlier}
    summary = json.loads((run_folder / "summary.json").read_text())
    assert summary["images"] == {"read": 0, "detected": 0, "dead": 0, "skipped": 0}
    assert (run_folder / "report.html").read_text().count("<html") == 1
    assert (out / "summary.json").read_bytes() == before
    assert len(rows_of(out)) == 1 and not list(out.glob(".*"))


def test_where_all_images_die_of_one_cause_the_line_says_it(arguments, out, tmp_path, run_job):
    """Storage that is gone, say: the cause is there to read without opening the dead letters."""
    gone = [str(tmp_path / "gone" / f"{n}.jpg") for n in range(7)]
    (tmp_path / "list.txt").write_text("\n".join([*gone, str(tmp_path / "list.txt")]))
    code, _, error = run_job("--input", tmp_path / "list.txt", *arguments[2:])
    head, example = error.split(", such as: ")
    assert (code, head) == (DEAD, "error: 8 of 8 images failed, more than max_dead_share = 0.5; 7 of them not_found")
    assert example in [f"{path} does not exist; see {out}/dead_letters\n" for path in gone]


@pytest.mark.parametrize(
    ("at", "code"),
    [
        pytest.param(Moment("pipeline.results.layout:create", 1, "fails"), 1, id="from the start"),
        pytest.param(Moment("os:replace", 1, "fails", "/detections/"), 1, id="when rows get their names"),
        pytest.param(Moment("os:replace", 1, "fails", "/summary.json"), 1, id="when the summary is written"),
        pytest.param(Moment("shutil:rmtree", 1, "fails", "/.staging-"), 0, id="when all is done"),
    ],
)
def test_storage_that_fails_at_the_end_is_one_line(at, code, arguments, out, tmp_path, run_job):
    """No traceback; and what is left over does not make a failure of a job that is done."""
    write_images(tmp_path / "in", "good.png")
    found, printed, error = run_job(*arguments, at=at)
    assert found == code and re.fullmatch("error: .*No space left on device.*\n" if code else "", error), error
    assert printed.startswith("1 image read") == (code == 0)
    assert run_job(*arguments)[0] == 0
    assert len(rows_of(out)) == 1


def test_a_thumbnail_that_is_no_picture_costs_the_job_its_sample_alone(tmp_path):
    """The statistics of workers pass storage, where somebody may plant any bytes."""
    stats = merge_stats([tally_of([detected(0, thumbnail=b"no picture")]), JobStats(read=1)], 3)
    facts = RunFacts(1000.0, 1002.5, 1004.5, "run", load_config([], {"write.samples": 3}).as_dict())
    assert Conclusion(Run(str(tmp_path), "run"), facts).reported(stats).code == DONE
    assert json.loads((tmp_path / "summary.json").read_text())["samples"] == []
