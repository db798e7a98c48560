"""A job that takes another version than the rows in its output have says so first, and which flag keeps the old one."""

import re
import shutil
from pathlib import Path

import pytest

from pipeline.config import Config, ModelConfig
from pipeline.launch import other_version
from pipeline.listing.done_rows import DoneRows
from pipeline.results.completion import RowVersion
from tests.forked_jobs import ForkedJob
from tests.launch.jobs import write_images


@pytest.fixture
def job(tmp_path, monkeypatch, bright_model):
    """Runs a job on two images with flags, in a process of its own, as a process keeps its model; what it says of versions."""
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "in", "a.png", "b.png")
    shutil.copytree(f"{bright_model}/3", "m/3")

    def said(*flags: str, images: str = "in/*.png") -> list[str]:
        printed, errors = tmp_path / "printed", tmp_path / "errors"
        printed.write_text("")
        errors.write_text("")
        command = ["--input", images, "--output", "out", "--model", "m", *flags]
        with ForkedJob(command, printed, errors=errors) as started:
            assert started.wait() == 0, errors.read_text()
        return re.findall(r"model bright .* detected again.*", errors.read_text())

    return said


@pytest.mark.slow
def test_a_job_of_another_version_says_how_many_images_it_detects_again(job, tmp_path):
    """As long as it does: not where all are done, where others are given, or where the old version is named."""
    assert job() == []
    shutil.copytree("m/3", "m/4")
    assert job("--model-version", "3") == []
    write_images(tmp_path / "others", "a.png")
    assert job(images="others/*.png") == [], "other images"
    again = "1 image detected by version 3 will be detected again; --model-version 3 keeps that one"
    assert job(images="in/a.png") == [f"model bright 4: {again}"]

    write_images(tmp_path / "in", "c.png", "d.png")
    assert job() == [f"model bright 4: {again}"]
    assert job() == []


@pytest.mark.slow
def test_a_large_listing_is_looked_at_in_part_and_no_flag_is_named_that_would_fail(job, caplog, monkeypatch):
    """The line has the number of rows in the results, too."""
    job()
    (Path("m") / "3").rename("m/4")
    monkeypatch.setattr(other_version, "_LOOKED_AT", 1)
    config = Config(input=("in/*.png",), output="out", model=ModelConfig(path="m"))
    other_version.tell_of_other_version(config, DoneRows("out", RowVersion.of(config.as_dict(), ("bright", "4"))))
    number = "1 of the first 1 images detected by version 3, as 2 images in out, will be detected again"
    said = [message for message in caplog.messages if message.startswith("model bright")]  # libraries may warn, too
    assert said == [f"model bright 4: {number}; --model has no version 3 any more"]
