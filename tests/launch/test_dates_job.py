"""A job over days, as a scheduler runs it: the images of its days and no others."""

import json

from pipeline import run
from tests.conftest import write_bright_image
from tests.launch.jobs import rows_of

DAYS = ["2026/10/31", "2026/11/01", "2026/11/03", "2026/11/04"]  # on the 2nd it was quiet


def test_a_job_does_the_images_of_its_days_also_over_a_quiet_one_and_its_dry_run_says_so(tmp_path, bright_model, capsys):
    raw = f"{tmp_path}/raw"
    for day in DAYS:
        write_bright_image(tmp_path / "raw" / day / "cam 1" / "a.png", (64, 48), (10, 12, 30, 36))
    out, dates = tmp_path / "out", "2026-11-01..2026-11-03"
    places = ["--input", raw + "/{date:%Y/%m/%d}/**", "--output", str(out), "--model", bright_model]
    assert run.main([*places, "--dates", dates, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "2 images" in said and f"of {dates}" in said
    assert run.main([*places, "--dates", dates]) == 0
    assert sorted(row["image"]["uri"] for row in rows_of(out)) == [f"{raw}/{day}/cam 1/a.png" for day in DAYS[1:3]]
    assert json.loads((out / "summary.json").read_text())["config"]["dates"] == dates
    assert run.main([*places, "--dates", "2026-11-02"]) == 2
    assert run.main([*places, "--dates", "2026-11-05..2026-11-09"]) == 2
    one, several = capsys.readouterr().err.splitlines()[-2:]
    assert one.startswith(f"error: input {raw}/{{date:%Y/%m/%d}}/**: no file matches; ")
    assert several.startswith(f"error: input {raw}/{{date:%Y/%m/%d}}/**: no file matches on any of 5 days; ")
    assert run.main([*places, "--dates", "2026-11-02", "--allow-empty"]) == 0
