"""A job over days, as a scheduler runs it: the images of its days and no others, wherever they lie."""

import json

import pytest

from pipeline import run
from tests.conftest import write_bright_image

DAYS = ["2026/10/31", "2026/11/01", "2026/11/03", "2026/11/04"]  # on the 2nd it was quiet


@pytest.fixture(params=["local", "gcs"])
def raw(request, tmp_path):
    """A folder with an image for each of the days."""
    for day in DAYS:
        write_bright_image(tmp_path / "raw" / day / "cam 1" / "a.png", (64, 48), (10, 12, 30, 36))
    if request.param == "local":
        return str(tmp_path / "raw")
    bucket = request.getfixturevalue("gcs_bucket")
    for day in DAYS:
        name = f"{day}/cam 1/a.png"
        bucket.blob(f"raw/{name}").upload_from_filename(tmp_path / "raw" / name)
    return f"gs://{bucket.name}/raw"


def read_uris(output):
    return [json.loads(line)["image"]["uri"] for path in output.glob("detections/*.jsonl") for line in path.open()]


@pytest.mark.parametrize(
    ("dates", "days"),
    [
        pytest.param("2026-11-01", DAYS[1:2], id="day"),
        pytest.param("2026-11-01..2026-11-03", DAYS[1:3], id="range with a quiet day"),
    ],
)
def test_a_job_does_the_images_of_its_days(raw, dates, days, tmp_path, bright_model):
    places = ["--input", raw + "/{date:%Y/%m/%d}/**", "--output", str(tmp_path / "out"), "--model", bright_model]
    assert run.main([*places, "--dates", dates]) == 0
    assert sorted(read_uris(tmp_path / "out")) == [f"{raw}/{day}/cam 1/a.png" for day in days]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["config"]["dates"] == dates


def test_quiet_days_are_an_error_unless_they_may_be(raw, tmp_path, bright_model, capsys):
    places = ["--input", raw + "/{date:%Y/%m/%d}/**", "--output", str(tmp_path / "out"), "--model", bright_model]
    assert run.main([*places, "--dates", "2026-11-02"]) == 2
    assert run.main([*places, "--dates", "2026-11-05..2026-11-09"]) == 2
    one, several = capsys.readouterr().err.splitlines()
    assert one.startswith(f"error: input {raw}/{{date:%Y/%m/%d}}/**: no file matches; ")
    assert several.startswith(f"error: input {raw}/{{date:%Y/%m/%d}}/**: no file matches on any of 5 days; ")
    assert run.main([*places, "--dates", "2026-11-02", "--allow-empty"]) == 0


def test_a_dry_run_says_which_days_are_meant(tmp_path, bright_model, capsys):
    write_bright_image(tmp_path / "raw" / "2026-11-01" / "a.png", (64, 48), (10, 12, 30, 36))
    places = ["--input", f"{tmp_path}/raw/{{date}}/*.png", "--output", str(tmp_path / "out"), "--model", bright_model]
    assert run.main([*places, "--dates", "2026-10-30..2026-11-02", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "1 images" in out and "of 2026-10-30..2026-11-02" in out
