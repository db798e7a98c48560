"""Fixtures of tests that run whole jobs."""

import json

import pytest

from pipeline import run


@pytest.fixture
def job(tmp_path, monkeypatch, bright_model, capsys):
    """Runs a job with output `out` in the current folder, and returns its counts of images, which add up."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir(exist_ok=True)

    def start(*arguments):
        code = run.main(["--output", "out", "--model", bright_model, "--max-dead-share", "1", *map(str, arguments)])
        assert code == 0, capsys.readouterr().err
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert summary["startup_seconds"] >= 0, "also where an earlier job of the process has loaded the model"
        images = summary["images"]
        assert images["read"] == images["detected"] + images["dead"] + images["skipped"]
        return images

    return start
