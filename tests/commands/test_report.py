"""The report of a results folder shows the whole folder, whatever the last run did; it can be made anew at any time."""

import json
import os
import re

import pytest

from pipeline import run
from pipeline.__main__ import main as detect_objects
from pipeline.commands import report as report_folder
from tests.launch.jobs import write_images
from tests.shard_rows import detected, failed, write_rows

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "in", "a.png", "b.png", "c.png")
    (tmp_path / "in" / "broken.png").write_bytes(b"")
    return tmp_path


def summed(page):
    """The numbers of the sum at the top, and of that of the last run."""
    lists = re.findall(r'<ul class="sum">(.*?)</ul>', page, re.DOTALL)
    return [[int(number) for number in re.findall(r"<b>(\d+)</b>", each)] for each in lists]


def test_the_page_after_each_job_is_of_the_folder_and_has_the_last_run_as_its_first_section(folder, bright_model, capsys):
    job = ["--output", "out", "--model", bright_model]
    assert run.main(["--input", "in/[ab].png", "in/broken.png", *job]) == 0
    page = (folder / "out" / "report.html").read_text()
    assert summed(page) == [[3, 2, 1], [3, 2, 1, 0]]
    assert re.findall(r"<h2>(.*?)</h2>", page)[0] == "Last run"
    write_images(folder / "in", "broken.png")
    assert detect_objects(["replay", *job, "--allow-uri-prefix", f"{folder}/in/"]) == 0
    page = (folder / "out" / "report.html").read_text()
    assert summed(page) == [[3, 3, 0], [1, 1, 0, 0]]
    assert page.count("data:image/jpeg;base64,") == 3, "also the samples are of the folder"
    (own,) = re.findall(r'href="(runs/[^"]+)"', page)
    assert summed((folder / "out" / own).read_text()) == [[1, 1, 0, 0]], "a run keeps its own page"


def test_a_page_is_made_at_any_time_of_all_rows_or_of_one_run(folder, bright_model, capsys):
    job = ["--output", "out", "--model", bright_model]
    for name in ("a", "b"):
        assert run.main(["--input", f"in/{name}.png", *job]) == 0
    before = (folder / "out" / "report.html").read_bytes()
    (folder / "out" / "report.html").unlink()
    capsys.readouterr()
    assert detect_objects(["report", "out/"]) == 0
    assert capsys.readouterr().out == "out/report.html\n"
    assert (folder / "out" / "report.html").read_bytes() == before
    for one in os.listdir(folder / "out" / "runs"):
        assert report_folder.main(["out", "--run", one, "--to", "one.html"]) == 0
        page = (folder / "one.html").read_text()
        assert summed(page) == [[1, 1, 0], [1, 1, 0, 0]]
    os.mkfifo("pipe")
    assert report_folder.main(["out", "--to", "pipe"]) == 2
    assert "error: --to pipe: expected a file" in capsys.readouterr().err and (folder / "pipe").is_fifo()
    (folder / "in" / "a.png").unlink()
    assert report_folder.main(["out"]) == 0
    page = (folder / "out" / "report.html").read_text()
    assert summed(page)[0] == [2, 2, 0] and page.count("data:image/jpeg;base64,") == 1, "what is gone has no picture"


def test_a_folder_without_results_is_one_line(folder, capsys):
    (folder / "empty").mkdir()
    assert report_folder.main(["empty"]) == 2
    assert (
        capsys.readouterr().err == "error: output empty: expected the results folder of an earlier run, found no results in it\n"
    )
    assert not os.listdir(folder / "empty")
    write_rows("rows", [detected("a.png")])
    assert report_folder.main(["rows", "--run", "0a1b"]) == 2
    assert "rows/runs/0a1b: expected the summary.json that a run" in capsys.readouterr().err


def test_a_folder_of_a_job_that_has_not_ended_has_a_page(folder, capsys):
    """It runs, or was killed, or is a stream; its page has the rows, and no last run."""
    write_rows("out", [detected("a.png")], [failed("b.png")])
    assert report_folder.main(["out"]) == 0
    page = (folder / "out" / "report.html").read_text()
    assert summed(page) == [[2, 1, 1]]
    assert {*re.findall(r"<h2>(.*?)</h2>", page)} == {"Dead letters", "Samples", "Classes", "Confidence"}


def test_without_a_summary_at_the_top_the_last_run_is_the_newest_in_runs(folder, bright_model):
    job = ["--output", "out", "--model", bright_model]
    for name in ("a", "b"):
        assert run.main(["--input", f"in/{name}.png", *job]) == 0
    before = (folder / "out" / "report.html").read_text()
    newest = json.loads((folder / "out" / "summary.json").read_text())["run"]
    (first,) = (path for path in (folder / "out").glob("runs/*/summary.json") if path.parent.name != newest)
    summary = json.loads(first.read_text())
    first.write_text(json.dumps(summary | {"finished_at": "2026-01-01T00:00:00Z"}))  # both may have ended in one second
    (folder / "out" / "summary.json").unlink()
    assert report_folder.main(["out"]) == 0
    assert (folder / "out" / "report.html").read_text() == before
